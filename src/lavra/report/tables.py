"""Tables for the template, and any JSON value as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lavra.report.quantities import ABSENT, quantity, words

MAX_ROWS = 200
MAX_DEPTH = 4


@dataclass(frozen=True)
class Table:
    """Cells as text; `numeric` columns are set to the right."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    left_out: int = 0

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
    """A JSON object as tables: objects of objects and lists of objects become rows, plain facts one table."""
    if depth >= MAX_DEPTH or not value:
        return []
    if all(isinstance(v, Mapping) and not _nested(v) for v in value.values()):
        return [record_table([{"": words(k), **v} for k, v in value.items()], title=title)]
    facts = {k: v for k, v in value.items() if not isinstance(v, Mapping) and not _records(v)}
    tables = [fact_table(facts, title=title)] if facts else []
    for key, inner in value.items():
        name = f"{title} · {words(key)}" if title else words(key)
        if isinstance(inner, Mapping):
            tables += tables_of(inner, title=name, depth=depth + 1)
        elif _records(inner):
            tables.append(record_table(inner, title=name))
    return tables


def _nested(value: Mapping[str, Any]) -> bool:
    return any(isinstance(inner, Mapping) or _records(inner) for inner in value.values())


def _records(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)
