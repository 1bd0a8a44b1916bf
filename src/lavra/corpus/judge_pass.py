"""Second pass over a unit: signals -> the rules that speak against each document. Texts are not read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from lavra.artifact import atomic_writer
from lavra.corpus import accounting as acc
from lavra.corpus.accounting import Tally
from lavra.corpus.config import CorpusConfig
from lavra.corpus.read_pass import LANGUAGE_SCORE, PII_COLUMNS
from lavra.corpus.records import Records, iter_located
from lavra.corpus.rulesets.ruleset import Ruleset, combine
from lavra.corpus.store import iter_part
from lavra.corpus.unit_files import WriteUnit, seal, sealed_tally

OTHER_LANGUAGE, PERSONAL_DATA = "other_language", "personal_data"
_LABELS = ["source", "kind", "file_type"]


class Judge(NamedTuple):
    """What speaks against documents: rules, languages that are not wanted, personal data."""

    rules: Ruleset
    languages: Sequence[str]
    min_language_score: float
    pii: Sequence[str]

    @property
    def reasons(self) -> list[str]:
        """Names of all that may speak against a document."""
        return [
            *self.rules.rules,
            *[OTHER_LANGUAGE] * bool(self.languages),
            *[PERSONAL_DATA] * bool(self.pii),
        ]

    @property
    def columns(self) -> list[str]:
        """Columns of documents that `against` reads."""
        return [*self.rules.columns, *["language", LANGUAGE_SCORE] * bool(self.languages), *self.pii]

    def against(self, batch: pa.RecordBatch) -> Records:
        """Which reason speaks against which document, bool [reasons, N]."""
        verdicts = [self.rules.judge(batch)]
        if self.languages:
            verdicts.append(self._other_language(batch))
        if self.pii:
            verdicts.append(np.any([np.asarray(batch.column(name)) > 0 for name in self.pii], axis=0))
        return np.vstack(verdicts)

    def _other_language(self, batch: pa.RecordBatch) -> Records:
        wanted = np.isin(np.array(batch.column("language").to_pylist(), object), self.languages)
        # The column has the precision of float32; so has the limit.
        sure = np.asarray(batch.column(LANGUAGE_SCORE)) >= np.float32(self.min_language_score)
        return np.asarray(~(wanted & sure))


def make_judge(config: CorpusConfig) -> Judge:
    """What the recipe asks for.

    Raises:
        UsageError: see `rulesets.ruleset.combine`.
    """
    rules = combine(config.rulesets, config.thresholds)
    pii = [PII_COLUMNS[kind] for kind, action in config.pii.actions().items() if action == "drop"]
    return Judge(rules, config.languages, config.min_language_score, pii)


def judge_unit(unit: WriteUnit, judge: Judge) -> None:
    """Judge the documents of a unit."""
    if sealed_tally(unit.seal("judge"), unit.out) is not None:
        return
    tally, bits = Tally(), []
    columns = list(dict.fromkeys([*_LABELS, "bytes", *judge.columns]))
    for batch in iter_part(unit.read.documents, columns):
        against = judge.against(batch)
        bits.append(np.packbits(against, axis=0).T)
        _count(batch, against, judge.reasons, tally)
    with atomic_writer(unit.verdicts) as file:
        np.save(file, np.concatenate([np.zeros((0, -(-len(judge.reasons) // 8)), np.uint8), *bits]))
    read = sealed_tally(unit.read.seal, unit.read.out)
    assert read is not None
    sums = {part: tally.sum("outcome", part) for part in (acc.PASSED, acc.DROPPED)}
    acc.check(acc.READ, read.sum("outcome", acc.READ), sums, f"unit {unit.read.unit}")
    seal(unit.seal("judge"), unit.out, [unit.verdicts], tally)


def open_verdicts(unit: WriteUnit) -> Records:
    """Bits of a judged unit, mapped from disk; a document with any set is dropped."""
    return np.asarray(np.load(unit.verdicts, mmap_mode="r"))


def iter_passed(units: Sequence[WriteUnit]) -> Iterator[Records]:
    """Chunks of the records (`LOCATED`, unit order) that no rule speaks against."""
    for unit in units:
        verdicts = open_verdicts(unit)
        for chunk in iter_located(unit.read.unit, unit.read.records):
            passed = chunk[~verdicts[chunk["row"]].any(axis=1)]
            if len(passed):
                yield passed


def _count(batch: pa.RecordBatch, against: Records, reasons: Sequence[str], tally: Tally) -> None:
    dropped = np.asarray(against.any(axis=0))
    sizes = np.asarray(batch.column("bytes"))
    labels = [batch.column(name).to_pylist() for name in _LABELS]
    keys, index = _numbered(list(zip(*labels, strict=True)))
    for outcome, mask in ((acc.PASSED, ~dropped), (acc.DROPPED, dropped)):
        for key, documents, size in _sums(keys, index, mask, sizes):
            tally.add(("outcome", outcome, *key), documents, size)
    alone = np.asarray(against.sum(axis=0) == 1)
    keys, index = _numbered([(source,) for source in labels[0]])
    for reason, hits in zip(reasons, against, strict=True):
        for table, mask in (("reason", hits), ("only", hits & alone)):
            for key, documents, size in _sums(keys, index, mask, sizes):
                tally.add((table, reason, *key), documents, size)


def _numbered(values: Sequence[Any]) -> tuple[list[Any], Records]:
    """Distinct values, and the number of each value among them."""
    numbers: dict[Any, int] = {}
    index = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), np.array(index, np.int64)


def _sums(keys: list[Any], index: Records, mask: Records, sizes: Records) -> Iterator[tuple[Any, int, int]]:
    """Documents and bytes under a mask of each key that has any."""
    documents = np.bincount(index[mask], minlength=len(keys))
    size = np.zeros(len(keys), np.int64)
    np.add.at(size, index[mask], sizes[mask])
    return ((keys[k], int(documents[k]), int(size[k])) for k in np.flatnonzero(documents))
