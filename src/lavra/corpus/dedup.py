"""Exact deduplication of all units in bounded memory: the first of equal documents survives."""

from __future__ import annotations

import shutil
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from lavra.artifact import atomic_writer
from lavra.corpus.accounting import CONTAMINATED, DUPLICATE, NEAR_DUPLICATE
from lavra.corpus.records import Records, bucket_count, partition, read_bucket

REASONS = (DUPLICATE, NEAR_DUPLICATE, CONTAMINATED)
# One document that goes: why (position in REASONS), for the sake of what, and how alike they are. For a copy `kept_file` and
# `kept_position` are the place of the document that stays; for contamination the item's line, and the benchmark's number.
COPY = np.dtype(
    [
        *[("unit", "<u4"), ("row", "<u4"), ("kept_file", "<u4"), ("kept_position", "<u8")],
        *[("reason", "u1"), ("similarity", "<f4")],
    ]
)


def deduplicate(chunks: Iterable[Records], record_count: int, out: Path) -> None:
    """Write the copies of every bucket of hashes to `out/NNNN.npy`, sorted by unit and row.

    Args:
        chunks: `LOCATED` records by unit and row; of equal hashes the first stays.
        record_count: of all chunks together.
        out: folder for the result; a scratch folder beside it is used and removed.
    """
    scratch = out.with_name(out.name + ".scratch")
    buckets = partition(chunks, "hash_high", bucket_count(record_count), scratch)
    for index, path in enumerate(buckets):
        with atomic_writer(out / f"{index:04d}.npy") as file:
            np.save(file, find_copies(read_bucket(path)))
        path.unlink()
    shutil.rmtree(scratch)


def find_copies(records: Records) -> Records:
    """`COPY` rows of one bucket (records in unit and row order)."""
    order = np.lexsort((records["hash_low"], records["hash_high"]))  # stable: the first stays first
    high, low = records["hash_high"][order], records["hash_low"][order]
    new = np.ones(len(order), bool)
    new[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    kept = order[np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))]
    copies = np.empty(int((~new).sum()), COPY)
    for name in ("unit", "row"):
        copies[name] = records[name][order[~new]]
    copies["reason"], copies["similarity"] = REASONS.index(DUPLICATE), 1
    copies["kept_file"] = records["file"][kept[~new]]
    copies["kept_position"] = records["position"][kept[~new]]
    return np.sort(copies, order=("unit", "row"))


def open_copies(folder: Path) -> list[Records]:
    """All files of `COPY` rows in a folder, mapped from disk, not loaded; each is sorted by unit and row."""
    return [np.asarray(np.load(path, mmap_mode="r")) for path in sorted(folder.glob("*.npy"))]


def copies_of_unit(buckets: Sequence[Records], unit: int) -> Records:
    """`COPY` rows of one unit, sorted by row."""
    found = [np.empty(0, COPY)]
    for copies in buckets:
        # bisect, because numpy would copy the whole column out of the mapped file.
        start, stop = (bisect_left(copies["unit"], value) for value in (unit, unit + 1))
        found.append(np.array(copies[start:stop]))
    return np.sort(np.concatenate(found), order="row")


def iter_kept(chunks: Iterable[Records], copies_folder: Path) -> Iterator[Records]:
    """Of chunks of one unit each, in unit order, what is no copy of an earlier document."""
    buckets = open_copies(copies_folder)
    for unit, unit_chunks in groupby(chunks, lambda chunk: int(chunk["unit"][0])):
        copies = copies_of_unit(buckets, unit)
        for chunk in unit_chunks:
            yield chunk[~np.isin(chunk["row"], copies["row"])]
