"""Bytes out of plain and compressed files, and lines out of bytes, in bounded memory."""

from __future__ import annotations

import bz2
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, NamedTuple, cast

import pyarrow as pa

# What the decompressors raise on a stream that is cut or damaged.
DAMAGED_STREAM = (EOFError, OSError, zlib.error)
_BUFFER_BYTES = 1 << 16  # small: what is decompressed but unread when the damage shows up is lost
_SKIP_BYTES = 1 << 20


@contextmanager
def open_stream(path: str, compression: str) -> Iterator[IO[bytes]]:
    """Open a file for buffered reading of its decompressed bytes (multi-member streams too).

    Raises:
        OSError: the file cannot be opened. Reading raises one of `DAMAGED_STREAM`.
    """
    if compression == "gzip":
        raw: IO[bytes] = cast(IO[bytes], gzip.open(path, "rb"))  # noqa: SIM115 - closed below
    elif compression == "bz2":
        raw = cast(IO[bytes], bz2.open(path, "rb"))  # noqa: SIM115 - closed below
    elif compression == "zstd":
        raw = cast(IO[bytes], pa.CompressedInputStream(pa.OSFile(path), "zstd"))
    else:
        raw = open(path, "rb", buffering=0)  # noqa: SIM115 - closed below
    with raw, io.BufferedReader(cast(io.RawIOBase, raw), _BUFFER_BYTES) as stream:
        yield stream


class Line(NamedTuple):
    """One line of a stream.

    Attributes:
        offset: of its first byte.
        size: bytes, newline included.
        data: the line without its newline; only its beginning when `size` is above the limit.
        oversize: whether the line was cut.
    """

    offset: int
    size: int
    data: bytes
    oversize: bool


def iter_lines(stream: IO[bytes], offset: int, limit_bytes: int) -> Iterator[Line]:
    """Lines from the current position (`offset`) on; a line above the limit is skipped, not loaded whole."""
    while data := stream.readline(limit_bytes + 1):
        size = len(data)
        oversize = size > limit_bytes and not data.endswith(b"\n")
        if oversize:
            data = data[:_BUFFER_BYTES]
            size += _skip_line(stream)
        yield Line(offset, size, data.removesuffix(b"\n"), oversize)
        offset += size


def seek_line(stream: IO[bytes], offset: int) -> int:
    """Move to the first line that begins at or after `offset`; return where that is."""
    if offset == 0:
        return 0
    stream.seek(offset - 1)
    return offset - 1 + _skip_line(stream)


def _skip_line(stream: IO[bytes]) -> int:
    skipped = 0
    while data := stream.readline(_SKIP_BYTES):
        skipped += len(data)
        if data.endswith(b"\n"):
            break
    return skipped
