"""Rows of a training batch: which pieces of the token stream lie in each.

    concat     the stream of a source, cut every `seq_len` tokens; nothing is stored
    best_fit   no document is cut that fits in a row (Ding et al. 2024, "Fewer Truncations Improve Language Modeling",
               arXiv:2404.10830): what a long document leaves after whole rows, and every shorter one, goes to the
               fullest row that still has room
    pad        one piece a row, the rest is padding

Rows of a source are consecutive, and no row holds two sources. The plans of `best_fit` and `pad` are files of the
tokens artifact. Every stored token lies in exactly one row.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lavra import artifact
from lavra.tokens.store import TokenStore


class Pieces(NamedTuple):
    """Pieces of some rows, one entry a piece, `[P]` int64 each.

    Attributes:
        row: place in the batch, not the row's number.
        column: where in the row the piece begins.
        start: stream offset of its first target.
        stop: stream offset after its last.
    """

    row: NDArray[np.int64]
    column: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]


class Rows(Protocol):
    """All rows over a store.

    Attributes:
        source_rows: `[sources + 1]` int64, first row of each source, and the number of rows.
    """

    seq_len: int
    source_rows: NDArray[np.int64]

    def pieces(self, rows: NDArray[np.int64]) -> Pieces:
        """What the given rows hold."""


class ConcatRows:
    """Row r of a source holds its targets `[r T, (r+1) T)`; only a source's last row is short."""

    def __init__(self, store: TokenStore, seq_len: int) -> None:
        self.seq_len = seq_len
        self._offsets = store.source_offsets
        self.source_rows: NDArray[np.int64] = np.concatenate(
            [[0], np.cumsum(-(-np.diff(self._offsets) // seq_len))]
        )

    def pieces(self, rows: NDArray[np.int64]) -> Pieces:
        """One piece a row."""
        source = np.searchsorted(self.source_rows, rows, side="right") - 1
        start = self._offsets[source] + (rows - self.source_rows[source]) * self.seq_len
        stop = np.minimum(start + self.seq_len, self._offsets[source + 1])
        return Pieces(np.arange(len(rows)), np.zeros(len(rows), np.int64), start, stop)


class PlannedRows:
    """Rows of a stored plan.

    Args:
        bounds: `[P, 2]` int64, stream offsets of every piece, row after row.
        first: `[rows + 1]` int64, first piece of each row.
        source_rows: `[sources + 1]` int64.
    """

    def __init__(
        self,
        seq_len: int,
        bounds: NDArray[np.int64],
        first: NDArray[np.int64],
        source_rows: NDArray[np.int64],
    ) -> None:
        self.seq_len, self.bounds, self.first, self.source_rows = seq_len, bounds, first, source_rows

    def pieces(self, rows: NDArray[np.int64]) -> Pieces:
        """In the order of the rows, then of their columns."""
        counts = self.first[rows + 1] - self.first[rows]
        row = np.repeat(np.arange(len(rows)), counts)
        place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)  # of a piece in its row
        start, stop = self.bounds[self.first[rows][row] + place].T
        before = np.cumsum(stop - start) - (stop - start)
        column = before - before[np.repeat(np.cumsum(counts) - counts, counts)]
        return Pieces(row, column, start, stop)


def plan_rows(store: TokenStore, seq_len: int, *, best_fit: bool) -> PlannedRows:
    """Pack every source's documents into rows of `seq_len`; without `best_fit` each piece has a row of its own."""
    bounds, counts, source_rows = [], [], [0]
    for first, end in zip(store.source_offsets[:-1], store.source_offsets[1:], strict=True):
        pieces = _cut(store.starts, int(first), int(end), seq_len)
        lengths = pieces[:, 1] - pieces[:, 0]
        row = _best_fit(lengths, seq_len) if best_fit else np.arange(len(pieces))
        order = np.argsort(row, kind="stable")
        bounds.append(pieces[order])
        counts.append(np.bincount(row))
        source_rows.append(source_rows[-1] + len(counts[-1]))
    first_piece = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
    return PlannedRows(seq_len, np.concatenate(bounds), first_piece, np.array(source_rows))


def _cut(starts: NDArray[np.int64], first: int, end: int, seq_len: int) -> NDArray[np.int64]:
    """`[P, 2]`: the documents of stream `[first, end)`, those longer than a row cut into whole rows and a rest."""
    begin = starts[np.searchsorted(starts, first) : np.searchsorted(starts, end)]
    stop = np.append(begin[1:], end)
    counts = -(-(stop - begin) // seq_len)
    document = np.repeat(np.arange(len(begin)), counts)
    place = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = begin[document] + place * seq_len
    return np.stack([start, np.minimum(start + seq_len, stop[document])], axis=1)


def _best_fit(lengths: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
    """Row of each piece: longest first, each to the open row with the least room that holds it."""
    row = np.empty(len(lengths), np.int64)
    rows_with_room: list[list[int]] = [[] for _ in range(seq_len + 1)]
    open_rooms = 0  # bit r is set when some row has room r
    n_rows = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = open_rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            chosen = rows_with_room[room].pop()
            if not rows_with_room[room]:
                open_rooms &= ~(1 << room)
        else:
            room, chosen, n_rows = seq_len, n_rows, n_rows + 1
        row[piece] = chosen
        if left := room - length:
            rows_with_room[left].append(chosen)
            open_rooms |= 1 << left
    return row


def save_plan(folder: Path, split: str, plan: PlannedRows) -> None:
    """Write the plan of a split, `rows-<split>.npz` without pickle."""
    buffer = io.BytesIO()
    np.savez(buffer, bounds=plan.bounds, first=plan.first, source_rows=plan.source_rows)
    artifact.write_bytes(folder / f"rows-{split}.npz", buffer.getvalue())


def load_plan(folder: Path, split: str, seq_len: int) -> PlannedRows:
    """Read what `save_plan` wrote."""
    with np.load(folder / f"rows-{split}.npz", allow_pickle=False) as arrays:
        return PlannedRows(seq_len, arrays["bounds"], arrays["first"], arrays["source_rows"])
