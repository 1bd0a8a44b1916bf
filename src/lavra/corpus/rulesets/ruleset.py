"""A ruleset: verdicts with names, over signals; read from YAML, judged on a batch of signals."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import Field

from lavra.corpus.rulesets.expressions import Column, Expression, parse
from lavra.corpus.signals.scan import SPLITTERS, TEXT, WORD, Splitter
from lavra.errors import UsageError
from lavra.schema import Config, Layer, read_yaml, validate

BUILT_IN = Path(__file__).parent
FACTS = {"prose": "1 for prose, 0 for code", "code": "1 for code, 0 for prose"}


class RulesetFile(Config):
    """What a ruleset's YAML file holds."""

    source: str = Field(default="", description="Paper or program that the thresholds come from")
    words: Splitter = Field(
        default="words", description="How names of word signals without one split a text: see signals/scan.py"
    )
    thresholds: dict[str, float] = Field(
        default={}, description="Named numbers of the expressions; a recipe changes them: corpus.thresholds"
    )
    rules: dict[str, str] = Field(description="Reason: expression that is true for documents to drop")


@dataclass(frozen=True)
class Ruleset:
    """Verdicts over signals.

    Attributes:
        name: of the file, `gopher@datatrove`.
        source: where the thresholds come from.
        thresholds: named numbers in the rules.
        rules: by reason.
    """

    name: str
    source: str
    thresholds: Mapping[str, float]
    rules: Mapping[str, Expression]

    @property
    def signals(self) -> frozenset[str]:
        """What must be scanned."""
        return self._read - FACTS.keys()

    @property
    def columns(self) -> list[str]:
        """Columns of documents that `judge` reads."""
        return sorted(self.signals) + ["kind"] * bool(self._read & FACTS.keys())

    @property
    def _read(self) -> frozenset[str]:
        return frozenset[str]().union(*(rule.signals for rule in self.rules.values()))

    def judge(self, documents: pa.RecordBatch) -> Column:
        """Which rule speaks against which document, bool [rules, N], in the order of `rules`."""
        columns = {name: np.asarray(documents.column(name), np.float64) for name in self.signals}
        if "kind" in self.columns:
            kinds = np.asarray(documents.column("kind").to_pylist(), object)
            columns |= {fact: kinds == fact for fact in FACTS}
        verdicts = np.zeros((len(self.rules), documents.num_rows), bool)
        for row, rule in zip(verdicts, self.rules.values(), strict=True):
            row[:] = rule(columns)
        return verdicts

    def to_json(self) -> dict[str, Any]:
        """What its verdicts depend on."""
        rules = {reason: rule.text for reason, rule in self.rules.items()}
        return {"thresholds": dict(self.thresholds), "rules": rules}


def built_in() -> list[str]:
    """Names of the rulesets that come with lavra."""
    return sorted(path.stem for path in BUILT_IN.glob("*.yaml"))


@cache
def load_ruleset(name: str, changed: tuple[tuple[str, float], ...] = ()) -> Ruleset:
    """A ruleset that comes with lavra, or one from the user's YAML file.

    Args:
        name: `gopher@datatrove`, or a path that ends in .yaml.
        changed: thresholds that differ from the file's.

    Raises:
        UsageError: no such ruleset, or its file is wrong; names the rule and what is near.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else BUILT_IN / f"{name}.yaml"
    if path.parent == BUILT_IN and not path.exists():
        near = difflib.get_close_matches(name, built_in(), 1)
        raise UsageError(
            f"no ruleset {name!r}" + (f", did you mean {near[0]!r}?" if near else ""),
            where="corpus.rulesets",
            hint=f"those built in: {', '.join(built_in())}; a file of your own ends in .yaml",
        )
    return make_ruleset(path.stem, read_yaml(path, origin=path.name), dict(changed))


def make_ruleset(name: str, layer: Layer, changed: Mapping[str, float] | None = None) -> Ruleset:
    """A ruleset from the content of its file.

    Args:
        changed: thresholds that differ from the file's; those that it does not have are not looked at.

    Raises:
        UsageError: see `load_ruleset`.
    """
    file = validate(RulesetFile, layer.data, layer.marks, file="ruleset")
    thresholds = {key: float((changed or {}).get(key, value)) for key, value in file.thresholds.items()}
    rules = {}
    for reason, text in file.rules.items():
        try:
            rules[reason] = parse(text, lambda found: _meaning(found, file.words, thresholds))
        except ValueError as error:
            where = layer.marks.get(("rules", reason), layer.origin)
            raise UsageError(f"rule {reason}: {error}", where=where) from error
    return Ruleset(name, file.source, thresholds, rules)


def combine(names: Sequence[str], changed: Mapping[str, float]) -> Ruleset:
    """Several rulesets as one; a reason that two of them share carries its ruleset's name.

    Args:
        names: see `load_ruleset`.
        changed: thresholds by name.

    Raises:
        UsageError: see `load_ruleset`; or no ruleset has a threshold of that name.
    """
    rulesets = [load_ruleset(name, tuple(sorted(changed.items()))) for name in names]
    thresholds = {key: value for ruleset in rulesets for key, value in ruleset.thresholds.items()}
    if unknown := [key for key in changed if key not in thresholds]:
        near = difflib.get_close_matches(unknown[0], thresholds, 1)
        raise UsageError(
            f"no threshold {unknown[0]!r}" + (f", did you mean {near[0]!r}?" if near else ""),
            where="corpus.thresholds",
            hint=f"those of {', '.join(names) or 'no ruleset'}: {', '.join(thresholds) or 'none'}",
        )
    count = Counter(reason for ruleset in rulesets for reason in ruleset.rules)
    rules = {
        reason if count[reason] == 1 else f"{ruleset.name}:{reason}": rule
        for ruleset in rulesets
        for reason, rule in ruleset.rules.items()
    }
    return Ruleset("+".join(names), "", thresholds, rules)


def splitters_of(rulesets: Sequence[Ruleset]) -> list[Splitter]:
    """Ways to split words that the signals of some rulesets need."""
    found = {name.partition(".")[2] for ruleset in rulesets for name in ruleset.signals}
    return [splitter for splitter in SPLITTERS if splitter in found]


def _meaning(name: str, words: Splitter, thresholds: Mapping[str, float]) -> str | float:
    """The signal, or the value of the threshold, that a name in an expression means."""
    if name in thresholds:
        return thresholds[name]
    plain, _, splitter = name.partition(".")
    if name in TEXT or name in FACTS or (plain in WORD and splitter in SPLITTERS):
        return name
    if name in WORD:
        return f"{name}.{words}"
    near = difflib.get_close_matches(plain, [*TEXT, *WORD, *FACTS, *thresholds], 1)
    raise ValueError(f"unknown signal {name!r}" + (f", did you mean {near[0]!r}?" if near else ""))
