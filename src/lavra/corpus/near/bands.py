"""Locality-sensitive hashing: documents whose signatures agree in a band are candidates. Memory does not grow with the corpus.

One file of keys a unit; keys of all units are spread over files by their leading bits, and each file is sorted alone. A key
that k documents share gives at most 2 (k - 1) pairs: each document with the first and with the one before it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from lavra.corpus.records import Records, partition

KEY = np.dtype([("key", "<u8"), ("unit", "<u4"), ("row", "<u4")])
PAIR = np.dtype([("member", "<u8"), ("other", "<u8")])  # places of two documents, the later one first
_SPREAD = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)


def s_curve(similarity: float, bands: int, rows: int) -> float:
    """Probability that a pair of this Jaccard similarity becomes a candidate (Broder 1997; Leskovec et al., 3.4)."""
    return float(1 - (1 - similarity**rows) ** bands)


def place(unit: Records | int, row: Records | int) -> Records:
    """Unit and row as one number; its order is that of the corpus."""
    return np.asarray(unit, np.uint64) << _SHIFT | np.asarray(row, np.uint64)


def band_keys(signatures: Records, unit: int, rows: Records, bands: int) -> Records:
    """`KEY` of every band of every document, [N * bands].

    Args:
        signatures: uint32 [N, bands * rows of a band].
        unit: of the documents.
        rows: of the documents in their unit, [N].
        bands: how many.
    """
    parts = signatures.reshape(len(signatures), bands, signatures.shape[1] // bands)
    keys = np.broadcast_to(np.arange(1, bands + 1, dtype=np.uint64), (len(signatures), bands)) * _SPREAD
    for k in range(parts.shape[2]):
        keys = (keys ^ parts[:, :, k]) * _SPREAD
        keys ^= keys >> _SHIFT
    found = np.empty(keys.size, KEY)
    found["key"], found["unit"], found["row"] = keys.ravel(), unit, np.repeat(rows, bands)
    return found


def candidate_pairs(chunks: Iterable[Records], buckets: int, scratch: Path) -> Iterator[Records]:
    """Distinct `PAIR`s of each bucket of keys; a pair may come from several buckets.

    Args:
        chunks: of `KEY`.
        buckets: files to spread them over, a power of two.
        scratch: folder for temporary files; removed.
    """
    for path in partition(chunks, "key", buckets, scratch):
        keys = np.fromfile(path, KEY)
        path.unlink()
        order = np.lexsort((keys["row"], keys["unit"], keys["key"]))
        places, key = place(keys["unit"], keys["row"])[order], keys["key"][order]
        new = np.ones(len(key), bool)
        new[1:] = key[1:] != key[:-1]
        first = np.maximum.accumulate(np.where(new, np.arange(len(key)), 0))
        same = np.flatnonzero(~new)  # has one before it
        pairs = np.empty(2 * len(same), PAIR)
        pairs["member"] = np.concatenate([places[same], places[same]])
        pairs["other"] = np.concatenate([places[first[same]], places[same - 1]])
        yield np.unique(pairs)
    shutil.rmtree(scratch)
