"""A ruleset: verdicts with names, over signals; read from YAML, judged on a batch of signals."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
from pydantic import Field

from lavra.corpus.rulesets.expressions import Column, Expression, parse
from lavra.corpus.signals.scan import SPLITTERS, TEXT, WORD, Splitter
from lavra.errors import UsageError
from lavra.schema import Config, Layer, read_yaml, validate

BUILT_IN = Path(__file__).parent


class RulesetFile(Config):
    """What a ruleset's YAML file holds."""

    source: str = Field(default="", description="Paper or program that the thresholds come from")
    words: Splitter = Field(
        default="words", description="How names of word signals without one split a text: see signals/scan.py"
    )
    rules: dict[str, str] = Field(description="Reason: expression that is true for documents to drop")


@dataclass(frozen=True)
class Ruleset:
    """Verdicts over signals.

    Attributes:
        name: of the file, `gopher@datatrove`.
        source: where the thresholds come from.
        rules: by reason.
    """

    name: str
    source: str
    rules: Mapping[str, Expression]

    @property
    def signals(self) -> frozenset[str]:
        """What must be scanned."""
        return frozenset[str]().union(*(rule.signals for rule in self.rules.values()))

    def judge(self, signals: pa.RecordBatch) -> Column:
        """Which rule speaks against which document, bool [rules, N], in the order of `rules`."""
        columns = {name: signals.column(name).to_numpy() for name in self.signals}
        verdicts = np.zeros((len(self.rules), signals.num_rows), bool)
        for row, rule in zip(verdicts, self.rules.values(), strict=True):
            row[:] = rule(columns)
        return verdicts


def built_in() -> list[str]:
    """Names of the rulesets that come with lavra."""
    return sorted(path.stem for path in BUILT_IN.glob("*.yaml"))


@cache
def load_ruleset(name: str) -> Ruleset:
    """A ruleset that comes with lavra, or one from the user's YAML file.

    Args:
        name: `gopher@datatrove`, or a path that ends in .yaml.

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
    return make_ruleset(path.stem, read_yaml(path, origin=path.name))


def make_ruleset(name: str, layer: Layer) -> Ruleset:
    """A ruleset from the content of its file.

    Raises:
        UsageError: see `load_ruleset`.
    """
    file = validate(RulesetFile, layer.data, layer.marks, file="ruleset")
    rules = {}
    for reason, text in file.rules.items():
        try:
            rules[reason] = parse(text, lambda found: _signal(found, file.words))
        except ValueError as error:
            where = layer.marks.get(("rules", reason), layer.origin)
            raise UsageError(f"rule {reason}: {error}", where=where) from error
    return Ruleset(name, file.source, rules)


def splitters_of(rulesets: Sequence[Ruleset]) -> list[Splitter]:
    """Ways to split words that the signals of some rulesets need."""
    found = {name.partition(".")[2] for ruleset in rulesets for name in ruleset.signals}
    return [splitter for splitter in SPLITTERS if splitter in found]


def _signal(name: str, words: Splitter) -> str:
    """The signal that a name in an expression means."""
    plain, _, splitter = name.partition(".")
    if name in TEXT or (plain in WORD and splitter in SPLITTERS):
        return name
    if name in WORD:
        return f"{name}.{words}"
    near = difflib.get_close_matches(plain, [*TEXT, *WORD], 1)
    raise ValueError(f"unknown signal {name!r}" + (f", did you mean {near[0]!r}?" if near else ""))
