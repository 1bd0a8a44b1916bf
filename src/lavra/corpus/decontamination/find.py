"""Benchmark items in the documents that are left: reported by place, and dropped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from lavra.artifact import atomic_writer, write_json
from lavra.corpus.accounting import CONTAMINATED
from lavra.corpus.decontamination.config import Decontamination
from lavra.corpus.decontamination.items import Items, read_items
from lavra.corpus.decontamination.words import find_runs, words_of
from lavra.corpus.dedup import COPY, REASONS, open_copies
from lavra.corpus.executor import map_units
from lavra.corpus.records import Records
from lavra.corpus.remaining import iter_remaining
from lavra.corpus.store import iter_part, row_writer
from lavra.corpus.unit_files import WriteUnit

CONTAMINATION = "contamination"  # folder of the report, in the artifact
FOUND, FACTS = "contaminated.npy", "contamination.json"  # among the copies; in `work`
CONTAMINATION_SCHEMA = pa.schema(
    [
        ("id", pa.string()),  # of the document
        ("source", pa.string()),
        ("path", pa.string()),
        ("benchmark", pa.string()),
        ("line", pa.int64()),  # of the item in its file
        ("covered", pa.float32()),  # share of the item's words that the document holds
        ("start", pa.int64()),  # characters of the document, first to last of these words
        ("stop", pa.int64()),
        ("excerpt", pa.string()),
    ]
)
_EXCERPT = 300


class Hit(NamedTuple):
    """A document holds words of an item: how much of it, and where (characters of the text)."""

    item: int
    covered: float
    start: int
    stop: int


class DecontaminationTask(NamedTuple):
    """A unit, what is taken out already, and what to look for."""

    unit: WriteUnit
    copies: Path
    config: Decontamination
    folder: Path

    @property
    def report(self) -> Path:
        """What is found in this unit."""
        return self.unit.part(CONTAMINATION)

    @property
    def rows(self) -> Path:
        """`COPY` rows of this unit's documents that hold an item."""
        return self.folder / f"{self.unit.read.unit:05d}.npy"


def find_contaminated(
    units: Sequence[WriteUnit],
    copies: Path,
    config: Decontamination,
    work: Path,
    *,
    weights: Sequence[int],
    workers: int,
) -> None:
    """Write the report by unit, and `COPY` rows of documents that go beside the copies."""
    tasks = [DecontaminationTask(unit, copies, config, work / "decontamination") for unit in units]
    map_units(search_unit, tasks, weights, workers=workers, label="corpus: decontaminate")
    found = np.concatenate([np.load(task.rows) for task in tasks])
    with atomic_writer(copies / FOUND) as file:
        np.save(file, found if config.policy == "drop" else found[:0])
    write_json(work / FACTS, _facts(read_items(config).facts, tasks))


def _facts(benchmarks: dict[str, dict[str, Any]], tasks: Sequence[DecontaminationTask]) -> dict[str, Any]:
    """What was looked for, and in how many documents and items it was found."""
    lines: dict[str, set[int]] = defaultdict(set)
    documents: dict[str, set[str]] = defaultdict(set)
    for task in tasks:
        for batch in iter_part(task.report, ["id", "benchmark", "line"]):
            for row in batch.to_pylist():
                lines[row["benchmark"]].add(row["line"])
                documents[row["benchmark"]].add(row["id"])
    return {
        name: {**facts, "items_found": len(lines[name]), "documents": len(documents[name])}
        for name, facts in benchmarks.items()
    }


def search_unit(task: DecontaminationTask) -> None:
    """Look for all items in the documents of a unit that are left."""
    if task.rows.exists():
        return
    items, gone = read_items(task.config), open_copies(task.copies)
    found: list[tuple[int, int]] = []
    with row_writer(task.report, CONTAMINATION_SCHEMA) as write:
        for batch, rows in iter_remaining(task.unit, gone, ["text", "id", "source", "path"]):
            for document, hits in hits_by_document(batch.column("text"), items):
                values = {name: batch.column(name)[document].as_py() for name in batch.schema.names}
                for hit in hits:
                    write(_report_row(values, hit, items))
                found.append((int(rows[document]), max(hits, key=lambda hit: hit.covered).item))
    copies = np.zeros(len(found), COPY)
    for copy, (row, item) in zip(copies, found, strict=True):
        copy["unit"], copy["row"], copy["reason"] = task.unit.read.unit, row, REASONS.index(CONTAMINATED)
        copy["kept_file"], copy["kept_position"] = items.items[item].line, _number(items, item)
    with atomic_writer(task.rows) as file:
        np.save(file, copies)


def _number(items: Items, item: int) -> int:
    return list(items.facts).index(items.items[item].benchmark)


def _report_row(document: dict[str, Any], hit: Hit, items: Items) -> tuple[Any, ...]:
    item = items.items[hit.item]
    excerpt = document["text"][hit.start : min(hit.stop, hit.start + _EXCERPT)]
    where = (item.benchmark, item.line, hit.covered, hit.start, hit.stop)
    return (document["id"], document["source"], document["path"], *where, excerpt)


def hits_by_document(texts: pa.LargeStringArray, items: Items) -> Iterator[tuple[int, list[Hit]]]:
    """Documents that hold words of items, with one hit an item; equal hashes are not believed, words are."""
    raw = find_runs(texts, items.table)
    for document in np.unique(raw["document"]).tolist():
        of_item: dict[int, list[tuple[Records, int]]] = defaultdict(list)
        data = texts[document].as_py().encode()
        for hit in raw[raw["document"] == document]:
            run = items.runs[hit["run"]]
            if tuple(words_of(data[hit["start_byte"] : hit["stop_byte"]].decode())) != run:
                continue
            for place in items.places[hit["run"]]:
                of_item[place.item].append((hit, place.word))
        if of_item:
            yield document, [_hit(item, found, items, data) for item, found in sorted(of_item.items())]


def _hit(item: int, found: list[tuple[Records, int]], items: Items, data: bytes) -> Hit:
    covered = {word + k for hit, word in found for k in range(int(hit["stop"] - hit["first"]))}
    first = min(int(hit["start_byte"]) for hit, _ in found)
    last = max(int(hit["stop_byte"]) for hit, _ in found)
    start, stop = (len(data[:position].decode()) for position in (first, last))
    return Hit(item, len(covered) / items.items[item].words, start, stop)
