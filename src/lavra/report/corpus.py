"""Corpus: where every document went, and samples of what was dropped or could not be read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lavra.report.quantities import quantity, words
from lavra.report.run import Run, part, sentences
from lavra.report.tables import tables_of

SAMPLES_PER_REASON = 4
MAX_REASONS = 40
MAX_FILES, MAX_ROWS = 32, 512  # Parquet files looked at, and rows of each
MAX_EXCERPT = 600  # characters
_COLUMNS = ("reasons", "reason", "excerpt", "source", "path", "place", "bytes", "duplicate_of")
# Sum to the documents that came in, in this order and with this palette entry.
FATES = {"train": 4, "validation": 1, "dropped": 3, "errors": 7, "sampled_out": 8}


def view(run: Run) -> dict[str, Any]:
    """Context of the section "Corpus"."""
    accounting = run.facts("corpus/accounting.json")
    dropped, errors = samples(run, "corpus/dropped"), samples(run, "documents/errors")
    if not accounting and not dropped and not errors:
        return run.missing("corpus/accounting.json", "corpus")
    totals, tables = part(accounting, "totals"), {k: v for k, v in accounting.items() if k != "notes"}
    # Lone numbers read better above the tables than as tables of one row.
    lone = {
        k: v for group in (totals, tables) for k, v in group.items() if not isinstance(v, (Mapping, list))
    }
    if totals:
        tables["totals"] = {k: v for k, v in totals.items() if k not in lone}
    return {
        "fates": fates(totals),
        "facts": [(words(name), quantity(name, value)) for name, value in lone.items()],
        "tables": tables_of({k: v for k, v in tables.items() if k not in lone}),
        "notes": sentences(accounting, "notes"),
        "dropped": dropped,
        "errors": errors,
    }


def fates(totals: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Shares of the incoming documents, for the bar; empty if the totals have another form."""
    counted = {name: documents(totals.get(name)) for name in FATES}
    whole = sum(counted.values())
    return [
        {
            "name": words(name),
            "colour": FATES[name],
            "documents": quantity("documents", count),
            "percent": round(100 * count / whole, 3),
        }
        for name, count in counted.items()
        if count and whole
    ]


def documents(entry: Any) -> int:
    """Documents of an accounting entry, which is a count or an object with one."""
    count = entry.get("documents") if isinstance(entry, Mapping) else entry
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else 0


def samples(run: Run, folder: str) -> dict[str, list[dict[str, Any]]]:
    """A few rows for each reason from `<folder>/*.parquet`."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted((run.folder / folder).glob("*.parquet"))[:MAX_FILES]:
        try:
            for row in first_rows(file):
                for reason in reasons(row):
                    if len(found) < MAX_REASONS or reason in found:
                        kept = found.setdefault(reason, [])
                        if len(kept) < SAMPLES_PER_REASON:
                            kept.append(sample(row))
        except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
            run.problems.append(f"{folder}/{file.name} cannot be read: {error}")
    return dict(sorted(found.items()))


def first_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    """The first rows of a Parquet file, a small batch in memory at a time."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as parquet:
        columns = [name for name in _COLUMNS if name in parquet.schema_arrow.names]
        left = MAX_ROWS
        for batch in parquet.iter_batches(batch_size=64, columns=columns):
            yield from batch.to_pylist()[:left]
            left -= batch.num_rows
            if left <= 0:
                return


def reasons(row: Mapping[str, Any]) -> list[str]:
    """All reasons of a row; the drops have a list, the errors one."""
    several = row.get("reasons")
    return [str(r) for r in several] if several else [str(row.get("reason") or "no reason recorded")]


def sample(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of a row."""
    excerpt = str(row.get("excerpt") or "")
    return {
        "where": " · ".join(
            str(row[key]) for key in ("source", "path", "place") if row.get(key) not in (None, "")
        ),
        "bytes": quantity("bytes", row["bytes"]) if row.get("bytes") is not None else "",
        "reasons": reasons(row),
        "duplicate_of": str(row.get("duplicate_of") or ""),
        "excerpt": excerpt[:MAX_EXCERPT] + ("…" if len(excerpt) > MAX_EXCERPT else ""),
    }
