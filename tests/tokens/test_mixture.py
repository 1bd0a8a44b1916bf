"""Oracles: walking sample by sample, counting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lavra.errors import PreflightError
from lavra.tokens.mixture import Mixture, Stage, _count_below
from lavra.tokens.packing import ConcatRows
from lavra.tokens.sampler import Sampler
from lavra.tokens.windows import Windows


@given(n=st.integers(0, 400), limit=st.integers(0, 1 << 32), shift=st.integers(0, (1 << 32) - 1))
def test_counting_below_a_limit_equals_the_walk(n: int, limit: int, shift: int) -> None:
    walk = (2654435769 * np.arange(n, dtype=np.uint64) + np.uint64(shift)) & np.uint64((1 << 32) - 1)
    assert _count_below(n, limit, shift) == int((walk < limit).sum())


mixtures = st.fixed_dictionaries(
    {
        "rows": st.lists(st.integers(1, 60), min_size=1, max_size=4),
        "weights": st.lists(
            st.lists(st.floats(0, 1).map(lambda x: round(x, 3)), min_size=4, max_size=4),
            min_size=1, max_size=3,
        ),
        "caps": st.lists(st.one_of(st.none(), st.sampled_from([0.5, 1, 2, 3.7])), min_size=4, max_size=4),
        "gaps": st.lists(st.integers(1, 120), min_size=3, max_size=3),
        "seed": st.integers(0, 1000),
    }
)  # fmt: skip


def build(m: dict) -> Mixture:
    names = [f"s{i}" for i in range(len(m["rows"]))]
    firsts = np.concatenate([[0], np.cumsum(m["gaps"])]).tolist()
    return Mixture(
        dict(zip(names, m["rows"], strict=True)),
        [
            Stage(first, dict(zip(names, [w + (i == 0) * 1e-3 for i, w in enumerate(weights)], strict=False)))
            for first, weights in zip(firsts, m["weights"], strict=False)
        ],
        {name: cap for name, cap in zip(names[1:], m["caps"], strict=False) if cap is not None},
        seed=m["seed"],
    )


@settings(max_examples=60)
@given(m=mixtures, n=st.integers(1, 500))
def test_every_sample_has_its_place_in_its_source_and_counts_agree(m: dict, n: int) -> None:
    mixture = build(m)
    source, number = mixture.locate(np.arange(n))
    for s, rows in enumerate(m["rows"]):
        mine = number[source == s]
        assert np.array_equal(mine, np.arange(len(mine)))  # nothing skipped, nothing twice
        assert mixture.counts(n)[s] == len(mine)
        cap = mixture._caps[s]
        assert cap is None or len(mine) <= cap
        assert mixture.epochs(n)[f"s{s}"] == pytest.approx(len(mine) / rows)
    shuffled = np.random.default_rng(0).permutation(n)
    again = mixture.locate(shuffled)
    assert np.array_equal(again[0], source[shuffled]) and np.array_equal(again[1], number[shuffled])


@given(weights=st.lists(st.floats(0.01, 1), min_size=2, max_size=6), seed=st.integers(0, 99))
def test_shares_hold_in_every_stretch_within_a_few_samples(weights: list[float], seed: int) -> None:
    names = [str(i) for i in range(len(weights))]
    mixture = Mixture(dict.fromkeys(names, 10), [Stage(0, dict(zip(names, weights, strict=True)))], seed=seed)
    source, _ = mixture.locate(np.arange(3000))
    shares = np.array(weights) / sum(weights)
    for start, stop in ((0, 3000), (17, 417), (1111, 2222)):
        counts = np.bincount(source[start:stop], minlength=len(weights))
        assert np.abs(counts - shares * (stop - start)).max() <= 6


def test_a_source_leaves_after_its_epochs_and_the_others_take_its_share() -> None:
    mixture = Mixture(
        {"books": 10, "code": 1000, "web": 1000},
        [Stage(0, {"books": 0.5, "code": 0.25, "web": 0.25})],
        {"books": 3},
    )
    source, number = mixture.locate(np.arange(400))
    assert (source == 0).sum() == 30 and number[source == 0].max() == 29
    last = int(np.flatnonzero(source == 0)[-1])
    assert 55 <= last <= 65
    after = np.bincount(source[last + 1 :], minlength=3)
    assert after[0] == 0 and abs(after[1] - after[2]) <= 4
    (zero, before), (first, later) = mixture.changes()
    assert (zero, first) == (0, last + 1) and before["books"] == pytest.approx(0.5)
    assert later == pytest.approx({"code": 0.5, "web": 0.5})


def test_a_curriculum_changes_weights_at_its_sample_and_goes_on_in_each_source() -> None:
    mixture = Mixture(
        {"web": 50, "quality": 50}, [Stage(0, {"web": 1}), Stage(100, {"web": 0.2, "quality": 0.8})]
    )
    source, number = mixture.locate(np.arange(200))
    assert set(source[:100]) == {0}
    assert 76 <= (source[100:] == 1).sum() <= 84
    assert number[100:][source[100:] == 0].min() == 100  # web goes on after its two epochs


def test_a_stage_added_later_is_the_stage_known_from_the_start() -> None:
    rows, first = {"a": 9, "b": 9}, Stage(0, {"a": 1, "b": 3})
    known = Mixture(rows, [first, Stage(77, {"b": 1})])
    added = Mixture(rows, [first])
    added.begin_stage(Stage(77, {"b": 1}))
    added.begin_stage(Stage(77, {"b": 1}))  # a resumed run says it again
    for a, b in zip(known.locate(np.arange(200)), added.locate(np.arange(200)), strict=True):
        assert np.array_equal(a, b)


def test_the_end_of_a_mixture_is_known_and_an_empty_one_refused() -> None:
    mixture = Mixture({"a": 10, "b": 5}, [Stage(0, {"a": 1, "b": 1})], {"a": 1, "b": 1})
    assert mixture.end == 15
    with pytest.raises(PreflightError, match="`c`"):
        Mixture({"a": 10}, [Stage(0, {"c": 1})])
    with pytest.raises(PreflightError, match="anything left"):
        Mixture({"a": 10}, [Stage(0, {"a": 0})])


def test_a_small_source_is_read_evenly_and_never_past_its_end(write_store, tmp_path) -> None:
    """Megatron-LM#705: a source of small weight ran past its end."""
    parts = [[[1] * 40] * 30, [[2] * 40] * 2]
    store = write_store(tmp_path, parts, sources=["web", "tiny"])
    windows = Windows(store, ConcatRows(store, 8))
    rows = dict(zip(store.sources, np.diff(windows.rows.source_rows).tolist(), strict=True))
    sampler = Sampler(windows, 3, Mixture(rows, [Stage(0, {"web": 0.9, "tiny": 0.1})]))
    n = 10 * rows["tiny"] * 4
    found = np.bincount(sampler.rows(np.arange(n)), minlength=windows.count)
    tiny = found[: rows["tiny"]]
    assert tiny.max() - tiny.min() <= 1  # whole epochs: each row as often as any other
    assert sampler.epochs(n)["tiny"] == pytest.approx(tiny.mean())
    assert set(sampler.source_of(np.arange(n)).tolist()) == {0, 1}


def test_offsets_beyond_32_bits_do_not_wrap() -> None:
    mixture = Mixture({"a": 3_000_000_000, "b": 7}, [Stage(0, {"a": 0.999, "b": 0.001})])
    far = 5_000_000_000
    source, number = mixture.locate(np.arange(far, far + 1000))
    assert number[source == 0].min() > 2**32
    assert mixture.counts(far)[0] == pytest.approx(0.999 * far, abs=10)
