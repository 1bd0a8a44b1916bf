"""The stateless sampler: global sample index -> row of the store."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lavra.batch import Batch
from lavra.tokens.mixture import Mixture
from lavra.tokens.permutation import permute
from lavra.tokens.windows import Windows


class DocumentSpan(NamedTuple):
    """A part of a document that lies in a sample.

    Attributes:
        id: content id of the document.
        source: name of its source.
        start: first of its tokens in the sample, counted in the document.
        stop: after the last.
        tokens: stream offset of the first.
        part: number of the corpus part that holds the document.
    """

    id: str
    source: str
    start: int
    stop: int
    tokens: int
    part: int


class Sampler:
    """Global sample index -> row. A pure function of (seed, mixture, index): nothing to save.

    Each epoch over the rows that are drawn together visits every one of them once, in its own order. Without a mixture
    those are all rows of the store, so that every source is read in proportion to its size; with one, the rows of each
    source.
    """

    def __init__(self, windows: Windows, seed: int, mixture: Mixture | None = None) -> None:
        self.windows, self.seed, self.mixture = windows, seed, mixture
        self.sources = windows.store.sources
        assert mixture is None or mixture.sources == self.sources

    def rows(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Row of each global sample index."""
        if self.mixture is None:
            return self._permuted(samples, self.windows.count, "")
        first = self.windows.rows.source_rows
        source, number = self.mixture.locate(samples)
        result = np.empty_like(samples)
        for s in np.unique(source):
            mine = source == s
            size = int(first[s + 1] - first[s])
            result[mine] = first[s] + self._permuted(number[mine], size, self.sources[s])
        return result

    def _permuted(self, numbers: NDArray[np.int64], size: int, name: str) -> NDArray[np.int64]:
        """Rows that the numbers have, epoch after epoch in an order of its own."""
        result = np.empty_like(numbers)
        epochs, places = np.divmod(numbers, size)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            result[chosen] = permute(places[chosen], size, seed=self.seed, epoch=int(epoch), name=name)
        return result

    def batch(self, samples: NDArray[np.int64]) -> Batch:
        """The given samples, stacked."""
        return self.windows.batch(self.rows(samples), samples)

    def source_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Source (index) of each sample."""
        return np.searchsorted(self.windows.rows.source_rows, self.rows(samples), side="right") - 1

    def epochs(self, n: int) -> dict[str, float]:
        """How often each source has been read after `n` samples."""
        if self.mixture is not None:
            return self.mixture.epochs(n)
        return {name: n / self.windows.count for name in self.sources}

    def documents(self, sample: int) -> list[DocumentSpan]:
        """What a sample holds, in the order of the row."""
        store = self.windows.store
        pieces = self.windows.rows.pieces(self.rows(np.array([sample])))
        found = []
        for start, stop in zip(pieces.start.tolist(), pieces.stop.tolist(), strict=True):
            source = self.sources[int(np.searchsorted(store.source_offsets, start, side="right")) - 1]
            for index in store.documents_in(start, stop):
                opens, ends = store.bounds(index)
                first, last = max(start, opens), min(stop, ends)
                place = (first - opens, last - opens, first, store.part_of(index))
                found.append(DocumentSpan(store.document_id(index), source, *place))
        return found
