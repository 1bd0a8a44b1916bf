"""Near-duplicates of all units: two passes over the texts of documents that no rule drops, the rest on hashes.

    sign units -> candidate pairs -> shingle sets of candidates -> removals

Every step leaves an atomically written file in `work/near`; an interrupted build goes on from there.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from lavra.artifact import atomic_writer
from lavra.corpus.accounting import NEAR_DUPLICATE
from lavra.corpus.dedup import COPY, REASONS, open_copies
from lavra.corpus.executor import map_units
from lavra.corpus.formats import CODE
from lavra.corpus.near.bands import KEY, PAIR, band_keys, candidate_pairs, place
from lavra.corpus.near.config import NearDuplicates
from lavra.corpus.near.shingles import shingle_sets, signatures
from lavra.corpus.near.verify import Removal, removals, similarity
from lavra.corpus.records import Records, bucket_count, read_records
from lavra.corpus.remaining import iter_remaining
from lavra.corpus.unit_files import WriteUnit

NEAR, JOINED = "near.npy", "joined.npy"  # among the copies; in `work`
_CHUNK = 1 << 16  # keys in memory at a time


class NearTask(NamedTuple):
    """A unit, the exact copies, what to look for, and where results go."""

    unit: WriteUnit
    copies: Path
    limits: NearDuplicates
    folder: Path

    def file(self, name: str) -> Path:
        """A file of this unit."""
        return self.folder / f"{name}-{self.unit.read.unit:05d}"


def find_near_duplicates(
    units: Sequence[WriteUnit],
    copies: Path,
    limits: NearDuplicates,
    work: Path,
    *,
    weights: Sequence[int],
    workers: int,
) -> None:
    """Write `COPY` rows of near-duplicates beside the exact ones, and the groups that belong together.

    Args:
        units: judged.
        copies: folder of exact copies; those are not looked at, and `near.npy` is added.
        limits: what counts as a near-duplicate.
        work: gets `joined.npy`: group hashes [n, 2], a group and the one that it goes with in the split.
    """
    folder = work / "near"
    tasks = [NearTask(unit, copies, limits, folder) for unit in units]
    map_units(sign_unit, tasks, weights, workers=workers, label="corpus: near-duplicates")
    pairs = _pairs(tasks, folder)
    if len(pairs):
        map_units(shingle_unit, tasks, weights, workers=workers, label="corpus: candidates")
    found, linked = _decide(tasks, pairs, limits, folder)
    with atomic_writer(work / JOINED) as file:
        np.save(file, _joined_groups(units, linked))
    with atomic_writer(copies / NEAR) as file:
        np.save(file, _copies(units, found))
    shutil.rmtree(folder)


def sign_unit(task: NearTask) -> None:
    """Band keys of a unit's documents."""
    out = task.file("keys")
    if out.exists():
        return
    with atomic_writer(out) as file:
        for texts, code, rows in _looked_at(task):
            found, sizes = signatures(texts, code, task.limits.bands * task.limits.rows)
            file.write(
                band_keys(found[sizes > 0], task.unit.read.unit, rows[sizes > 0], task.limits.bands).tobytes()
            )


def shingle_unit(task: NearTask) -> None:
    """Shingle sets of a unit's candidates: their sizes and rows, and the hashes one after the other."""
    out = task.file("sets")
    if out.exists():
        return
    pairs = np.load(task.folder / "pairs.npy")
    places = np.unique(np.concatenate([pairs["member"], pairs["other"]]))
    wanted = places[places >> np.uint64(32) == task.unit.read.unit] & np.uint64(0xFFFFFFFF)
    kept_rows, sizes = [], []
    with atomic_writer(task.file("values")) as file:
        for texts, code, rows in _looked_at(task):
            chosen = np.isin(rows, wanted)
            for values in shingle_sets(texts.filter(pa.array(chosen)), code[chosen]):
                file.write(values.tobytes())
                sizes.append(len(values))
            kept_rows.append(rows[chosen])
    with atomic_writer(out) as file:
        np.save(file, np.array([np.concatenate([*kept_rows, []]), sizes], np.int64))


