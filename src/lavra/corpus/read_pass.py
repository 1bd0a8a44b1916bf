"""First pass over a unit: source files -> documents with their signals, errors, records."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from lavra.artifact import atomic_writer
from lavra.corpus import accounting as acc
from lavra.corpus.accounting import Tally
from lavra.corpus.config import Source
from lavra.corpus.documents import Document, Failure, content_id
from lavra.corpus.language import identify
from lavra.corpus.pii import KINDS, Action, Kind, find_pii, without_pii
from lavra.corpus.readers import Span, place, read_span
from lavra.corpus.records import pack
from lavra.corpus.signals.scan import Splitter, names, scan
from lavra.corpus.store import DOCUMENT_SCHEMA, ERROR_SCHEMA, row_writer
from lavra.corpus.unit_files import ReadUnit, seal, sealed_tally

LANGUAGE_SCORE = "language_score"
PII_COLUMNS = {kind: f"pii_{kind}" for kind in KINDS}
ROW_SCHEMA = pa.schema([*DOCUMENT_SCHEMA, *(pa.field(name, pa.float32()) for name in PII_COLUMNS.values())])
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
    pii: Mapping[Kind, Action]
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
        documents = stack.enter_context(row_writer(unit.documents, ROW_SCHEMA, stored, with_signals))
        errors = stack.enter_context(row_writer(unit.errors, ERROR_SCHEMA))
        records = stack.enter_context(atomic_writer(unit.records))
        for part in task.parts:
            for item in read_span(part.span, part.source, task.max_document_bytes):
                if item is None:
                    tally.add(("blank", part.source_name), 1, 0)
                elif isinstance(item, Failure):
                    errors(_error_row(item, part, tally))
                elif not _sampled(item, task.sampling_rate):
                    _count(item, acc.SAMPLED_OUT, part, tally)
                else:
                    document, counts = _without_pii(item, part, task, tally)
                    _count(document, acc.READ, part, tally)
                    documents(_row(document, counts, part))
                    records.write(pack(document, part.file))
    sums = {part: tally.sum("outcome", part) for part in (acc.READ, acc.ERRORS, acc.SAMPLED_OUT)}
    acc.check(acc.RECORDS_IN, tally.sum("outcome", acc.RECORDS_IN), sums, f"unit {unit.unit}")
    seal(unit.seal, unit.out, (unit.documents, unit.errors, unit.records), tally)
    pa.default_memory_pool().release_unused()


def document_schema(splitters: Sequence[Splitter]) -> pa.Schema:
    """Documents with a column for each signal; float32 holds every count of a document of 16 MiB exactly."""
    added = [LANGUAGE_SCORE, *_added(splitters)]
    return pa.schema([*ROW_SCHEMA, *(pa.field(name, pa.float32()) for name in added)])


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


def _without_pii(
    document: Document, part: UnitPart, task: ReadTask, tally: Tally
) -> tuple[Document, Counter[Kind]]:
    """The document as it is stored, and what was found of each kind that is not kept."""
    looked_for = {kind: action for kind, action in task.pii.items() if action != "keep"}
    counts: Counter[Kind] = Counter(span.kind for span in find_pii(document.text, looked_for))
    for kind, spans in counts.items():
        tally.add(("pii", kind, part.source_name), 1, spans)
    replaced = {kind: action for kind, action in looked_for.items() if action == "replace" and counts[kind]}
    if replaced:
        text, _ = without_pii(document.text, replaced)
        identity, size = content_id(text)
        document = document._replace(text=text, id=identity, bytes=size)
    return document, counts


def _row(document: Document, counts: Counter[Kind], part: UnitPart) -> tuple[Any, ...]:
    origin = (part.source_name, part.span.name, document.key)
    tail = (document.group, document.kind, document.file_type, document.url, "", document.bytes)
    return (document.id.hex(), document.text, *origin, *tail, *(float(counts[kind]) for kind in KINDS))


def _count(document: Document, outcome: str, part: UnitPart, tally: Tally) -> None:
    labels = (part.source_name, document.kind, document.file_type)
    for name in (acc.RECORDS_IN, outcome):
        tally.add(("outcome", name, *labels), 1, document.bytes)


def _sampled(document: Document, rate: float) -> bool:
    """Whether a document is in the sample: by its content, so that copies share one fate."""
    if rate >= 1:
        return True
    digest = hashlib.blake2b(document.id, digest_size=8, key=_SAMPLE_KEY).digest()
    return int.from_bytes(digest, "big") < rate * 2**64
