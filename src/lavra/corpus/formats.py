"""Which files are readable, and what their suffix says about their content."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Literal, NamedTuple

Kind = Literal["prose", "code"]
Reader = Literal["text", "long_text", "html", "jsonl", "parquet", "module", "topics"]

PROSE: Kind = "prose"
CODE: Kind = "code"

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
TEXT_SUFFIXES = frozenset({".txt", ".text", ".md", ".markdown", ".rst", ".tex"})
HTML_SUFFIXES = frozenset({".html", ".htm", ".xhtml"})
JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json-lines"})
PARQUET_SUFFIXES = frozenset({".parquet"})
CODE_SUFFIXES = frozenset(
    {
        *(".py", ".pyi", ".pyx", ".js", ".mjs", ".cjs", ".jsx", ".ts", ".tsx", ".java", ".kt", ".kts"),
        *(".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".hh", ".cu", ".cuh", ".m", ".mm", ".cs", ".fs"),
        *(".go", ".rs", ".zig", ".swift", ".scala", ".clj", ".hs", ".ml", ".mli", ".ex", ".exs", ".erl"),
        *(".rb", ".php", ".pl", ".pm", ".lua", ".r", ".jl", ".dart", ".groovy", ".f90", ".f", ".pas"),
        *(".sh", ".bash", ".zsh", ".ps1", ".sql", ".css", ".scss", ".less", ".vue", ".asm", ".s", ".el"),
        *(".lisp", ".scm", ".vim", ".cmake", ".proto"),
    }
)


class Format(NamedTuple):
    """How to read a file.

    Attributes:
        reader: the function family that reads it.
        kind: what its documents are, unless a record says otherwise.
        file_type: suffix without compression, lower case.
        compression: `gzip`, `zstd`, `bz2` or "".
    """

    reader: Reader
    kind: Kind
    file_type: str
    compression: str


def detect(name: str) -> Format | None:
    """The format that a file name stands for; None when it is not readable."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes[-2:]]
    compression = COMPRESSIONS.get(suffixes[-1], "") if suffixes else ""
    if compression:
        suffixes.pop()
    suffix = suffixes[-1] if suffixes else ""
    if suffix in JSONL_SUFFIXES:
        return Format("jsonl", PROSE, suffix, compression)
    if suffix in PARQUET_SUFFIXES:
        return None if compression else Format("parquet", PROSE, suffix, "")
    if suffix in HTML_SUFFIXES:
        return Format("html", PROSE, suffix, compression)
    if suffix in TEXT_SUFFIXES or suffix in CODE_SUFFIXES:
        return Format("text", CODE if suffix in CODE_SUFFIXES else PROSE, suffix, compression)
    return None


def kind_of_key(key: str, default: Format) -> tuple[Kind, str]:
    """Kind and file type of a record whose key looks like a path (`repository/src/main.rs`)."""
    named = detect(key) if "/" in key else None
    if named is None or named.reader not in ("text", "html") or named.compression:
        return default.kind, default.file_type
    return named.kind, named.file_type
