"""Candidates -> what goes: exact similarity of shingle sets, and one survivor in reach of every document that goes.

Documents are visited in corpus order. One goes only if it is verified to be like an earlier one that stays: similar
ends of a chain do not pull its other end along, and of a cluster of k exactly k - 1 go.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from lavra.corpus.near.bands import PAIR
from lavra.corpus.near.config import NearDuplicates
from lavra.corpus.records import Records
from lavra.corpus.signals.characters import Table
from lavra.corpus.signals.segments import kernel

Similarity = tuple[float, float]  # Jaccard, containment of the later in the earlier
Verified = Mapping[int, Mapping[int, Similarity]]  # place -> earlier place that it is like -> how much


class Removal(NamedTuple):
    """A document that goes, and the one that stays in its place (places, see `bands.place`)."""

    member: int
    kept: int
    jaccard: float
    containment: float


def removals(
    pairs: Records, similarities: Callable[[Records], tuple[Records, Records]], limits: NearDuplicates
) -> tuple[list[Removal], dict[int, int]]:
    """Decide what goes.

    Args:
        pairs: distinct candidates (`PAIR`).
        similarities: Jaccard [P] and containment [P] of pairs.
        limits: from which similarity a document goes.

    Returns:
        Removals by place; and of documents that stay and are linked by verified pairs with others that stay, the
        first of those (a chain has several that stay: they belong on one side of the split).
    """
    verified: dict[int, dict[int, Similarity]] = defaultdict(dict)
    seen: set[tuple[int, int]] = set()
    while len(pairs):
        jaccard, containment = similarities(pairs)
        like = (jaccard >= limits.jaccard) | (containment >= limits.containment)
        seen.update(pairs.tolist())
        for index in np.flatnonzero(like):
            member, other = pairs[index].tolist()
            verified[member][other] = float(jaccard[index]), float(containment[index])
        gone, wanted = _greedy(verified)
        # A document all of whose likenesses go may be like what those went for: look, and decide again.
        pairs = np.array(sorted(wanted - seen), PAIR)
    gone, _ = _greedy(verified)
    found = [Removal(member, kept, *verified[member][kept]) for member, kept in sorted(gone.items())]
    return found, {place: root for place, root in _linked(verified, gone).items() if place != root}


def _greedy(verified: Verified) -> tuple[dict[int, int], set[tuple[int, int]]]:
    """What goes -> what it goes for, and pairs that are worth verifying."""
    gone: dict[int, int] = {}
    wanted = set()
    for member in sorted(verified):
        others = verified[member]
        staying = [other for other in others if other not in gone]
        if staying:
            gone[member] = max(staying, key=lambda other: (*others[other], -other))
        else:
            wanted |= {(member, gone[other]) for other in others}
    return gone, wanted


def _linked(verified: Verified, gone: Mapping[int, int]) -> dict[int, int]:
    """Documents that stay -> the first that stays of all that verified pairs link them with."""
    parent: dict[int, int] = {}

    def root(place: int) -> int:
        while (above := parent.setdefault(place, place)) != place:
            parent[place] = place = parent[above]
        return place

    for member, others in verified.items():
        for other in others:
            high, low = sorted((root(member), root(other)))[::-1]
            parent[high] = low
    first: dict[int, int] = {}
    return {p: first.setdefault(root(p), p) for p in sorted(parent) if p not in gone}


@kernel
def shared(values: Table, bounds: Table, first: Table, second: Table, out: Table) -> None:
    """Size of the intersection of sorted sets `values[bounds[i]:bounds[i + 1]]`, for pairs of set numbers."""
    for p in range(first.shape[0]):
        i, i_stop = bounds[first[p]], bounds[first[p] + 1]
        j, j_stop = bounds[second[p]], bounds[second[p] + 1]
        count = 0
        while i < i_stop and j < j_stop:
            a, b = values[i], values[j]
            count += a == b
            i += a <= b
            j += b <= a
        out[p] = count


def similarity(values: Any, bounds: Records, first: Records, second: Records) -> tuple[Records, Records]:
    """Jaccard similarity, and the share of each first set that its second one holds."""
    both = np.empty(len(first), np.int64)
    shared(values, bounds, first, second, both)
    sizes = np.diff(bounds)
    union = sizes[first] + sizes[second] - both
    return both / np.maximum(union, 1), both / np.maximum(sizes[first], 1)
