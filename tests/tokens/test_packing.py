"""Oracles: counting every token, a slow best fit over a plain list of rows."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lavra.tokens.packing import ConcatRows, load_plan, plan_rows, save_plan
from lavra.tokens.sampler import Sampler
from lavra.tokens.windows import Windows

documents = st.lists(st.lists(st.integers(1, 47), max_size=30), min_size=1, max_size=12)


def slow_best_fit(lengths: list[int], seq_len: int) -> int:
    """Number of rows of best-fit decreasing, by looking at every open row."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda i: rooms[i])] -= length
        else:
            rooms.append(seq_len - length)
    return len(rooms)


@given(parts=st.lists(documents, min_size=1, max_size=3), seq_len=st.integers(1, 24), fit=st.booleans())
def test_every_token_lies_in_one_row_and_no_document_that_fits_is_cut(
    write_store, parts, seq_len: int, fit: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        store = write_store(Path(name), parts, sources=[f"s{i % 2}" for i in range(len(parts))])
        save_plan(Path(name), "train", plan_rows(store, seq_len, best_fit=fit))
        rows = load_plan(Path(name), "train", seq_len)
        n = int(rows.source_rows[-1])
        pieces = rows.pieces(np.arange(n))
        covered = np.concatenate([np.arange(a, b) for a, b in zip(pieces.start, pieces.stop, strict=True)])
        assert np.array_equal(np.sort(covered), np.arange(store.n_tokens))
        ends = np.append(store.starts[1:], store.n_tokens)
        for start, stop in zip(pieces.start, pieces.stop, strict=True):
            document = np.searchsorted(store.starts, start, side="right") - 1
            assert stop <= ends[document]
            if ends[document] - store.starts[document] <= seq_len:
                assert (start, stop) == (store.starts[document], ends[document])
        used = np.bincount(pieces.row, pieces.stop - pieces.start, n)
        assert used.min() > 0 and used.max() <= seq_len
        assert np.all(pieces.column + pieces.stop - pieces.start <= seq_len)
        if fit:
            lengths = {s: [] for s in range(len(store.sources))}
            for start, stop in zip(pieces.start, pieces.stop, strict=True):
                lengths[int(np.searchsorted(store.source_offsets, start, side="right")) - 1].append(
                    stop - start
                )
            assert n == sum(slow_best_fit(found, seq_len) for found in lengths.values())
        else:
            assert np.array_equal(pieces.row, np.arange(len(pieces.row)))


@given(parts=st.lists(documents, min_size=1, max_size=3), seq_len=st.integers(1, 24))
def test_packed_rows_train_every_token_once_with_the_token_before_as_input(
    write_store, parts, seq_len: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        store = write_store(Path(name), parts)
        windows = Windows(store, plan_rows(store, seq_len, best_fit=True))
        everything = np.arange(windows.count)
        batch = windows.batch(everything, everything)
        stream = store.read(0, store.n_tokens)
        before = np.concatenate([[store.end_id], stream[:-1]])
        found = []
        pieces = windows.rows.pieces(everything)
        for row, column, start, stop in zip(*(a.tolist() for a in pieces), strict=True):
            cells = slice(column, column + stop - start)
            assert batch.targets[row, cells].tolist() == stream[start:stop].tolist()
            assert batch.tokens[row, cells].tolist() == before[start:stop].tolist()
            assert batch.positions[row, cells].tolist() == list(
                range(stop - start)
            )  # one document, one piece
            assert bool(batch.loss_mask[row, cells].all())
            found.append(stop - start)
        assert int(batch.loss_mask.sum()) == sum(found) == store.n_tokens
        assert not batch.positions[~batch.loss_mask].any()


def test_concatenated_rows_never_hold_two_sources(write_store, tmp_path) -> None:
    store = write_store(tmp_path, [[[1] * 9], [[2] * 4]], sources=["web", "books"])
    rows = ConcatRows(store, 4)
    assert rows.source_rows.tolist() == [0, 2, 5]  # books: 5 tokens, web: 10
    pieces = rows.pieces(np.arange(5))
    assert list(zip(pieces.start.tolist(), pieces.stop.tolist(), strict=True)) == [
        (0, 4), (4, 5), (5, 9), (9, 13), (13, 15),
    ]  # fmt: skip


@pytest.mark.parametrize("packing", ["concat", "best_fit", "pad"])
def test_documents_longer_than_a_row_never_clog_the_rows_and_are_counted(
    write_store, tmp_path, packing: str
) -> None:
    """nanochat#590: what never fitted stayed in the buffer until every batch was empty."""
    lengths = [2, 100, 7, 101, 1, 9, 100, 100, 3]  # end token included; rows of 10
    store = write_store(tmp_path, [[[1] * (n - 1) for n in lengths]])
    rows = (
        ConcatRows(store, 10) if packing == "concat" else plan_rows(store, 10, best_fit=packing == "best_fit")
    )
    windows = Windows(store, rows)
    # Whole rows of long documents, and what is left: 2, 7, 1, 1, 9, 3 tokens in rows of 10 or one by one.
    assert windows.count == {"concat": 43, "best_fit": 43, "pad": 46}[packing]
    mask = windows.batch(everything := np.arange(windows.count), everything).loss_mask
    assert int(mask.sum()) == sum(lengths) and bool(mask.any(1).all())  # no row is empty
    spans = [s for row in everything for s in Sampler(windows, seed=1).documents(int(row))]
    trained = Counter()
    for span in spans:
        trained[int(span.id, 16)] += span.stop - span.start
    assert [trained[i] for i in range(len(lengths))] == lengths


def test_a_piece_goes_to_the_fullest_row_that_holds_it(write_store, tmp_path) -> None:
    """The emptiest row would need a third row here; lengths count the end token."""
    store = write_store(tmp_path, [[[1] * (n - 1) for n in (6, 5, 4, 3, 2)]])
    assert plan_rows(store, 10, best_fit=True).source_rows.tolist() == [0, 2]
