"""Which documents are held out: whole groups, chosen by a keyed hash of their name.

Every kind (prose, code) has its own target, in proportion to its bytes. Groups are visited in the
order of their hash, which no other data can change. A group is taken when it fits into what is left
of every kind that it holds, and holds a kind that still needs bytes; groups of both kinds (a module
and its docstrings) are thus held out whole.

A group that alone exceeds a target can never be taken whole (one folder with everything). Where
whole groups fill less than a quarter of a kind's target, documents of such groups are held out one by
one, in the order of their own hash. If even that leaves almost nothing (a corpus of one document), the
tail of the longest document is cut off and held out.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lavra.corpus.documents import content_id
from lavra.corpus.records import KINDS, Records, bucket_count, contains, partition, read_bucket
from lavra.errors import PreflightError

FULL = 0.9  # of a target: the search stops here, or it would go on collecting tiny groups
STARVED = 0.25  # of a target: below, documents are taken out of groups
_TOO_LITTLE, _ADD_TEXT = "there is too little text to hold out a validation part", "add more text"

Chunks = Callable[[], Iterable[Records]]


class Cut(NamedTuple):
    """A document whose tail is held out."""

    unit: int
    row: int
    tail_bytes: int


class SplitPlan(NamedTuple):
    """What is held out.

    Attributes:
        groups: sorted hashes of groups that are held out whole.
        documents: sorted `hash_high` of documents that are held out alone.
        cut: a document whose tail is held out, when nothing else fits.
        target_bytes: of each kind, [K].
        notes: what a reader of the accounting should know.
    """

    groups: Records
    documents: Records
    cut: Cut | None
    target_bytes: tuple[int, ...]
    notes: list[str]


def plan_split(chunks: Chunks, fraction: float, max_bytes: int, scratch: Path) -> SplitPlan:
    """Choose what is held out of the kept documents.

    Args:
        chunks: gives all kept records (`LOCATED`), as often as it is called.
        fraction: share of the kept bytes to hold out.
        max_bytes: upper bound of the bytes held out.
        scratch: folder for temporary files; removed.

    Raises:
        PreflightError: there is no document with two characters to divide.
    """
    count, kept = _totals(chunks)
    total = int(kept.sum())
    if total < 2:
        raise PreflightError(_TOO_LITTLE, hint=_ADD_TEXT)
    target = max(1, min(int(total * fraction), max_bytes))
    targets = np.array([int(kept_k) * target // total for kept_k in kept])  # int64 would overflow at GBs
    buckets = bucket_count(count)
    notes: list[str] = []

    by_group = partition(chunks(), "group", buckets, scratch)
    groups, filled, oversized = _choose(by_group, "group", targets, targets)
    starved = (filled < STARVED * targets) & (targets > 0)
    candidates = (c[starved[c["kind"]] & contains(c["group"], oversized)] for c in chunks())
    by_document = partition(candidates, "hash_high", buckets, scratch)
    documents, more, _ = _choose(by_document, "hash_high", targets - filled, targets)
    shutil.rmtree(scratch)
    filled = filled + more
    if len(documents):
        notes.append(
            f"{len(documents)} documents are held out one by one: their groups are larger than "
            "the validation target"
        )
    cut = None
    if filled.sum() < STARVED * target:
        cut = _longest(chunks(), groups, documents, target - int(filled.sum()))
        notes.append("no document fits into the validation target: the tail of the longest one is held out")
    for kind, kept_k, filled_k, target_k in zip(KINDS, kept, filled, targets, strict=True):
        if kept_k and not filled_k and cut is None:
            notes.append(f"validation holds no {kind}: no group of it fits into its {target_k} bytes")
    return SplitPlan(groups, documents, cut, tuple(int(t) for t in targets), notes)


def _totals(chunks: Chunks) -> tuple[int, Records]:
    """Number of documents, and bytes of each kind [K]."""
    count, kept = 0, np.zeros(len(KINDS), np.int64)
    for chunk in chunks():
        count += len(chunk)
        kept += np.bincount(chunk["kind"], chunk["bytes"], len(KINDS)).astype(np.int64)
    return count, kept


def _choose(
    buckets: Sequence[Path], field: str, room: Records, targets: Records
) -> tuple[Records, Records, Records]:
    """Walk keys in their order and take what fits.

    Args:
        buckets: files of records in the order of `field`.
        field: what makes records belong together.
        room: bytes of each kind that may be taken, [K].
        targets: bytes of each kind wanted altogether, [K].

    Returns:
        Keys taken, bytes taken of each kind [K], and keys that exceed a target alone.
    """
    taken: list[int] = []
    oversized: list[Records] = []
    left = room.copy()
    spare = ((1 - FULL) * targets).astype(np.int64)
    for path in buckets:
        keys, sizes = _sizes(read_bucket(path), field)
        oversized.append(keys[(sizes > targets).any(axis=1)])
        # Room only shrinks: what does not fit now never will, so the slow loop sees few groups.
        for index in np.flatnonzero((sizes <= left).all(axis=1) & ((sizes > 0) @ (left > spare))):
            size = sizes[index]
            if (size <= left).all() and ((left > spare) & (size > 0)).any():
                taken.append(int(keys[index]))
                left -= size
    return np.array(taken, np.uint64), room - left, np.concatenate(oversized)


def _sizes(records: Records, field: str) -> tuple[Records, Records]:
    """Sorted distinct keys [N] and their bytes of each kind [N, K]."""
    keys, inverse = np.unique(records[field], return_inverse=True)
    sizes = np.zeros((len(keys), len(KINDS)), np.int64)
    np.add.at(sizes, (inverse, records["kind"]), records["bytes"].astype(np.int64))
    return keys, sizes


def _longest(chunks: Iterable[Records], groups: Records, documents: Records, wanted: int) -> Cut:
    """The longest document in training, the smallest hash of equals; at most half of it is held out."""
    best: Records | None = None
    for chunk in chunks:
        train = chunk[~is_held_out(chunk, groups, documents)]
        both = train if best is None else np.concatenate([best, train])
        order = np.lexsort((both["hash_high"], -both["bytes"].astype(np.int64)))
        best = both[order[:1]]
    if best is None or not len(best) or best["bytes"][0] < 2:
        raise PreflightError(_TOO_LITTLE, hint=_ADD_TEXT)
    size = int(best["bytes"][0])
    return Cut(int(best["unit"][0]), int(best["row"][0]), max(1, min(wanted, size // 2)))


def is_held_out(records: Records, groups: Records, documents: Records) -> Records:
    """Boolean mask of the records that belong to validation."""
    return contains(records["group"], groups) | contains(records["hash_high"], documents)


def check_cut(text: str, tail_bytes: int, chunks: Iterable[Records]) -> None:
    """Refuse a cut whose halves are blank, equal, or the text of another kept document.

    Raises:
        PreflightError: the corpus is too small and too uniform to be split.
    """
    halves = cut_tail(text, tail_bytes)
    identities = np.array([int.from_bytes(content_id(half)[0][:8], "big") for half in halves], np.uint64)
    distinct = all(half.strip() for half in halves) and identities[0] != identities[1]
    if not distinct or any(np.isin(identities, chunk["hash_high"]).any() for chunk in chunks):
        raise PreflightError(_TOO_LITTLE, hint=_ADD_TEXT)


def cut_tail(text: str, tail_bytes: int) -> tuple[str, str]:
    """Head and tail of a text: about `tail_bytes` of UTF-8, cut after a newline where one is near.

    The newline must lie in the first half of the tail; otherwise the cut is between two characters.
    A text of one character has an empty tail.
    """
    data = text.encode()
    position = len(data) - tail_bytes
    newline = data.find(b"\n", position, position + tail_bytes // 2)
    if newline >= 0:
        position = newline + 1
    while position and data[position] & 0xC0 == 0x80:  # inside a character
        position -= 1
    position = position or len(text[0].encode())
    return data[:position].decode(), data[position:].decode()
