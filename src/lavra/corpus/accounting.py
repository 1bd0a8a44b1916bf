"""Where every record went: records_in = kept + dropped + errors + sampled_out, in documents and bytes.

`accounting.json` holds `totals`, the same `by_source`, `by_kind` and `by_file_type`, `reasons` (why
documents were dropped; `only` counts those with no other reason), `errors` by reason, `pii` (found, by kind), `split`
and `notes`. Bytes are UTF-8 bytes of text as it is stored; of errors, raw bytes of the record where they are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lavra.corpus.documents import ERROR_REASONS
from lavra.errors import LavraError

RECORDS_IN, READ, PASSED, KEPT = "records_in", "read", "passed", "kept"
TRAIN, VALIDATION = "train", "validation"
DROPPED, ERRORS, SAMPLED_OUT = "dropped", "errors", "sampled_out"
OUTCOMES = (RECORDS_IN, KEPT, TRAIN, VALIDATION, DROPPED, ERRORS, SAMPLED_OUT)
# Found among the documents that no rule drops.
DUPLICATE, NEAR_DUPLICATE, CONTAMINATED = "duplicate", "near_duplicate", "contaminated"
IDENTITY = (KEPT, DROPPED, ERRORS, SAMPLED_OUT)  # the parts that add up to RECORDS_IN

Key = tuple[str, ...]
Counts = tuple[int, int]  # documents, bytes


class Tally:
    """Counters that add up over units in any order: key -> [documents, bytes].

    Keys are ("outcome", outcome, source, kind, file type), ("reason" or "only" or "error", reason,
    source), ("pii", kind, source) with spans in place of bytes, and ("blank", source).
    """

    def __init__(self, rows: Iterable[Iterable[Any]] = ()) -> None:
        self.cells: dict[Key, list[int]] = {}
        for *key, documents, size in rows:
            self.add(tuple(key), documents, size)

    def add(self, key: Key, documents: int, size: int) -> None:
        """Count documents and their bytes."""
        cell = self.cells.setdefault(key, [0, 0])
        cell[0] += documents
        cell[1] += size

    def drop(self, reasons: list[str], source: str, size: int) -> None:
        """Count one dropped document under each of its reasons."""
        for reason in reasons:
            self.add(("reason", reason, source), 1, size)
        if len(reasons) == 1:
            self.add(("only", reasons[0], source), 1, size)

    def to_rows(self) -> list[list[Any]]:
        """JSON form, sorted; the constructor reads it back."""
        return [[*key, *cell] for key, cell in sorted(self.cells.items())]

    def sum(self, *prefix: str, position: int = -1, value: str = "") -> Counts:
        """Documents and bytes of all keys that begin with `prefix` (and hold `value` at `position`)."""
        cells = [
            cell
            for key, cell in self.cells.items()
            if key[: len(prefix)] == prefix and (position < 0 or key[position] == value)
        ]
        return sum(cell[0] for cell in cells), sum(cell[1] for cell in cells)

    def labels(self, table: str, position: int) -> list[str]:
        """Distinct values at one position of the keys of a table."""
        return sorted({key[position] for key in self.cells if key[0] == table})


def check(whole: str, total: Counts, parts: Mapping[str, Counts], where: str) -> None:
    """Refuse parts that do not add up to the whole, in documents and in bytes.

    Raises:
        LavraError: a document was lost or counted twice; this is a bug.
    """
    for index, unit in enumerate(("documents", "bytes")):
        if total[index] != sum(part[index] for part in parts.values()):
            seen = " + ".join(f"{name} {part[index]}" for name, part in parts.items())
            raise LavraError(
                f"the accounting does not add up in {unit}: {whole} {total[index]} != {seen}",
                where=where,
                hint="this is a bug in lavra; please report it",
            )


def build_accounting(
    tally: Tally, rules: Iterable[str], split: Mapping[str, Any], notes: Iterable[str]
) -> dict[str, Any]:
    """Contents of `accounting.json` from the tally of all units; every rule is told, hits or none."""
    names = (*rules, DUPLICATE, NEAR_DUPLICATE, CONTAMINATED)
    sums = {outcome: tally.sum("outcome", outcome) for outcome in OUTCOMES}
    check(RECORDS_IN, sums[RECORDS_IN], {part: sums[part] for part in IDENTITY}, "corpus")
    reasons = {
        reason: {**_cell(tally.sum("reason", reason)), "only": tally.sum("only", reason)[0]}
        for reason in names
    }
    return {
        "totals": {outcome: _cell(sums[outcome]) for outcome in OUTCOMES}
        | {"blank_lines": tally.sum("blank")[0]},
        "reasons": reasons,
        "errors": {reason: _cell(tally.sum("error", reason)) for reason in ERROR_REASONS},
        "pii": {kind: _found(tally.sum("pii", kind)) for kind in tally.labels("pii", 1)},
        "by_source": {
            source: _outcomes(tally, 2, source)
            | {
                "reasons": _counts(tally, "reason", names, source),
                "error_reasons": _counts(tally, "error", ERROR_REASONS, source),
                "blank_lines": tally.sum("blank", source)[0],
            }
            for source in tally.labels("outcome", 2)
        },
        "by_kind": {kind: _outcomes(tally, 3, kind) for kind in tally.labels("outcome", 3)},
        "by_file_type": {name: _outcomes(tally, 4, name) for name in tally.labels("outcome", 4)},
        "split": dict(split),
        "notes": list(notes),
    }


def _outcomes(tally: Tally, position: int, value: str) -> dict[str, Any]:
    return {
        outcome: _cell(tally.sum("outcome", outcome, position=position, value=value)) for outcome in OUTCOMES
    }


def _counts(tally: Tally, table: str, reasons: Iterable[str], source: str) -> dict[str, int]:
    counts = {reason: tally.sum(table, reason, source)[0] for reason in reasons}
    return {reason: count for reason, count in counts.items() if count}


def _cell(counts: Counts) -> dict[str, int]:
    return {"documents": counts[0], "bytes": counts[1]}


def _found(counts: Counts) -> dict[str, int]:
    return {"documents": counts[0], "spans": counts[1]}


def describe_losses(tally: Tally) -> str:
    """`12 too_short, 3 invalid_json`: what happened to the records that were not kept."""
    losses = [
        (tally.sum(table, reason)[0], reason)
        for table in ("reason", "error")
        for reason in tally.labels(table, 1)
    ]
    losses.append((tally.sum("outcome", SAMPLED_OUT)[0], "left out by sampling (max_bytes)"))
    return ", ".join(f"{count} {reason}" for count, reason in sorted(losses, reverse=True) if count)


def summarize(accounting: Mapping[str, Any]) -> dict[str, Any]:
    """Flat numbers for the report and for success criteria.

    `kept_fraction` is in documents, of those that were not left out by sampling.
    """
    totals = accounting["totals"]
    considered = totals[RECORDS_IN]["documents"] - totals[SAMPLED_OUT]["documents"]
    summary: dict[str, Any] = {
        "documents_in": totals[RECORDS_IN]["documents"],
        "kept_fraction": totals[KEPT]["documents"] / max(considered, 1),
        "train_bytes": totals[TRAIN]["bytes"],
        "validation_bytes": totals[VALIDATION]["bytes"],
        "error_documents": totals[ERRORS]["documents"],
    }
    for outcome in (KEPT, TRAIN, VALIDATION, DROPPED, SAMPLED_OUT):
        summary[f"{outcome}_documents"] = totals[outcome]["documents"]
    for kind, outcomes in accounting["by_kind"].items():
        summary[f"train_{kind}_bytes"] = outcomes[TRAIN]["bytes"]
        summary[f"validation_{kind}_bytes"] = outcomes[VALIDATION]["bytes"]
    for reason, cell in accounting["reasons"].items():
        summary[f"dropped_{reason}"] = cell["documents"]
    summary["validation_groups"] = accounting["split"]["validation_groups"]
    summary["notes"] = accounting["notes"]
    return summary
