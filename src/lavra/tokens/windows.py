"""Windows of the token stream and the stateless sampler: global sample index -> window.

The stream is read with one virtual end token before it, so that the input before a document's first
token is always an end token: it opens the document (position 0), and every stored token, end tokens
included, is the target of exactly one window position. The last window is padded and masked.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from lavra.batch import Batch
from lavra.tokens.permutation import permute
from lavra.tokens.store import TokenStore


class Windows:
    """All windows of `seq_len` targets over a store; window w holds targets [w T, (w+1) T)."""

    def __init__(self, store: TokenStore, seq_len: int) -> None:
        self.store, self.seq_len = store, seq_len
        self.count = -(-store.n_tokens // seq_len)

    def bounds(self, window: int) -> tuple[int, int]:
        """Stream offsets `[start, stop)` of the window's targets."""
        start = window * self.seq_len
        return start, min(start + self.seq_len, self.store.n_tokens)

    def batch(self, windows: NDArray[np.int64], sample_ids: NDArray[np.int64]) -> Batch:
        """Stack windows into a `Batch` of `len(windows)` sequences."""
        shape = (len(windows), self.seq_len)
        tokens = np.full(shape, self.store.end_id, np.int64)
        targets = np.full(shape, self.store.end_id, np.int64)
        positions = np.zeros(shape, np.int64)
        mask = np.zeros(shape, bool)
        for row, window in enumerate(windows):
            start, stop = self.bounds(int(window))
            length = stop - start
            targets[row, :length] = self.store.read(start, stop)
            tokens[row, 1:length] = targets[row, : length - 1]
            if start > 0:
                tokens[row, 0] = self.store.read(start - 1, start)[0]
            positions[row, :length] = self._positions(start, stop)
            mask[row, :length] = True
        return Batch(*map(torch.from_numpy, (tokens, targets, positions, mask, sample_ids.copy())))

    def _positions(self, start: int, stop: int) -> NDArray[np.int64]:
        """0 at each document's opening input and at the window's first input."""
        index = np.arange(start, stop)
        document = np.searchsorted(self.store.starts, index, side="right") - 1
        return index - np.maximum(self.store.starts[document], start)


class Sampler:
    """Global sample index -> window. Each epoch visits every window once, in its own order.

    A pure function of (seed, index): nothing to save, and the order does not depend on batch size,
    number of workers or number of processes.
    """

    def __init__(self, windows: Windows, seed: int) -> None:
        self.windows, self.seed = windows, seed

    def window_ids(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Window of each global sample index."""
        result = np.empty_like(samples)
        epochs, places = np.divmod(samples, self.windows.count)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            result[chosen] = permute(places[chosen], self.windows.count, seed=self.seed, epoch=int(epoch))
        return result

    def batch(self, first: int, count: int) -> Batch:
        """Samples `first .. first+count-1`."""
        samples = np.arange(first, first + count, dtype=np.int64)
        return self.windows.batch(self.window_ids(samples), samples)

    def documents(self, sample: int) -> list[str]:
        """Content ids of the documents in a sample."""
        window = int(self.window_ids(np.array([sample]))[0])
        return self.windows.store.document_ids(*self.windows.bounds(window))
