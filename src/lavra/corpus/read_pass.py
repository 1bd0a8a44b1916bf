"""First pass over a unit: source files -> documents that pass the rules, dropped rows, errors, records."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import pyarrow as pa

from lavra.artifact import atomic_writer
from lavra.corpus import accounting as acc
from lavra.corpus.accounting import Tally
from lavra.corpus.config import Rules, Source
from lavra.corpus.documents import Document, Failure
from lavra.corpus.readers import Span, place, read_span
from lavra.corpus.records import pack
from lavra.corpus.rules import reasons
from lavra.corpus.store import (
    DOCUMENT_SCHEMA,
    DROPPED_SCHEMA,
    ERROR_SCHEMA,
    EXCERPT_CHARACTERS,
    row_writer,
)
from lavra.corpus.unit_files import UnitPaths, seal, sealed_tally

_SAMPLE_KEY = b"lavra sample"
AddRow = Callable[[Sequence[Any]], None]


class UnitPart(NamedTuple):
    """A span to read, and what it belongs to."""

    file: int
    span: Span
    source: Source
    source_name: str


class ReadTask(NamedTuple):
    """Everything `read_unit` needs."""

    paths: UnitPaths
    parts: list[UnitPart]
    rules: Rules
    max_document_bytes: int
    sampling_rate: float


def read_unit(task: ReadTask) -> None:
    """Read, sample and judge the documents of a unit."""
    paths, tally = task.paths, Tally()
    if sealed_tally(paths, "read") is not None:
        return
    outputs = (paths.documents, paths.dropped, paths.part(acc.ERRORS), paths.records)
    with ExitStack() as stack:
        documents = stack.enter_context(row_writer(paths.documents, DOCUMENT_SCHEMA))
        dropped = stack.enter_context(row_writer(paths.dropped, DROPPED_SCHEMA))
        errors = stack.enter_context(row_writer(paths.part(acc.ERRORS), ERROR_SCHEMA))
        records = stack.enter_context(atomic_writer(paths.records))
        for part in task.parts:
            for item in read_span(part.span, part.source, task.max_document_bytes):
                if item is None:
                    tally.add(("blank", part.source_name), 1, 0)
                elif isinstance(item, Failure):
                    errors(_error_row(item, part, tally))
                elif row := _judge(item, part, task, tally, dropped):
                    documents(row)
                    records.write(pack(item, part.file))
    parts = (acc.PASSED, acc.DROPPED, acc.ERRORS, acc.SAMPLED_OUT)
    sums = {part: tally.sum("outcome", part) for part in parts}
    acc.check(acc.RECORDS_IN, tally.sum("outcome", acc.RECORDS_IN), sums, f"unit {paths.unit}")
    seal(paths, "read", outputs, tally)
    pa.default_memory_pool().release_unused()


def _error_row(failure: Failure, part: UnitPart, tally: Tally) -> tuple[Any, ...]:
    span, source = part.span, part.source_name
    for outcome in (acc.RECORDS_IN, acc.ERRORS):
        tally.add(("outcome", outcome, source, span.format.kind, span.format.file_type), 1, failure.bytes)
    tally.add(("error", failure.reason, source), 1, failure.bytes)
    where = place(span.name, span.format.reader, failure.position)
    return source, span.name, where, failure.reason, failure.excerpt


def _judge(
    document: Document, part: UnitPart, task: ReadTask, tally: Tally, dropped: AddRow
) -> tuple[Any, ...] | None:
    """The row of a document that passes; one that does not is counted, and written if a rule drops it."""
    source, size = part.source_name, document.bytes
    labels = (source, document.kind, document.file_type)
    tally.add(("outcome", acc.RECORDS_IN, *labels), 1, size)
    if task.sampling_rate < 1 and not _sampled(document.id, task.sampling_rate):
        tally.add(("outcome", acc.SAMPLED_OUT, *labels), 1, size)
        return None
    origin = (source, part.span.name, document.key)
    identity = document.id.hex()
    if why := reasons(document.text, document.kind, task.rules):
        tally.add(("outcome", acc.DROPPED, *labels), 1, size)
        tally.drop(why, source, size)
        excerpt = document.text[:EXCERPT_CHARACTERS]
        dropped((identity, *origin, document.kind, document.file_type, size, why, "", excerpt))
        return None
    tally.add(("outcome", acc.PASSED, *labels), 1, size)
    tail = (document.group, document.kind, document.file_type, document.url, size)
    return (identity, document.text, *origin, *tail)


def _sampled(identity: bytes, rate: float) -> bool:
    """Whether a document is in the sample: by its content, so that copies share one fate."""
    digest = hashlib.blake2b(identity, digest_size=8, key=_SAMPLE_KEY).digest()
    return int.from_bytes(digest, "big") < rate * 2**64