def _looked_at(task: NearTask) -> Iterator[tuple[pa.LargeStringArray, Records, Records]]:
    """Texts, whether they are code, and rows of the documents of a unit that are left."""
    for batch, rows in iter_remaining(task.unit, open_copies(task.copies), ["text", "kind"]):
        code = np.array([kind == CODE for kind in batch.column("kind").to_pylist()], bool)
        yield batch.column("text"), code, rows


def _pairs(tasks: Sequence[NearTask], folder: Path) -> Records:
    """All distinct candidates, in order."""
    path = folder / "pairs.npy"
    if not path.exists():
        files = [task.file("keys") for task in tasks]
        buckets = bucket_count(sum(file.stat().st_size for file in files) // KEY.itemsize)
        found = [np.empty(0, PAIR), *candidate_pairs(_key_chunks(files), buckets, folder / "scratch")]
        with atomic_writer(path) as file:
            np.save(file, np.unique(np.concatenate(found)))
    return np.asarray(np.load(path))


def _key_chunks(files: Sequence[Path]) -> Iterator[Records]:
    for path in files:
        start = 0
        while len(chunk := np.fromfile(path, KEY, _CHUNK, offset=start * KEY.itemsize)):
            yield chunk
            start += len(chunk)


def _decide(
    tasks: Sequence[NearTask], pairs: Records, limits: NearDuplicates, folder: Path
) -> tuple[list[Removal], dict[int, int]]:
    if not len(pairs):
        return [], {}
    sets = [np.load(task.file("sets")) for task in tasks]
    places = np.concatenate([place(t.unit.read.unit, s[0]) for t, s in zip(tasks, sets, strict=True)])
    bounds = np.concatenate([[0], np.cumsum(np.concatenate([s[1] for s in sets]))])
    with open(folder / "values", "wb") as together:
        for task in tasks:
            with open(task.file("values"), "rb") as file:
                shutil.copyfileobj(file, together)
    values = np.memmap(folder / "values", np.uint64, "r")

    def similarities(wanted: Records) -> tuple[Records, Records]:
        first, second = (np.searchsorted(places, wanted[name]) for name in ("member", "other"))
        return similarity(values, bounds, first, second)

    return removals(pairs, similarities, limits)


def _copies(units: Sequence[WriteUnit], found: Sequence[Removal]) -> Records:
    rows = np.zeros(len(found), COPY)
    records = _records(units, [removal.kept for removal in found])
    for row, removal in zip(rows, found, strict=True):
        row["unit"], row["row"] = removal.member >> 32, removal.member & 0xFFFFFFFF
        row["kept_file"] = records[removal.kept]["file"]
        row["kept_position"] = records[removal.kept]["position"]
        row["reason"], row["similarity"] = REASONS.index(NEAR_DUPLICATE), removal.jaccard
    return rows


def _joined_groups(units: Sequence[WriteUnit], linked: dict[int, int]) -> Records:
    """Groups that linked documents join -> the smallest group that they are joined with, [n, 2], sorted."""
    records = _records(units, [place for pair in linked.items() for place in pair])
    parent: dict[int, int] = {}

    def root(group: int) -> int:
        while parent.setdefault(group, group) != group:
            group = parent[group]
        return group

    for member, first in linked.items():
        low, high = sorted(root(int(records[place]["group"])) for place in (member, first))
        parent[high] = low
    moved = [(group, root(group)) for group in sorted(parent) if root(group) != group]
    return np.array(moved, np.uint64).reshape(-1, 2)


def _records(units: Sequence[WriteUnit], places: Sequence[int]) -> dict[int, Records]:
    """The record of each place."""
    by_unit: dict[int, set[int]] = defaultdict(set)
    for where in places:
        by_unit[where >> 32].add(where & 0xFFFFFFFF)
    found: dict[int, Records] = {}
    for unit, rows in by_unit.items():
        records = read_records(units[unit].read.records)
        found |= {unit << 32 | row: records[row] for row in rows}
    return found


def regroup(records: Records, joined: Records) -> Records:
    """Records whose groups are those of the split."""
    if len(joined) and len(records):
        index = np.minimum(np.searchsorted(joined[:, 0], records["group"]), len(joined) - 1)
        moved = joined[index, 0] == records["group"]
        records["group"] = np.where(moved, joined[index, 1], records["group"])
    return records
