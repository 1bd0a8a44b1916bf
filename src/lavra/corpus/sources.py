"""Find the files of every source before any work starts; nothing is skipped in silence."""

from __future__ import annotations

import difflib
import glob
import importlib.util
import os
import platform
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lavra.corpus import standard_library
from lavra.corpus.config import STANDARD_LIBRARY, CorpusConfig, Source
from lavra.corpus.formats import CODE, PROSE, Format, detect
from lavra.errors import PreflightError

_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})  # and hidden ones, such as .git
_PROBE_BYTES = 1 << 20
_PROBE_FILES = 20  # compressed files of a source whose ratio is measured; the others get their mean
_HTML_TEXT_SHARE = 0.2  # main text / page bytes, a typical value: only the sampling rate depends on it


@dataclass(frozen=True)
class ScanFile:
    """One readable file.

    Attributes:
        source_index: position of its source in the configuration.
        path: absolute.
        name: relative to the source's root, `/` between parts.
        format: how to read it.
        size: bytes on disk.
        mtime_ns: time of last change.
        text_bytes: estimated bytes of text in it.
    """

    source_index: int
    path: str
    name: str
    format: Format
    size: int
    mtime_ns: int
    text_bytes: int


@dataclass(frozen=True)
class SourceScan:
    """All files of all sources, in source order and then by name.

    Attributes:
        files: what will be read.
        names: of the sources, unique.
        total_bytes: on disk.
        estimated_text_bytes: after decompression and extraction.
        ignored: suffix -> files inside folders that are not readable.
    """

    files: tuple[ScanFile, ...]
    names: tuple[str, ...]
    total_bytes: int
    estimated_text_bytes: int
    ignored: Mapping[str, int]

    def inputs(self) -> list[Any]:
        """What the corpus depends on, for fingerprints: name, size and time of every file."""
        rows: list[Any] = []
        library = [file for file in self.files if file.format.reader in ("module", "topics")]
        if library:
            size = sum(file.size for file in library)
            rows.append([STANDARD_LIBRARY, platform.python_version(), len(library), size])
        rows.extend(
            [self.names[file.source_index], file.name, file.size, file.mtime_ns]
            for file in self.files
            if file.format.reader not in ("module", "topics")
        )
        return rows


def scan_sources(config: CorpusConfig) -> SourceScan:
    """Every file that the sources name.

    Raises:
        PreflightError: a path does not exist, a source has no readable file, a Parquet file has no
            text column, or an optional package is missing.
    """
    files: list[ScanFile] = []
    ignored: Counter[str] = Counter()
    for index, source in enumerate(config.sources):
        found = [
            _as_long_text(file, config.max_document_bytes) for file in _scan_source(index, source, ignored)
        ]
        if not found:
            raise _empty_source(source, ignored)
        files.extend(found)
    if any(file.format.reader == "html" for file in files) and not importlib.util.find_spec("resiliparse"):
        raise PreflightError("HTML files need the package resiliparse", hint='pip install "lavra[web]"')
    return SourceScan(
        tuple(files),
        _unique_names(config),
        sum(file.size for file in files),
        sum(file.text_bytes for file in files),
        dict(sorted(ignored.items())),
    )


def _unique_names(config: CorpusConfig) -> tuple[str, ...]:
    """Names of the sources; a name used twice gets a number."""
    seen: Counter[str] = Counter()
    names = []
    for source in config.sources:
        name = source.name or source.path.rstrip("/").rpartition("/")[2] or source.path
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return tuple(names)


def _scan_source(index: int, source: Source, ignored: Counter[str]) -> list[ScanFile]:
    if source.path == STANDARD_LIBRARY:
        return list(_scan_library(index))
    formats = {}
    root, paths = _find(source.path)
    for path in paths:
        name = os.path.relpath(path, root).replace(os.sep, "/")
        if (found := detect(path)) is None:
            ignored[os.path.splitext(path)[1].lower() or os.path.basename(path)] += 1
        else:
            formats[name] = (path, found)
    ratios = _compression_ratios(list(formats.values()))
    return [
        _scan_file(index, path, name, formats[name][1], source, ratios)
        for name, (path, _) in sorted(formats.items())
    ]


def _as_long_text(file: ScanFile, max_document_bytes: int) -> ScanFile:
    """One text file with everything in it is no single document: it is read in pieces."""
    _, kind, _, compression = file.format
    if file.format.reader != "text" or kind != PROSE or compression or file.size <= max_document_bytes:
        return file
    return replace(file, format=file.format._replace(reader="long_text"))


def _scan_library(index: int) -> Iterator[ScanFile]:
    root = standard_library.library_root()
    for name in standard_library.module_names(root):
        path = os.path.join(root, name)
        topics = name == standard_library.TOPICS
        layout = Format("topics", PROSE, "topic", "") if topics else Format("module", CODE, ".py", "")
        status = os.stat(path)
        yield ScanFile(index, path, name, layout, status.st_size, status.st_mtime_ns, status.st_size)


