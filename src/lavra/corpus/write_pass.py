"""Third pass over a unit: what rules, dedup and split decided -> train, validation and dropped parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from lavra.artifact import read_json
from lavra.corpus import accounting as acc
from lavra.corpus.accounting import CONTAMINATED, Tally
from lavra.corpus.dedup import REASONS, copies_of_unit, open_copies
from lavra.corpus.documents import content_id
from lavra.corpus.judge_pass import open_verdicts
from lavra.corpus.near.find import JOINED, regroup
from lavra.corpus.readers import place
from lavra.corpus.records import Records, read_records
from lavra.corpus.split import Cut, cut_tail, is_held_out
from lavra.corpus.store import (
    DOCUMENT_SCHEMA,
    DROPPED_SCHEMA,
    EXCERPT_CHARACTERS,
    iter_part,
    part_writer,
)
from lavra.corpus.unit_files import WORK, ReadUnit, WriteUnit, seal, sealed_tally

COPIES, GROUPS, DOCUMENTS = "copies", "groups.npy", "documents.npy"  # in `work`
FILES = "files.json"  # beside the documents: source, name and reader of every file


class WriteTask(NamedTuple):
    """A unit, the reasons behind its verdicts, names of benchmarks, and the cut when it concerns this unit."""

    unit: WriteUnit
    reasons: Sequence[str]
    benchmarks: Sequence[str]
    cut: Cut | None


def write_unit(task: WriteTask) -> None:
    """Write the parts of a unit."""
    unit, tally = task.unit, Tally()
    if sealed_tally(unit.seal("write"), unit.out) is not None:
        return
    outputs = {side: unit.part(side) for side in (acc.TRAIN, acc.VALIDATION, acc.DROPPED)}
    with ExitStack() as stack:
        write = {
            side: stack.enter_context(
                part_writer(path, DROPPED_SCHEMA if side == acc.DROPPED else DOCUMENT_SCHEMA)
            )
            for side, path in outputs.items()
        }
        for side, batch in _routed(task, tally):
            write[side](batch)
    _check(task, tally)
    seal(unit.seal("write"), unit.out, list(outputs.values()), tally)
    pa.default_memory_pool().release_unused()


def _routed(task: WriteTask, tally: Tally) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Every document of a unit once, in batches with the side that it goes to."""
    unit, work = task.unit, task.unit.out / WORK
    groups, documents = np.load(work / GROUPS), np.load(work / DOCUMENTS)
    copies = copies_of_unit(open_copies(work / COPIES), unit.read.unit)
    verdicts, joined = open_verdicts(unit), np.load(work / JOINED)
    start = 0
    for batch in iter_part(unit.read.documents, DOCUMENT_SCHEMA.names):
        records = regroup(read_records(unit.read.records, start, batch.num_rows), joined)
        rows = np.arange(start, start + batch.num_rows)
        bits = verdicts[start : start + batch.num_rows]
        against, is_copy = bits.any(axis=1), np.isin(rows, copies["row"])
        kept, held_out = ~against & ~is_copy, is_held_out(records, groups, documents)
        yield acc.DROPPED, _judged_rows(batch.filter(pa.array(against)), bits[against], task.reasons)
        copied = batch.filter(pa.array(is_copy))
        files = unit.read.out / FILES
        yield (
            acc.DROPPED,
            _copy_rows(copied, copies[np.isin(copies["row"], rows)], files, task.benchmarks, tally),
        )
        _count(batch.filter(pa.array(kept)), acc.KEPT, tally)
        cut = task.cut.row - start if task.cut and task.cut.row in rows else None
        for side, mask in ((acc.TRAIN, kept & ~held_out), (acc.VALIDATION, kept & held_out)):
            if cut is not None:
                mask[cut] = False  # goes in two parts below
            chosen = batch.filter(pa.array(mask))
            _count(chosen, side, tally)
            yield side, chosen
        if task.cut and cut is not None:
            for side, part in _cut_document(batch.slice(cut, 1), task.cut.tail_bytes):
                _count(part, side, tally)
                yield side, part
        start += batch.num_rows


