"""Evaluation: bits per byte beside what general compressors need for the same text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lavra.report.bars import grouped_bars
from lavra.report.quantities import difference, number, quantity, signed_percent, words
from lavra.report.run import Run, items, part, sentences
from lavra.report.tables import Table, tables_of

CODERS = {"lavra": "this model", "xz": "xz -9e", "zstd": "zstd -19"}
MAX_GROUPS = 12  # in the bar chart
EXTREME_FILES = 5  # shown at each end
_KNOWN = {
    "bits_per_byte",
    "documents",
    "bytes",
    "by_file_type",
    "by_kind",
    "total",
    "all_together",
    "files",
    "notes",
}

Record = Mapping[str, Any]


def view(run: Run) -> dict[str, Any]:
    """Context of the section "Evaluation"."""
    results = run.facts("eval/results.json")
    if not results:
        return run.missing("eval/results.json", "evaluate")
    kinds, types = items(results, "by_kind"), items(results, "by_file_type")
    total = {
        "kind": "all text",
        **{k: results.get(k) for k in ("documents", "bytes")},
        **part(results, "total"),
    }
    return {
        "facts": [
            (name, quantity(name, results[name])) for name in ("documents", "bytes") if name in results
        ],
        "kinds": coder_bars([total, *kinds] if part(results, "total") else kinds, "kind"),
        "types": coder_bars(types, "file_type") if len(types) > 1 else "",
        "table": coder_table([*types, total] if part(results, "total") else types),
        "together": together(part(results, "all_together"), part(results, "total")),
        "best": file_table(ranked(items(results, "files"))[:EXTREME_FILES], "easiest files"),
        "worst": file_table(ranked(items(results, "files"))[::-1][:EXTREME_FILES], "hardest files"),
        "others": tables_of({k: v for k, v in results.items() if k not in _KNOWN}),
        "notes": sentences(results, "notes"),
    }


def coder_bars(records: Sequence[Record], key: str) -> str:
    """Grouped bars of the coders, the largest groups by bytes."""
    largest = sorted(records, key=lambda r: number(r.get("bytes")) or 0.0, reverse=True)[:MAX_GROUPS]
    groups = [(_name(r, key), [number(r.get(coder)) for coder in CODERS]) for r in largest]
    if not any(value is not None for _, values in groups for value in values):
        return ""
    label = f"Bits per byte by {words(key)}, lower is better"
    return grouped_bars(groups, list(CODERS.values()), label=label, format_value=lambda v: f"{v:.2f}")


def _name(record: Record, key: str) -> str:
    """`code` or `code .py`: file types of different kinds may have one name."""
    kind, name = str(record.get("kind", "")), str(record.get(key, ""))
    return name if key == "kind" else f"{kind} {name}".strip()


def coder_table(records: Sequence[Record]) -> Table | None:
    """Every group in bits per byte, with the distance to xz."""
    rows = [
        [
            str(r.get("file_type") or r.get("kind", "")),
            str(r.get("kind", "")) if "file_type" in r else "",
            quantity("documents", r.get("documents")),
            quantity("bytes", r.get("bytes")),
            *(_bits(r.get(coder)) for coder in CODERS),
            signed_percent(difference(r.get("xz"), r.get("lavra"))),
        ]
        for r in records
    ]
    return (
        Table(["text", "kind", "documents", "bytes", *CODERS.values(), "model vs xz"], rows) if rows else None
    )


def together(whole: Record, single: Record) -> str:
    """The compressors' best case in words: everything in one archive."""
    values = [f"{CODERS[c]} {_bits(whole[c])}" for c in ("xz", "zstd") if number(whole.get(c)) is not None]
    if not values:
        return ""
    model = f"; this model {_bits(single['lavra'])}" if number(single.get("lavra")) is not None else ""
    where = "With all texts in one archive, where repetition between files helps them"
    return f"{where}: {', '.join(values)} bits/byte{model}."


def ranked(files: Sequence[Record]) -> list[Record]:
    """Files by the model's bits per byte, lowest first."""
    return sorted((f for f in files if number(f.get("lavra")) is not None), key=lambda f: float(f["lavra"]))


def file_table(files: Sequence[Record], title: str) -> Table | None:
    """A few files in bits per byte."""
    rows = [
        [
            str(f.get("path", "")),
            quantity("bytes", f.get("bytes")),
            *(_bits(f.get(coder)) for coder in CODERS),
        ]
        for f in files
    ]
    return Table(["file", "bytes", *CODERS.values()], rows, title) if rows else None


def _bits(value: Any) -> str:
    known = number(value)
    return quantity("", None) if known is None else f"{known:.3f}"
