"""Oracle: adding up step by step."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lavra.tokens.ramps import Ramp, StepPlan, StepSamples, skip

untils = st.lists(st.integers(1, 900), max_size=3, unique=True).map(sorted)


@given(untils=untils, sizes=st.lists(st.integers(1, 9), min_size=4, max_size=4), data=st.data())
def test_steps_follow_each_other_without_gap_and_take_their_ramps_size(untils, sizes, data) -> None:
    lengths = [data.draw(st.sampled_from([1, 2, 4, 8])) for _ in untils]
    plan = StepPlan(
        sizes[3],
        8,
        [Ramp(until, size) for until, size in zip(untils, sizes, strict=False)],
        [Ramp(until, length) for until, length in zip(untils, lengths, strict=True)],
    )
    first = 0
    for step in range(60):
        # A ramp ends where its last whole sample begins.
        size = next((s for u, s in zip(untils, sizes, strict=False) if first < u // 8), sizes[3])
        length = next((n for u, n in zip(untils, lengths, strict=True) if first * 8 < u), 8)
        assert plan.at(step) == StepSamples(first, size, length)
        assert plan.tokens_before(step) == first * 8
        first += size
    for tokens in (1, 8, 100, 777):
        steps = plan.steps_for(tokens)
        assert plan.tokens_before(steps) >= tokens > plan.tokens_before(steps - 1)


@given(ranges=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=5), n=st.integers(0, 60))
def test_skipping_reads_what_is_left_in_order(ranges, n: int) -> None:
    separate = []  # ranges in the global numbering never overlap: what is skipped is not skipped again
    for first, count in sorted(ranges):
        if not separate or first >= sum(separate[-1]):
            separate.append((first, count))
    left = [s for s in range(300) if not any(a <= s < a + n for a, n in separate)]
    assert skip(np.arange(n), separate).tolist() == left[:n]