def document_text(unit: ReadUnit, row: int) -> str:
    """Text of one document of a unit that was read."""
    start = 0
    for batch in iter_part(unit.documents, ["text"]):
        if row < start + batch.num_rows:
            return str(batch.column("text")[row - start].as_py())
        start += batch.num_rows
    raise AssertionError(f"unit {unit.unit} has no row {row}")


def _cut_document(document: pa.RecordBatch, tail_bytes: int) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The head of a document for training and its tail for validation."""
    row = document.to_pylist()[0]
    for side, text in zip((acc.TRAIN, acc.VALIDATION), cut_tail(row["text"], tail_bytes), strict=True):
        identity, size = content_id(text)
        changed = row | {"id": identity.hex(), "text": text, "bytes": size}
        yield side, pa.RecordBatch.from_pylist([changed], DOCUMENT_SCHEMA)


def _judged_rows(batch: pa.RecordBatch, bits: Records, reasons: Sequence[str]) -> pa.RecordBatch:
    """Dropped rows of documents that rules speak against; they are counted where they are judged."""
    against = np.unpackbits(bits, axis=1, count=len(reasons)).astype(bool)
    why = [[reasons[rule] for rule in np.flatnonzero(row).tolist()] for row in against]
    return _dropped(batch, why, [""] * batch.num_rows, [0.0] * batch.num_rows)


def _copy_rows(
    batch: pa.RecordBatch, copies: Records, files: Path, benchmarks: Sequence[str], tally: Tally
) -> pa.RecordBatch:
    """Dropped rows of later copies, with the place of the document that stays, and of those that hold a benchmark's item."""
    _count(batch, acc.DROPPED, tally)
    why = [[REASONS[reason]] for reason in copies["reason"]]
    sizes = zip(*(batch.column(name).to_pylist() for name in ("source", "bytes")), strict=True)
    for reasons, (source, size) in zip(why, sizes, strict=True):
        tally.drop(reasons, source, size)
    kept = [_instead(copy, files, benchmarks) for copy in copies]
    return _dropped(batch, why, kept, copies["similarity"].tolist())


def _dropped(
    batch: pa.RecordBatch, reasons: list[list[str]], duplicate_of: list[str], similarity: list[float]
) -> pa.RecordBatch:
    made = {
        "reasons": reasons,
        "duplicate_of": duplicate_of,
        "similarity": similarity,
        "excerpt": [text.as_py()[:EXCERPT_CHARACTERS] for text in batch.column("text")],
    }
    arrays = [
        pa.array(made[field.name], field.type) if field.name in made else batch.column(field.name)
        for field in DROPPED_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=DROPPED_SCHEMA)


def _instead(copy: Records, files: Path, benchmarks: Sequence[str]) -> str:
    """What a document goes for."""
    file, position = int(copy["kept_file"]), int(copy["kept_position"])
    if REASONS[copy["reason"]] == CONTAMINATED:
        return f"{benchmarks[position]}: line {file}"
    source, name, reader = _files(str(files))[file]
    return f"{source}: {place(name, reader, position)}"


@lru_cache(maxsize=1)
def _files(path: str) -> Any:
    """Source, name and reader of every file; read only by units that hold copies."""
    return read_json(Path(path))


def _count(batch: pa.RecordBatch, outcome: str, tally: Tally) -> None:
    columns = [batch.column(name).to_pylist() for name in ("source", "kind", "file_type", "bytes")]
    for source, kind, file_type, size in zip(*columns, strict=True):
        tally.add(("outcome", outcome, source, kind, file_type), 1, size)


def _check(task: WriteTask, tally: Tally) -> None:
    """What passed the rules was kept or is a copy; what is kept is on one side."""
    where = f"unit {task.unit.read.unit}"
    judged = sealed_tally(task.unit.seal("judge"), task.unit.out)
    assert judged is not None
    kept, train = tally.sum("outcome", acc.KEPT), tally.sum("outcome", acc.TRAIN)
    dropped, validation = tally.sum("outcome", acc.DROPPED), tally.sum("outcome", acc.VALIDATION)
    passed = judged.sum("outcome", acc.PASSED)
    acc.check(acc.PASSED, passed, {acc.KEPT: kept, acc.DROPPED: dropped}, where)
    if task.cut:
        kept = kept[0] + 1, kept[1]  # one document became two
    acc.check(acc.KEPT, kept, {acc.TRAIN: train, acc.VALIDATION: validation}, where)
