"""Oracle: a walk over the documents, one token at a time, written out here."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lavra.tokens.packing import ConcatRows
from lavra.tokens.sampler import Sampler
from lavra.tokens.windows import Windows

document = st.lists(st.integers(1, 47), max_size=12)
shards = st.lists(st.lists(document, max_size=5), min_size=1, max_size=3).filter(any)


@contextmanager
def windows_over(write_store, shards, seq_len: int):
    with tempfile.TemporaryDirectory() as folder:
        store = write_store(Path(folder), shards)
        yield Windows(store, ConcatRows(store, seq_len))


def rows_of(documents: list[list[int]], seq_len: int) -> list[list[tuple[int, int, int, int]]]:
    """Windows as lists of (input, target, position, document), padding left out."""
    steps = []
    previous = 0  # the virtual end token before the stream
    for number, tokens in enumerate(documents):
        for place, token in enumerate((*tokens, 0)):
            steps.append((previous, token, place, number))
            previous = token
    rows = []
    for start in range(0, len(steps), seq_len):
        row, opening = [], True
        for given_, target, place, number in steps[start : start + seq_len]:
            # A document that was cut starts anew at the window's first input.
            position = 0 if opening or place == 0 else row[-1][2] + 1
            row.append((given_, target, position, number))
            opening = False
        rows.append(row)
    return rows


@settings(max_examples=25, deadline=None)
@given(shards=shards, seq_len=st.integers(1, 40))
def test_windows_equal_a_walk_over_the_documents(write_store, shards, seq_len: int) -> None:
    documents = [d for shard in shards for d in shard]
    expected = rows_of(documents, seq_len)
    with windows_over(write_store, shards, seq_len) as windows:
        assert windows.count == len(expected)
        everything = np.arange(windows.count)
        batch = windows.batch(everything, everything)
    assert batch.tokens.shape == (len(expected), seq_len)
    for i, row in enumerate(expected):
        size = len(row)
        found = zip(
            *(x[i, :size].tolist() for x in (batch.tokens, batch.targets, batch.positions)), strict=True
        )
        assert list(found) == [step[:3] for step in row]
        assert batch.loss_mask[i].tolist() == [True] * size + [False] * (seq_len - size)
    assert not batch.positions[:, 0].any()


@settings(max_examples=30, deadline=None)
@given(shards=shards, seq_len=st.integers(1, 40), epoch=st.integers(0, 3), seed=st.integers(0, 99))
def test_an_epoch_trains_every_stored_token_exactly_once(write_store, shards, seq_len, epoch, seed) -> None:
    stream = [token for shard in shards for d in shard for token in (*d, 0)]
    with windows_over(write_store, shards, seq_len) as windows:
        sampler = Sampler(windows, seed)
        batch = sampler.batch(epoch * windows.count + np.arange(windows.count))
        chosen = sampler.rows(batch.sample_ids.numpy())
        assert sorted(chosen) == list(range(windows.count))
        in_order = np.argsort(chosen)
        assert batch.targets[in_order][batch.loss_mask[in_order]].tolist() == stream


@settings(max_examples=25, deadline=None)
@given(shards=shards, seq_len=st.integers(1, 12), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_the_order_does_not_depend_on_the_batch_size(write_store, shards, seq_len, sizes) -> None:
    with windows_over(write_store, shards, seq_len) as windows:
        sampler = Sampler(windows, 7)
        one = sampler.batch(np.arange(sum(sizes)))  # may span epochs
        first = 0
        for size in sizes:
            part = sampler.batch(np.arange(first, first + size))
            for name in ("tokens", "targets", "positions", "loss_mask", "sample_ids"):
                assert getattr(part, name).equal(getattr(one, name)[first : first + size])
            first += size


@settings(max_examples=25, deadline=None)
@given(shards=shards, seq_len=st.integers(1, 12), data=st.data())
def test_a_sample_traces_back_to_its_documents(write_store, shards, seq_len, data) -> None:
    expected = rows_of([d for shard in shards for d in shard], seq_len)
    with windows_over(write_store, shards, seq_len) as windows:
        sampler = Sampler(windows, 3)
        sample = data.draw(st.integers(0, 3 * windows.count - 1))
        row = expected[int(sampler.rows(np.array([sample]))[0])]
        found = sampler.documents(sample)
        assert [d.id for d in found] == [f"{i:032x}" for i in sorted({step[3] for step in row})]
        assert sum(d.stop - d.start for d in found) == len(row)
        for span in found:
            tokens = windows.store.document(int(span.id, 16))[span.start : span.stop]
            there = windows.store.read(span.tokens, span.tokens + span.stop - span.start)
            assert np.array_equal(tokens, there) and span.source == "text"


def test_epochs_and_seeds_differ_in_order(write_store) -> None:
    with windows_over(write_store, [[[1, 2, 3]] * 100], 4) as windows:
        first, second = Sampler(windows, 0).rows(np.arange(200)).reshape(2, 100)
        other = Sampler(windows, 1).rows(np.arange(100))
    assert not np.array_equal(first, second) and not np.array_equal(first, other)
