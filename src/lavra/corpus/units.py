"""Work units: spans of files balanced by bytes, the same for any number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from lavra.corpus.sources import ScanFile, SourceScan

UNIT_BYTES = 32 << 20  # text in one unit; a compressed file cannot be cut and may be larger
_MIN_UNIT_BYTES = 1 << 20
_MIN_UNITS = 16  # a small corpus is cut smaller, so that every core has work
_UNIT_FILES = 4096


class UnitSpan(NamedTuple):
    """A file of the scan, or a part of it.

    Attributes:
        file: position in `SourceScan.files`.
        start: first byte (JSONL, long text) or row group (Parquet).
        stop: end of the same.
    """

    file: int
    start: int
    stop: int


class Manifest(NamedTuple):
    """All units and the share of documents to sample.

    Attributes:
        sampling_rate: 1 for everything.
        units: spans of each unit; their order is the order of the corpus.
        weights: estimated text bytes of each unit.
    """

    sampling_rate: float
    units: list[list[UnitSpan]]
    weights: list[int]

    def to_json(self, scan: SourceScan) -> dict[str, Any]:
        """What must be equal for finished units to be used again."""
        return {
            "sampling_rate": self.sampling_rate,
            "units": [[list(span) for span in unit] for unit in self.units],
            "weights": self.weights,
            "files": scan.inputs(),
        }


def plan_units(scan: SourceScan, max_bytes: int | None) -> Manifest:
    """Pack spans in scan order into units.

    Args:
        scan: the files.
        max_bytes: text wanted; None for everything.
    """
    unit_bytes = min(UNIT_BYTES, max(_MIN_UNIT_BYTES, scan.estimated_text_bytes // _MIN_UNITS))
    rate = 1.0
    if max_bytes is not None and scan.estimated_text_bytes > max_bytes:
        rate = max_bytes / scan.estimated_text_bytes
    units: list[list[UnitSpan]] = []
    weights: list[int] = []
    for span, weight in _spans(scan, unit_bytes):
        if not units or weights[-1] + weight > unit_bytes or len(units[-1]) >= _UNIT_FILES:
            units.append([])
            weights.append(0)
        units[-1].append(span)
        weights[-1] += weight
    return Manifest(rate, units, weights)


def _spans(scan: SourceScan, unit_bytes: int) -> Iterator[tuple[UnitSpan, int]]:
    for index, file in enumerate(scan.files):
        if file.format.reader in ("jsonl", "long_text") and not file.format.compression:
            pieces = max(1, -(-file.size // unit_bytes))
            bounds = [file.size * piece // pieces for piece in range(pieces + 1)]
            for start, stop in pairwise(bounds):
                yield UnitSpan(index, start, stop), stop - start
        elif file.format.reader == "parquet":
            yield from _row_group_spans(index, file, unit_bytes)
        else:
            yield UnitSpan(index, 0, file.size), file.text_bytes


def _row_group_spans(index: int, file: ScanFile, unit_bytes: int) -> Iterator[tuple[UnitSpan, int]]:
    """Runs of row groups; a file without readable metadata is one span that will fail in the open."""
    try:
        with pq.ParquetFile(file.path) as parquet:
            groups = parquet.metadata.num_row_groups
    except (pa.ArrowException, OSError):
        groups = 1
    pieces = max(1, min(groups, -(-file.text_bytes // unit_bytes)))
    bounds = [groups * piece // pieces for piece in range(pieces + 1)]
    for start, stop in pairwise(bounds):
        yield UnitSpan(index, start, stop), file.text_bytes // pieces
