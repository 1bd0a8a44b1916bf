"""The corpus on disk: Parquet parts of a fixed schema, and reading them back batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from lavra.artifact import atomic_writer, read_json

ACCOUNTING = "accounting.json"
BATCH_BYTES = 8 << 20  # text in one record batch and in one Parquet row group
BATCH_ROWS = 1 << 16
EXCERPT_CHARACTERS = 300

# Texts hardly repeat: neither a dictionary nor minimum and maximum are worth their time on them.
_REPEATING = ["source", "path", "group", "kind", "file_type", "language", "reason"]
_PARQUET: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 3,
    "use_dictionary": _REPEATING,
    "write_statistics": False,
}

Split = Literal["train", "validation"]

DOCUMENT_SCHEMA = pa.schema(
    [
        ("id", pa.string()),  # hex BLAKE2b-128 of the UTF-8 text
        ("text", pa.large_string()),  # newlines are \n, no byte order mark
        ("source", pa.string()),
        ("path", pa.string()),  # relative to the source
        ("key", pa.string()),  # the record's own id, or ""
        ("group", pa.string()),  # never straddles train and validation
        ("kind", pa.string()),  # prose or code
        ("file_type", pa.string()),  # ".md", ".py", "docstring", ...
        ("url", pa.string()),
        ("language", pa.string()),  # ISO 639 code, "und", or "" where it was not asked for
        ("bytes", pa.int64()),  # UTF-8 bytes of text
    ]
)
DROPPED_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("path", pa.string()),
        ("key", pa.string()),
        ("kind", pa.string()),
        ("file_type", pa.string()),
        ("bytes", pa.int64()),
        ("reasons", pa.list_(pa.string())),
        ("duplicate_of", pa.string()),  # place of the document that was kept instead
        ("similarity", pa.float32()),  # to that: shared shingles / all shingles of both; 0 without one
        ("excerpt", pa.string()),
    ]
)
ERROR_SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("path", pa.string()),
        ("place", pa.string()),
        ("reason", pa.string()),
        ("excerpt", pa.string()),
    ]
)


# --- reading ------------------------------------------------------------------------------------


def iter_documents(
    corpus_dir: Path, split: Split, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Record batches of one side in part order, at most about `BATCH_BYTES` of text each.

    Args:
        corpus_dir: folder of a complete corpus artifact.
        split: `train` or `validation`.
        columns: names from `DOCUMENT_SCHEMA`; None for all.
    """
    for part in part_paths(corpus_dir, split):
        yield from iter_part(part, columns)


def part_paths(corpus_dir: Path, split: Split) -> list[Path]:
    """Parquet files of one side, in order."""
    return sorted((corpus_dir / split).glob("part-*.parquet"))


def iter_part(path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Record batches of one Parquet file, one row group in memory at a time; none if it does not exist."""
    if not path.exists():
        return
    with pq.ParquetFile(path) as file:
        for index in range(file.num_row_groups):
            yield from file.read_row_group(index, columns=columns, use_threads=False).to_batches()


def find_document(corpus_dir: Path, split: Split, part: int, identity: str) -> dict[str, str]:
    """`path` and `url` of the document with a content id in one part; empty where it is not there."""
    for batch in iter_part(corpus_dir / split / f"part-{part:05d}.parquet", ["id", "path", "url"]):
        found = batch["id"].to_pylist()
        if identity in found:
            row = found.index(identity)
            return {name: batch[name][row].as_py() for name in ("path", "url")}
    return {"path": "", "url": ""}


def read_accounting(corpus_dir: Path) -> dict[str, Any]:
    """Contents of `accounting.json` (documented in `corpus/accounting.py`)."""
    accounting: dict[str, Any] = read_json(corpus_dir / ACCOUNTING)
    return accounting


def document_count(corpus_dir: Path, split: Split) -> int:
    """Documents on one side of the split."""
    return int(read_accounting(corpus_dir)["totals"][split]["documents"])


def split_bytes(corpus_dir: Path, split: Split) -> int:
    """UTF-8 bytes of text on one side of the split."""
    return int(read_accounting(corpus_dir)["totals"][split]["bytes"])


# --- writing ------------------------------------------------------------------------------------


@contextmanager
def part_writer(path: Path, schema: pa.Schema) -> Iterator[Callable[[pa.RecordBatch], None]]:
    """Give a function that appends a batch to the Parquet file `path`.

    The file appears whole when the context ends, and not at all without rows or on an exception.
    Equal batches give equal bytes.
    """
    buffered: list[pa.RecordBatch] = []
    writer: pq.ParquetWriter | None = None

    with ExitStack() as stack:

        def flush() -> None:
            nonlocal writer
            if writer is None:
                file = stack.enter_context(atomic_writer(path))
                writer = stack.enter_context(pq.ParquetWriter(file, schema, **_PARQUET))
            table = pa.Table.from_batches(buffered, schema)
            writer.write_table(table, row_group_size=table.num_rows)
            buffered.clear()

        def append(batch: pa.RecordBatch) -> None:
            if batch.num_rows:
                buffered.append(batch)
            rows = sum(b.num_rows for b in buffered)
            if rows >= BATCH_ROWS or sum(b.nbytes for b in buffered) >= BATCH_BYTES:
                flush()

        yield append
        if buffered:
            flush()


@contextmanager
def row_writer(
    path: Path,
    schema: pa.Schema,
    stored: pa.Schema | None = None,
    extend: Callable[[pa.RecordBatch], pa.RecordBatch] = lambda batch: batch,
) -> Iterator[Callable[[Sequence[Any]], None]]:
    """Like `part_writer`, for rows: sequences of Python values in schema order.

    Args:
        extend: makes of a batch of rows the batch that is stored.
        stored: schema of that one, if it is another.
    """
    with part_writer(path, stored or schema) as append:
        rows: list[Sequence[Any]] = []
        size = 0

        def add(row: Sequence[Any]) -> None:
            nonlocal size
            rows.append(row)
            size += sum(len(value) for value in row if isinstance(value, str))
            if size >= BATCH_BYTES or len(rows) >= BATCH_ROWS:
                append(extend(_batch(rows, schema)))
                rows.clear()
                size = 0

        yield add
        if rows:
            append(extend(_batch(rows, schema)))


def _batch(rows: Iterable[Sequence[Any]], schema: pa.Schema) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    arrays = [pa.array(column, type=field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