def _scan_file(
    index: int, path: str, name: str, layout: Format, source: Source, ratios: dict[str, float]
) -> ScanFile:
    try:
        status = os.stat(path)
        size, mtime_ns = status.st_size, status.st_mtime_ns
    except OSError:  # a link to nowhere: it becomes an `unreadable` record
        size, mtime_ns = 0, 0
    if layout.reader == "parquet":
        text_bytes = _parquet_text_bytes(path, source, size)
    else:
        share = _HTML_TEXT_SHARE if layout.reader == "html" else 1.0
        text_bytes = int(size * share * ratios.get(layout.compression, 1.0))
    return ScanFile(index, path, name, layout, size, mtime_ns, text_bytes)


# --- finding files ------------------------------------------------------------------------------


def _find(path: str) -> tuple[str, Iterator[str]]:
    """Root and files of a path: a file, a folder, or a glob."""
    if os.path.isfile(path):
        return os.path.dirname(path), iter([path])
    if os.path.isdir(path):
        return path, _walk(path)
    if glob.has_magic(path):
        root = path
        while glob.has_magic(root):
            root = os.path.dirname(root)
        found = (hit for hit in glob.iglob(path, recursive=True) if os.path.isfile(hit))
        return root, (hit for hit in found if not _SKIPPED_FOLDERS.intersection(hit.split(os.sep)))
    raise PreflightError(f"{os.path.abspath(path)} does not exist", hint=_nearest(path))


def _walk(root: str) -> Iterator[str]:
    """Files below `root`; links to folders are followed, each folder once."""

    def refuse(error: OSError) -> None:
        raise PreflightError(f"cannot list {error.filename}: {error.strerror}")

    visited: set[str] = set()
    for folder, folders, files in os.walk(root, followlinks=True, onerror=refuse):
        real = os.path.realpath(folder)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(f for f in folders if f not in _SKIPPED_FOLDERS and not f.startswith("."))
        yield from (os.path.join(folder, file) for file in sorted(files) if not file.startswith("."))


def _nearest(path: str) -> str:
    """Up to three names that look like the first missing part of the path."""
    missing = Path(os.path.abspath(path))
    while not missing.parent.is_dir():
        missing = missing.parent
    try:
        names = os.listdir(missing.parent)
    except OSError:
        names = []
    near = difflib.get_close_matches(missing.name, names, n=3, cutoff=0.4)
    if not near:
        return f"nothing in {missing.parent} has a similar name"
    return f"in {missing.parent} there is: " + ", ".join(near)


def _empty_source(source: Source, ignored: Mapping[str, int]) -> PreflightError:
    path = source.path if source.path == STANDARD_LIBRARY else os.path.abspath(source.path)
    seen = ", ".join(f"{count} {suffix}" for suffix, count in sorted(ignored.items())[:10])
    hint = "readable: .txt .md .html .jsonl .parquet and source code, also .gz .zst .bz2"
    if glob.has_magic(path) and not seen:
        hint = _nearest(path)
    return PreflightError(
        f"{path} holds no readable file" + (f" (not readable: {seen})" if seen else ""), hint=hint
    )


# --- estimating text ----------------------------------------------------------------------------


def _compression_ratios(files: list[tuple[str, Format]]) -> dict[str, float]:
    """Compression -> text bytes / bytes on disk, from the first MB of a few files of each."""
    ratios: dict[str, float] = {}
    for compression in {layout.compression for _, layout in files if layout.compression}:
        paths = sorted(path for path, layout in files if layout.compression == compression)
        measured = [_compression_ratio(path, compression) for path in paths[:_PROBE_FILES]]
        ratios[compression] = sum(measured) / len(measured)
    return ratios


def _compression_ratio(path: str, compression: str) -> float:
    """Decompressed / compressed bytes of the first MB of a file; 1 when it cannot be read."""
    text, head = 0, b""
    try:
        with open(path, "rb") as file:
            head = file.read(_PROBE_BYTES)
        with pa.CompressedInputStream(pa.BufferReader(head), compression) as stream:
            while block := stream.read(1 << 16):
                text += len(block)
    except OSError:
        pass  # the head ends within the stream; real damage shows up, with its place, when reading
    return max(1.0, text / max(len(head), 1))


def _parquet_text_bytes(path: str, source: Source, size: int) -> int:
    """Uncompressed bytes of the text column; a damaged file counts its size and fails when read."""
    try:
        with pq.ParquetFile(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
    except (pa.ArrowException, OSError):
        return size
    if source.text_field not in schema.names:
        raise PreflightError(
            f"{path} has no column `{source.text_field}`; it has: {', '.join(schema.names)}",
            hint="set text_field to the column that holds the text",
        )
    kind = schema.field(source.text_field).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise PreflightError(f"{path}: the column `{source.text_field}` holds {kind}, not text")
    groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
    columns = (group.column(i) for group in groups for i in range(group.num_columns))
    return sum(c.total_uncompressed_size for c in columns if c.path_in_schema == source.text_field)
