"""Oracles: the closed forms, written out a second way."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lavra.optim.schedules import lr_multiplier

runs = st.tuples(st.integers(1, 20), st.integers(1, 40), st.integers(1, 30))  # warm-up, constant, decay


@settings(max_examples=50, deadline=None)
@given(run=runs, floor=st.sampled_from([0.0, 0.1]))
def test_warmup_stable_decay_equals_three_straight_lines(run, floor: float) -> None:
    warmup, constant, decay = run
    horizon = warmup + constant + decay
    found = [
        lr_multiplier(s, schedule="wsd", warmup=warmup, horizon=horizon, decay=decay, floor=floor)
        for s in range(horizon)
    ]
    rising = [k / warmup for k in range(1, warmup + 1)]
    falling = [1 - (1 - floor) * k / (decay + 1) for k in range(1, decay + 1)]
    assert found == pytest.approx(rising + [1.0] * constant + falling)


@settings(max_examples=50, deadline=None)
@given(warmup=st.integers(1, 20), after=st.integers(1, 60), floor=st.sampled_from([0.0, 0.1]))
def test_cosine_equals_its_formula(warmup: int, after: int, floor: float) -> None:
    horizon = warmup + after
    for step in range(horizon):
        found = lr_multiplier(step, schedule="cosine", warmup=warmup, horizon=horizon, decay=1, floor=floor)
        if step < warmup:
            assert found == (step + 1) / warmup
        else:
            progress = (step - warmup + 1) / (after + 1)
            assert found == pytest.approx(floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)


@settings(max_examples=50, deadline=None)
@given(run=runs, schedule=st.sampled_from(["wsd", "cosine"]))
def test_no_step_is_wasted_and_the_last_is_the_smallest_once(run, schedule) -> None:
    warmup, constant, decay = run
    horizon = warmup + constant + decay
    found = [
        lr_multiplier(s, schedule=schedule, warmup=warmup, horizon=horizon, decay=decay)
        for s in range(horizon)
    ]
    assert all(0 < value <= 1 for value in found)
    assert found[0] == 1 / warmup and max(found) == 1
    after_warmup = found[warmup:]
    assert after_warmup.count(min(after_warmup)) == 1 and after_warmup[-1] == min(after_warmup)
    assert after_warmup == sorted(after_warmup, reverse=True)


@settings(max_examples=30, deadline=None)
@given(run=runs, longer=st.integers(0, 10**9))
def test_before_decay_the_horizon_does_not_matter(run, longer: int) -> None:
    warmup, constant, decay = run
    horizon = warmup + constant + decay
    for step in range(warmup + constant):
        short, long = (
            lr_multiplier(step, schedule="wsd", warmup=warmup, horizon=h, decay=decay)
            for h in (horizon, horizon + longer)
        )
        assert short == long
