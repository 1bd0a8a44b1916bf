"""Oracles: uniqueness and range (a bijection needs no inverse), counting."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lavra.tokens.permutation import permute


def whole(size: int, *, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return permute(np.arange(size, dtype=np.int64), size, seed=seed, epoch=epoch)


def test_every_size_up_to_600_is_permuted_onto_itself() -> None:
    for size in range(1, 601):
        assert np.array_equal(np.sort(whole(size, seed=size)), np.arange(size)), size


@settings(max_examples=40, deadline=None)
@given(size=st.integers(601, 2**40), seed=st.integers(0, 2**63), epoch=st.integers(0, 1000), data=st.data())
def test_large_sizes_keep_samples_distinct_and_in_range(size: int, seed: int, epoch: int, data) -> None:
    start = data.draw(st.integers(0, size - 500))
    index = np.arange(start, start + 500, dtype=np.int64)
    before = index.copy()
    found = permute(index, size, seed=seed, epoch=epoch)
    assert len(np.unique(found)) == 500
    assert found.min() >= 0 and found.max() < size
    assert np.array_equal(index, before)
    # One at a time or together: a place alone decides.
    assert permute(index[7:8], size, seed=seed, epoch=epoch)[0] == found[7]


def test_seed_and_epoch_choose_the_order_and_nothing_else_does() -> None:
    orders = [whole(1000, seed=s, epoch=e) for s in (0, 1, 2) for e in (0, 1, 2)]
    for i, order in enumerate(orders):
        assert np.array_equal(order, whole(1000, seed=i // 3, epoch=i % 3))
        assert all(np.mean(order == other) < 0.02 for other in orders[:i])


def test_places_spread_evenly() -> None:
    # 16 x 16 cells of (where from, where to), 256 orders: chi-squared with 225 degrees of freedom has
    # mean 225 and deviation 21; the permutation's own constraint only lowers it.
    size, cells = 512, 16
    table = np.zeros((cells, cells))
    for seed in range(256):
        np.add.at(table, (np.arange(size) * cells // size, whole(size, seed=seed) * cells // size), 1)
    expected = 256 * size / cells**2
    assert ((table - expected) ** 2 / expected).sum() < 225 + 6 * 21


def test_neighbours_part() -> None:
    gaps = np.abs(np.diff(whole(10_000)))
    assert 2500 < gaps.mean() < 4200  # one third of the size, for a random order
    assert np.mean(gaps == 1) < 0.003
