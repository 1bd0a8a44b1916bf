"""Tables for the template, and any JSON value as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lavra.report.quantities import ABSENT, quantity, words

MAX_ROWS = 200
MAX_DEPTH = 4
WIDE = 5  # columns


@dataclass(frozen=True)
class Table:
    """Cells as text; `numeric` columns are set to the right."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    left_out: int = 0

    @property
    def wide(self) -> bool:
        """Whether it needs the whole width of the page."""
        return len(self.headers) >= WIDE

    @property
    def numeric(self) -> list[bool]:
        """Per column: whether every cell is a number or absent, and one is a number."""
        columns = [[row[i] for row in self.rows] for i in range(len(self.headers))]
        return [all(map(_number_like, column)) and any(c != ABSENT for c in column) for column in columns]


def _number_like(cell: str) -> bool:
    return cell == ABSENT or cell.lstrip("+−-")[:1].isdigit()


def record_table(records: Sequence[Mapping[str, Any]], *, title: str = "") -> Table:
    """One row a record; columns are all keys in order of appearance."""
    keys = list(dict.fromkeys(key for record in records[:MAX_ROWS] for key in record))
    rows = [[quantity(key, record.get(key)) for key in keys] for record in records[:MAX_ROWS]]
    return Table([words(key) for key in keys], rows, title, max(len(records) - MAX_ROWS, 0))


def fact_table(facts: Mapping[str, Any], *, title: str = "") -> Table:
    """One row a fact: name, value."""
    rows = [[words(name), quantity(str(name), value)] for name, value in list(facts.items())[:MAX_ROWS]]
    return Table(["", "value"], rows, title, max(len(facts) - MAX_ROWS, 0))


def tables_of(value: Mapping[str, Any], *, title: str = "", depth: int = 0) -> list[Table]:
    """A JSON object as tables: objects that are alike become rows of one, plain facts of another."""
    if depth >= MAX_DEPTH or not value:
        return []
    inner = {k: v for k, v in value.items() if isinstance(v, Mapping)}
    facts = {k: v for k, v in value.items() if k not in inner and not _records(v)}
    if facts and len(inner) == 1 and all(map(_fits_cell, inner.values())):
        facts, inner = facts | inner, {}  # a lone small object beside plain facts is one of them
    tables = []
    if _alike(inner) and (len(inner) > 1 or depth):
        tables.append(record_table([{"": words(k), **v} for k, v in inner.items()], title=title))
        inner = {}
    if facts:
        tables.append(fact_table(facts, title=title))
    for key, below in inner.items():
        tables += tables_of(below, title=_joined(title, key), depth=depth + 1)
    lists = {k: v for k, v in value.items() if _records(v)}
    return tables + [record_table(records, title=_joined(title, key)) for key, records in lists.items()]


def _joined(title: str, key: str) -> str:
    return f"{title} · {words(key)}" if title else words(key)


def _alike(objects: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether objects make rows: they share a key, and their values fit a cell."""
    values = list(objects.values())
    shared = set(values[0]).intersection(*values[1:]) if values else set()
    return bool(shared) and all(_fits_cell(v) for each in values for v in each.values())


def _fits_cell(value: Any) -> bool:
    if isinstance(value, Mapping):
        return not any(isinstance(inner, (Mapping, list)) for inner in value.values())
    return not _records(value)


def _records(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)
