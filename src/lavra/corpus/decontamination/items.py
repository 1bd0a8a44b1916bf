"""Benchmark files -> the runs of words that stand for their items."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from lavra.corpus.decontamination.config import Benchmark, Decontamination
from lavra.corpus.decontamination.words import Runs, make_runs, words_of
from lavra.corpus.formats import COMPRESSIONS
from lavra.corpus.streams import DAMAGED_STREAM, open_stream
from lavra.errors import PreflightError

Run = tuple[str, ...]


class Item(NamedTuple):
    """One record of a benchmark.

    Attributes:
        benchmark: its name.
        line: of the file, from 1.
        words: of all its parts.
    """

    benchmark: str
    line: int
    words: int


class Place(NamedTuple):
    """A run is in an item, from this word of it on (parts one after the other)."""

    item: int
    word: int


class Items(NamedTuple):
    """What is looked for.

    Attributes:
        items: all records.
        runs: distinct runs, by number.
        places: of each run.
        table: of the runs.
        facts: of each benchmark: items, fields, how many are not looked for and why.
    """

    items: list[Item]
    runs: list[Run]
    places: list[list[Place]]
    table: Runs
    facts: dict[str, dict[str, Any]]


@lru_cache(maxsize=1)
def read_items(config: Decontamination) -> Items:
    """All benchmarks.

    Raises:
        PreflightError: a file cannot be read, has a line that is no JSON object, or lacks a named field; two benchmarks
            have one name.
    """
    items: list[Item] = []
    places: dict[Run, list[Place]] = defaultdict(list)
    facts: dict[str, dict[str, Any]] = {}
    for benchmark in config.benchmarks:
        name = benchmark.title
        if name in facts:
            raise PreflightError(
                f"two benchmarks are called `{name}`",
                where="corpus.decontamination.benchmarks",
                hint="give one of them another `name`",
            )
        records = _records(benchmark)
        fields = list(benchmark.fields) or _text_fields([record for _, record in records])
        facts[name] = {"items": len(records), "fields": fields, "too_short": 0, "too_common": 0}
        for line, record in records:
            parts = [words for text in _texts(record, fields, benchmark, line) if (words := words_of(text))]
            for word, run in item_runs(parts, config.ngram_words, config.min_words):
                places[run].append(Place(len(items), word))
            items.append(Item(name, line, sum(map(len, parts))))
    kept = {run: where for run, where in places.items() if len({p.item for p in where}) <= config.max_items}
    _count_unchecked(items, places, kept, facts)
    return Items(items, list(kept), list(kept.values()), make_runs(list(kept)), facts)


def _count_unchecked(
    items: Sequence[Item],
    places: Mapping[Run, Sequence[Place]],
    kept: Mapping[Run, Sequence[Place]],
    facts: Mapping[str, dict[str, Any]],
) -> None:
    """Items without a run to look for, and those of which every run is a phrase that many items share."""
    with_runs, looked_for = ({p.item for where in runs.values() for p in where} for runs in (places, kept))
    for number, item in enumerate(items):
        facts[item.benchmark]["too_short"] += number not in with_runs
        facts[item.benchmark]["too_common"] += number in with_runs and number not in looked_for


def item_runs(parts: Sequence[Sequence[str]], ngram_words: int, min_words: int) -> list[tuple[int, Run]]:
    """Runs that stand for an item, with the word where each begins.

    Every `ngram_words` in a row, also across parts (a question and its answer). Where no part alone is that long, parts of
    at least `min_words` stand for it too, and the whole if it has that many and none of them does.
    """
    whole = [word for part in parts for word in part]
    found = [(i, tuple(whole[i : i + ngram_words])) for i in range(len(whole) - ngram_words + 1)]
    if all(len(part) < ngram_words for part in parts):
        start = 0
        for part in parts:
            if len(part) >= min_words:
                found.append((start, tuple(part)))
            start += len(part)
    if not found and len(whole) >= min_words:
        found.append((0, tuple(whole)))
    return found


def _records(benchmark: Benchmark) -> list[tuple[int, Mapping[str, Any]]]:
    path, line = benchmark.path, 0
    found: list[tuple[int, Mapping[str, Any]]] = []
    try:
        with open_stream(path, COMPRESSIONS.get(os.path.splitext(path)[1].lower(), "")) as stream:
            for line, data in enumerate(stream, 1):
                if data.strip():
                    record = json.loads(data)
                    if not isinstance(record, dict):
                        raise ValueError("no JSON object")
                    found.append((line, record))
    except DAMAGED_STREAM as error:
        raise PreflightError(
            f"cannot read the benchmark {path}: {error}", where="corpus.decontamination"
        ) from error
    except ValueError as error:
        raise PreflightError(
            f"{path}, line {line}: {error}",
            where="corpus.decontamination",
            hint="a benchmark is a file of JSON objects, one a line",
        ) from error
    return found


def _text_fields(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Fields that ever hold two words: what holds one word at most is a name or a number."""
    names = dict.fromkeys(name for record in records for name in record)
    return [n for n in names if any(len(t.split()) > 1 for r in records for t in _strings(r.get(n)))]


def _texts(record: Mapping[str, Any], fields: Sequence[str], benchmark: Benchmark, line: int) -> list[str]:
    for name in benchmark.fields:
        if name not in record:
            raise PreflightError(
                f"{benchmark.path}, line {line} has no field `{name}`; it has: {', '.join(record)}",
                where="corpus.decontamination.benchmarks",
            )
    return [text for name in fields for text in _strings(record.get(name))]


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for part in value for text in _strings(part)]
    return []
