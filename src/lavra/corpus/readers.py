"""Readers: a span of one file -> documents, failures and blank lines, streamed.

A reader never raises for what a file holds: what cannot be read becomes a `Failure` with its place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from lavra.corpus import standard_library
from lavra.corpus.config import Source
from lavra.corpus.documents import Document, Failure, make_document
from lavra.corpus.formats import PROSE, Format, kind_of_key
from lavra.corpus.streams import DAMAGED_STREAM, Line, iter_lines, open_stream, seek_line

EXCERPT_BYTES = 300
PARQUET_ROWS = 256  # rows decoded at a time
PIECE_BYTES = 1 << 20  # documents that a text above `max_bytes` is cut into: this, up to the next blank line
BLANK_LINE = None  # an empty line of a JSONL file: counted, no record

Item = Document | Failure | None


class Span(NamedTuple):
    """A file, or a part of it, and how to read it.

    Attributes:
        path: where the file is.
        name: its path relative to the source, `/` between parts.
        format: reader, kind, file type, compression.
        start: first byte (JSONL, long text) or row group (Parquet).
        stop: end of the same; other formats are read whole.
    """

    path: str
    name: str
    format: Format
    start: int
    stop: int


def read_span(span: Span, source: Source, max_bytes: int) -> Iterator[Item]:
    """Items of a span in order.

    Args:
        span: what to read.
        source: names of the fields that matter in records.
        max_bytes: a larger record becomes an `oversize` failure.
    """
    try:
        if span.format.reader == "jsonl":
            yield from _read_jsonl(span, source, max_bytes)
        elif span.format.reader == "parquet":
            yield from _read_parquet(span, source, max_bytes)
        elif span.format.reader == "long_text":
            yield from _read_long_text(span, max_bytes)
        else:
            yield from _read_whole(span, max_bytes)
    except OSError as error:
        yield Failure("unreadable", 0, 0, str(error.strerror or error)[:EXCERPT_BYTES])


def place(span_name: str, reader: str, position: int) -> str:
    """Where a record is, in words: `books.jsonl:byte 1024`."""
    unit = {"jsonl": "byte", "long_text": "byte", "parquet": "row", "topics": "topic"}.get(reader)
    return f"{span_name}:{unit} {position}" if unit else span_name


# --- whole files --------------------------------------------------------------------------------


def _read_whole(span: Span, max_bytes: int) -> Iterator[Item]:
    with open_stream(span.path, span.format.compression) as stream:
        try:
            data = stream.read(max_bytes + 1)
        except DAMAGED_STREAM as error:
            if not span.format.compression:
                raise
            yield Failure("truncated_stream", 0, 0, str(error)[:EXCERPT_BYTES])
            return
    if len(data) > max_bytes and span.format.reader == "text" and span.format.kind == PROSE:
        yield from _read_long_text(span, max_bytes)  # compressed: only now known to be long
    elif len(data) > max_bytes:
        yield Failure("oversize", 0, span.stop, _excerpt(data))
    elif span.format.reader == "module":
        yield from standard_library.read_module(span.name, data)
    elif span.format.reader == "topics":
        yield from standard_library.read_topics(data)
    else:
        yield _one_document(span, data)


def _one_document(span: Span, data: bytes) -> Item:
    try:
        text = _html_text(data) if span.format.reader == "html" else data.decode()
    except UnicodeDecodeError:
        return Failure("invalid_utf8", 0, len(data), _excerpt(data))
    _, kind, file_type, _ = span.format
    folder = span.name.rpartition("/")[0]
    return make_document(text, kind=kind, file_type=file_type, key="", group=folder or span.name)


def _read_long_text(span: Span, max_bytes: int) -> Iterator[Item]:
    """Prose above `max_bytes` in pieces of whole lines, cut at a blank line once `PIECE_BYTES` are full.

    A line that is no UTF-8, or itself above `max_bytes`, is quarantined alone.
    """
    lines: list[str] = []
    first = held = 0
    with open_stream(span.path, span.format.compression) as stream:
        start = position = seek_line(stream, span.start)
        try:
            for line in _lines(stream, start, span, max_bytes):
                position = line.offset + line.size
                text = _line_text(line)
                if isinstance(text, Failure):
                    yield text
                    continue
                if held >= 2 * PIECE_BYTES or (held >= PIECE_BYTES and not text.strip()):
                    yield _piece(span, lines, first)
                    lines, held = [], 0
                if not lines:
                    first = line.offset
                lines.append(text)
                held += line.size
        except DAMAGED_STREAM as error:
            if not span.format.compression:
                raise
            yield Failure("truncated_stream", position, 0, str(error)[:EXCERPT_BYTES])
    if lines:
        yield _piece(span, lines, first)


def _line_text(line: Line) -> str | Failure:
    reason = "oversize"
    if not line.oversize:
        try:
            return line.data.decode()
        except UnicodeDecodeError:
            reason = "invalid_utf8"
    return Failure(reason, line.offset, line.size, _excerpt(line.data))


def _piece(span: Span, lines: list[str], position: int) -> Item:
    _, kind, file_type, _ = span.format
    return make_document(
        "\n".join(lines).strip("\n"), kind=kind, file_type=file_type, position=position, group=span.name
    )


def _html_text(data: bytes) -> str:
    """Main text of a page; the encoding comes from its meta tag, else from its bytes."""
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.encoding import bytes_to_str, detect_encoding

    page = bytes_to_str(data, detect_encoding(data, from_html_meta=True) or "utf-8")
    return str(extract_plain_text(page, preserve_formatting=True, main_content=True, alt_texts=False))


# --- JSONL --------------------------------------------------------------------------------------


def _read_jsonl(span: Span, source: Source, max_bytes: int) -> Iterator[Item]:
    with open_stream(span.path, span.format.compression) as stream:
        start = seek_line(stream, span.start)
        position = start
        try:
            for line in _lines(stream, start, span, max_bytes):
                position = line.offset + line.size
                yield _jsonl_item(line, span, source)
        except DAMAGED_STREAM as error:
            if not span.format.compression:
                raise
            yield Failure("truncated_stream", position, 0, str(error)[:EXCERPT_BYTES])


def _lines(stream: IO[bytes], start: int, span: Span, max_bytes: int) -> Iterator[Line]:
    """Lines that begin inside the span; a compressed file is read to its end."""
    for line in iter_lines(stream, start, max_bytes):
        if line.offset >= span.stop and not span.format.compression:
            return
        yield line


def _jsonl_item(line: Line, span: Span, source: Source) -> Item:
    data = line.data.removeprefix(b"\xef\xbb\xbf") if line.offset == 0 else line.data

    def failure(reason: str) -> Failure:
        return Failure(reason, line.offset, line.size, _excerpt(data))

    if line.oversize:
        return failure("oversize")
    if not data.strip():
        return BLANK_LINE
    try:
        record = json.loads(data.decode())
    except UnicodeDecodeError:
        return failure("invalid_utf8")
    except (ValueError, RecursionError):
        return failure("invalid_json")
    if not isinstance(record, dict) or not isinstance(record.get(source.text_field), str):
        return failure("no_text")
    item = _record_document(record, span.format, source, line.offset)
    return item if isinstance(item, Document) else failure(item.reason)


def _record_document(
    record: dict[str, Any], file_format: Format, source: Source, position: int
) -> Document | Failure:
    key = _plain(record.get(source.id_field))
    kind, file_type = kind_of_key(key, file_format)
    return make_document(
        record[source.text_field],
        kind=kind,
        file_type=file_type,
        position=position,
        key=key,
        group=_group(record, key, source),
        url=_plain(record.get("url")),
    )


def _group(record: dict[str, Any], key: str, source: Source) -> str:
    """`auto`: the field `group`, else the folder part of a path-like id, else "" (the record itself)."""
    if source.group_field != "auto":
        return _plain(record.get(source.group_field))
    return _plain(record.get("group")) or key.rpartition("/")[0]


def _plain(value: object) -> str:
    """Identifiers as text: numbers are written out, anything nested or absent is ""."""
    return str(value) if isinstance(value, (str, int, float)) else ""


# --- Parquet ------------------------------------------------------------------------------------


def _read_parquet(span: Span, source: Source, max_bytes: int) -> Iterator[Item]:
    try:
        with pq.ParquetFile(span.path) as file:
            wanted = {source.text_field, source.id_field, source.group_field, "group", "url"}
            columns = [name for name in file.schema_arrow.names if name in wanted]
            position = sum(file.metadata.row_group(i).num_rows for i in range(span.start))
            for group in range(span.start, min(span.stop, file.num_row_groups)):
                for batch in file.iter_batches(
                    PARQUET_ROWS, row_groups=[group], columns=columns, use_threads=False
                ):
                    yield from _parquet_items(batch, span.format, source, position, max_bytes)
                    position += batch.num_rows
    except pa.ArrowException as error:
        yield Failure("unreadable", 0, 0, str(error)[:EXCERPT_BYTES])


def _parquet_items(
    batch: pa.RecordBatch, file_format: Format, source: Source, position: int, max_bytes: int
) -> Iterator[Item]:
    names = batch.schema.names
    for row in range(batch.num_rows):
        try:
            record = {name: batch.column(name)[row].as_py() for name in names}
        except UnicodeDecodeError:
            yield Failure("invalid_utf8", position + row, 0, "")
            continue
        text = record.get(source.text_field)
        if not isinstance(text, str):
            yield Failure("no_text", position + row, 0, repr(record)[:EXCERPT_BYTES])
        elif len(text) > max_bytes:
            yield Failure("oversize", position + row, len(text), repr(text[:EXCERPT_BYTES]))
        else:
            yield _record_document(record, file_format, source, position + row)


def _excerpt(data: bytes) -> str:
    return repr(data[:EXCERPT_BYTES])
