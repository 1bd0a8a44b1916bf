"""Rows of the token stream as tensors.

The stream is read with one virtual end token before it, so that the input before a document's first
token is always an end token: it opens the document (position 0), and every stored token, end tokens
included, is the target of exactly one position of one row. What a row has left is padded and masked.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from lavra.batch import Batch
from lavra.tokens.packing import Pieces, Rows
from lavra.tokens.store import TokenStore


class Windows:
    """Training rows over a store: `count` rows of `seq_len` targets."""

    def __init__(self, store: TokenStore, rows: Rows) -> None:
        self.store, self.rows, self.seq_len = store, rows, rows.seq_len
        self.count = int(rows.source_rows[-1])

    def batch(self, rows: NDArray[np.int64], sample_ids: NDArray[np.int64]) -> Batch:
        """Stack rows into a `Batch` of `len(rows)` sequences."""
        shape = (len(rows), self.seq_len)
        pieces = self.rows.pieces(rows)
        lengths = pieces.stop - pieces.start
        targets = np.full(shape, self.store.end_id, np.int64)
        at = pieces.row * self.seq_len + pieces.column
        self.store.read_pieces(targets.reshape(-1), at, pieces.start, pieces.stop)
        tokens = np.empty_like(targets)
        tokens[:, 1:] = targets[:, :-1]
        tokens[pieces.row, pieces.column] = self._tokens_before(pieces.start)
        filled = np.zeros(shape[0], np.int64)
        filled[pieces.row] = pieces.column + lengths  # the last piece of a row counts
        mask = np.arange(self.seq_len) < filled[:, None]
        positions = self._positions(shape, pieces, lengths)
        if (padding := ~mask).any():
            positions[padding], tokens[padding] = 0, self.store.end_id
        return Batch(*map(torch.from_numpy, (tokens, targets, positions, mask, sample_ids.copy())))

    def _tokens_before(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The token before each stream offset: an end token where a document begins, the first of all included."""
        before = np.full(len(starts), self.store.end_id, np.int64)
        documents = self.store.starts
        inside = np.flatnonzero(documents[np.searchsorted(documents, starts, side="right") - 1] < starts)
        self.store.read_pieces(before, inside, starts[inside] - 1, starts[inside])
        return before

    def _positions(
        self, shape: tuple[int, int], pieces: Pieces, lengths: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """`[B, T]`: 0 at each document's opening input and where a piece begins inside a document."""
        starts = self.store.starts
        low = np.searchsorted(starts, pieces.start, side="right")
        counts = (
            np.searchsorted(starts, pieces.stop, side="left") - low
        )  # documents that open after the first
        piece = np.repeat(np.arange(len(lengths)), counts)
        document = np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts) + low[piece]
        column = pieces.column[piece] + starts[document] - pieces.start[piece]
        opened = np.zeros(shape, np.int64)
        opened[pieces.row, pieces.column] = pieces.column
        opened[pieces.row[piece], column] = column
        np.maximum.accumulate(opened, axis=1, out=opened)
        return np.subtract(np.arange(shape[1]), opened, out=opened)
