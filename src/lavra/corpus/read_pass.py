"""First pass over a unit: source files -> documents with their signals, errors, records."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from lavra.artifact import atomic_writer
from lavra.corpus import accounting as acc
from lavra.corpus.accounting import Tally
from lavra.corpus.config import Source
from lavra.corpus.documents import Document, Failure
from lavra.corpus.language import identify
from lavra.corpus.readers import Span, place, read_span
from lavra.corpus.records import pack
from lavra.corpus.signals.scan import Splitter, names, scan
from lavra.corpus.store import DOCUMENT_SCHEMA, ERROR_SCHEMA, row_writer
from lavra.corpus.unit_files import ReadUnit, seal, sealed_tally

LANGUAGE_SCORE = "language_score"
_SAMPLE_KEY = b"lavra sample"


class UnitPart(NamedTuple):
    """A span to read, and what it belongs to."""

    file: int
    span: Span
    source: Source
    source_name: str


class ReadTask(NamedTuple):
    """Everything `read_unit` needs."""

    unit: ReadUnit
    parts: list[UnitPart]
    splitters: Sequence[Splitter]
    identify: bool
    max_document_bytes: int
    sampling_rate: float


def read_unit(task: ReadTask) -> None:
    """Read, sample and scan the documents of a unit."""
    unit, tally = task.unit, Tally()
    if sealed_tally(unit.seal, unit.out) is not None:
        return
    with ExitStack() as stack:
        with_signals = partial(_with_signals, task=task)
        stored = document_schema(task.splitters)
        documents = stack.enter_context(row_writer(unit.documents, DOCUMENT_SCHEMA, stored, with_signals))
        errors = stack.enter_context(row_writer(unit.errors, ERROR_SCHEMA))
        records = stack.enter_context(atomic_writer(unit.records))
        for part in task.parts:
            for item in read_span(part.span, part.source, task.max_document_bytes):
                if item is None:
                    tally.add(("blank", part.source_name), 1, 0)
                elif isinstance(item, Failure):
                    errors(_error_row(item, part, tally))
                elif row := _row(item, part, task, tally):
                    documents(row)
                    records.write(pack(item, part.file))
    sums = {part: tally.sum("outcome", part) for part in (acc.READ, acc.ERRORS, acc.SAMPLED_OUT)}
    acc.check(acc.RECORDS_IN, tally.sum("outcome", acc.RECORDS_IN), sums, f"unit {unit.unit}")
    seal(unit.seal, unit.out, (unit.documents, unit.errors, unit.records), tally)
    pa.default_memory_pool().release_unused()


def document_schema(splitters: Sequence[Splitter]) -> pa.Schema:
    """Documents with a column for each signal; float32 holds every count of a document of 16 MiB exactly."""
    added = [LANGUAGE_SCORE, *_added(splitters)]
    return pa.schema([*DOCUMENT_SCHEMA, *(pa.field(name, pa.float32()) for name in added)])


def _added(splitters: Sequence[Splitter]) -> list[str]:
    return [name for name in names(splitters) if name not in DOCUMENT_SCHEMA.names]


def _with_signals(batch: pa.RecordBatch, task: ReadTask) -> pa.RecordBatch:
    signals = scan(batch.column("text"), task.splitters)
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    columns[LANGUAGE_SCORE] = np.zeros(batch.num_rows)
    if task.identify:
        guesses = identify(batch.column("text").to_pylist())
        columns["language"] = [guess.code for guess in guesses]
        columns[LANGUAGE_SCORE] = [guess.score for guess in guesses]
    columns |= {name: signals.column(name) for name in _added(task.splitters)}
    schema = document_schema(task.splitters)
    arrays = [pa.array(columns[field.name]).cast(field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _error_row(failure: Failure, part: UnitPart, tally: Tally) -> tuple[Any, ...]:
    span, source = part.span, part.source_name
    for outcome in (acc.RECORDS_IN, acc.ERRORS):
        tally.add(("outcome", outcome, source, span.format.kind, span.format.file_type), 1, failure.bytes)
    tally.add(("error", failure.reason, source), 1, failure.bytes)
    where = place(span.name, span.format.reader, failure.position)
    return source, span.name, where, failure.reason, failure.excerpt


def _row(document: Document, part: UnitPart, task: ReadTask, tally: Tally) -> tuple[Any, ...] | None:
    """The row of a document that is in the sample."""
    source, size = part.source_name, document.bytes
    labels = (source, document.kind, document.file_type)
    tally.add(("outcome", acc.RECORDS_IN, *labels), 1, size)
    sampled = task.sampling_rate >= 1 or _sampled(document.id, task.sampling_rate)
    tally.add(("outcome", acc.READ if sampled else acc.SAMPLED_OUT, *labels), 1, size)
    if not sampled:
        return None
    origin = (source, part.span.name, document.key)
    tail = (document.group, document.kind, document.file_type, document.url, "", size)
    return (document.id.hex(), document.text, *origin, *tail)


def _sampled(identity: bytes, rate: float) -> bool:
    """Whether a document is in the sample: by its content, so that copies share one fate."""
    digest = hashlib.blake2b(identity, digest_size=8, key=_SAMPLE_KEY).digest()
    return int.from_bytes(digest, "big") < rate * 2**64
