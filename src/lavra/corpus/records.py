"""Fixed-width binary records of the documents that pass the rules: what dedup and split work on.

One file a unit, one record a document, in document order. Everything that needs all documents at
once runs on these through files partitioned by a hash: memory does not grow with the corpus.
"""

from __future__ import annotations

import hashlib
import shutil
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from lavra.corpus.documents import Document
from lavra.corpus.formats import CODE, PROSE

Records = np.ndarray[Any, np.dtype[Any]]

KINDS = (PROSE, CODE)
FIELDS = [
    ("hash_high", "<u8"),  # the document id as two numbers
    ("hash_low", "<u8"),
    ("group", "<u8"),  # keyed hash of the group name
    ("bytes", "<u8"),
    ("position", "<u8"),  # of the document in its file
    ("file", "<u4"),  # position of the file in the scan
    ("kind", "u1"),  # position in KINDS
]
RECORD = np.dtype(FIELDS)
LOCATED = np.dtype([*FIELDS, ("unit", "<u4"), ("row", "<u4")])
_PACK = struct.Struct("<QQQQQIB")
_ID = struct.Struct(">QQ")
_GROUP_KEY = b"lavra group"
_CHUNK_ROWS = 1 << 17
_BUCKET_BYTES = 16 << 20
_MAX_BUCKETS = 256  # files open at a time


def pack(document: Document, file: int) -> bytes:
    """The record of a document."""
    high, low = _ID.unpack(document.id)
    kind = KINDS.index(document.kind)
    return _PACK.pack(high, low, group_hash(document.group), document.bytes, document.position, file, kind)


def group_hash(group: str) -> int:
    """Keyed 64-bit hash of a group name: its rank in the split, the same whatever else is in the corpus."""
    digest = hashlib.blake2b(group.encode(), digest_size=8, key=_GROUP_KEY).digest()
    return int.from_bytes(digest, "big")


def read_records(path: Path, start: int = 0, count: int = -1) -> Records:
    """Records `start` to `start + count` of a unit; none when the unit has no file."""
    if not path.exists():
        return np.empty(0, RECORD)
    return np.fromfile(path, RECORD, count=count, offset=start * RECORD.itemsize)


def iter_located(unit: int, path: Path) -> Iterator[Records]:
    """Chunks of one unit's records with their unit and row."""
    start = 0
    while len(chunk := read_records(path, start, _CHUNK_ROWS)):
        located = np.empty(len(chunk), LOCATED)
        for name in RECORD.names or ():
            located[name] = chunk[name]
        located["unit"] = unit
        located["row"] = np.arange(start, start + len(chunk))
        yield located
        start += len(chunk)


def bucket_count(records: int) -> int:
    """Power of two that keeps a bucket near 16 MiB (above 90 million records buckets grow)."""
    wanted = records * LOCATED.itemsize // _BUCKET_BYTES + 1
    return min(_MAX_BUCKETS, 1 << (wanted - 1).bit_length())


def partition(chunks: Iterable[Records], field: str, buckets: int, folder: Path) -> list[Path]:
    """Spread records of any type over files by the leading bits of `field`; order is kept within a file.

    The files, in `folder` (emptied first), follow each other in the order of `field`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    paths = [folder / f"{bucket:04d}.bin" for bucket in range(buckets)]
    shift = np.uint64(64 - (buckets - 1).bit_length())
    with ExitStack() as stack:
        files = [stack.enter_context(open(path, "wb")) for path in paths]
        for chunk in chunks:
            # A shift by 64 is undefined; one bucket takes everything.
            bucket = chunk[field] >> shift if buckets > 1 else np.zeros(len(chunk), np.uint64)
            order = np.argsort(bucket, kind="stable")
            bounds = np.searchsorted(bucket[order], np.arange(buckets + 1, dtype=np.uint64))
            for index in np.flatnonzero(np.diff(bounds)):
                chunk[order[bounds[index] : bounds[index + 1]]].tofile(files[index])
    return paths


def read_bucket(path: Path) -> Records:
    """All records of one file that `partition` wrote."""
    return np.fromfile(path, LOCATED)


def contains(values: Records, members: Records) -> Records:
    """Boolean mask: which values are among the sorted `members`."""
    if not len(members):
        return np.zeros(len(values), bool)
    found = np.searchsorted(members, values)
    return members[np.minimum(found, len(members) - 1)] == values
