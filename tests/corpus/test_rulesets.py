"""Oracles: shares worked out by hand for what each ruleset calls a repetition; Python's own arithmetic."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lavra.corpus.rulesets.expressions import parse
from lavra.corpus.rulesets.ruleset import built_in, load_ruleset, make_ruleset, splitters_of
from lavra.corpus.signals.scan import scan
from lavra.errors import UsageError
from lavra.schema import Layer


def reasons(ruleset: str, text: str) -> set[str]:
    rules = load_ruleset(ruleset)
    batch = scan(pa.array([text], pa.large_string()), splitters_of([rules]))
    batch = batch.append_column("kind", pa.array(["prose"]))
    return {name for name, hit in zip(rules.rules, rules.judge(batch)[:, 0], strict=True) if hit}


SPEECH = "The ships that have come to be with us and the people of this harbour wait for better weather today"
PROSE = "\n".join(f"{SPEECH} number {n} of a long list that goes on to the {n + 7}th day." for n in range(6))


@pytest.mark.parametrize("name", built_in())
def test_every_ruleset_reads_judges_and_survives_an_empty_text(name: str) -> None:
    ruleset = load_ruleset(name)
    assert ruleset.source and ruleset.rules
    assert reasons(name, "") <= set(ruleset.rules)


def test_text_without_a_repetition_is_dropped_by_datatrove_and_kept_by_dclm() -> None:
    twelve = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu"
    assert "top_3_gram" in reasons("gopher@datatrove", twelve)
    assert not {r for r in reasons("gopher@dclm", twelve) if "gram" in r}


def test_thresholds_are_exceeded_not_met() -> None:
    comments = "# one two three four five six seven eight nine\n" * 1
    at = make_ruleset(
        "x", Layer("x", {"words": "whitespace", "rules": {"hashes": "hash_signs / words > 0.1"}})
    )
    batch = scan(pa.array([comments, "# one two three four five"], pa.large_string()), ["whitespace"])
    assert at.judge(batch).tolist() == [[False, True]]


def test_all_reasons_of_a_document_are_told() -> None:
    text = "\n".join(["- click here ..."] * 40)
    found = reasons("gopher@datatrove", text)
    assert {"gopher_too_many_bullets", "gopher_too_many_end_ellipsis", "dup_line_frac", "top_2_gram"} <= found


def test_a_mistake_in_a_file_is_named_with_its_line_and_what_is_near(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("rules:\n  long: words > 9\n  short: wrods < 50\n")
    with pytest.raises(
        UsageError, match=r"rule short: unknown signal 'wrods', did you mean 'words'\?"
    ) as found:
        load_ruleset(str(path))
    assert found.value.where == "mine.yaml:3"
    other = tmp_path / "other.yaml"
    other.write_text("word: segments\nrules:\n  long: 9\n")
    with pytest.raises(
        UsageError, match=r"(?s)2 mistakes in the ruleset.*other.yaml:1.*`words`.*other.yaml:3"
    ):
        load_ruleset(str(other))
    with pytest.raises(UsageError, match="no ruleset 'gopher@datrove', did you mean 'gopher@datatrove'"):
        load_ruleset("gopher@datrove")
    with pytest.raises(UsageError, match=r"cannot read .*none\.yaml"):
        load_ruleset(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    "text",
    ["words", "words + 1", "len(words) < 3", "words < 3 < 4", "words().real < 1", "words if words else 1 < 2", "words[0] < 1",
     "'a' < 'b'", "words ** 9 < 1", "lambda: 1 < 2", "words <", "True", "words.a.b < 1", "__import__('os') < 1"],
)  # fmt: skip
def test_nothing_but_arithmetic_and_comparisons_is_an_expression(text: str) -> None:
    with pytest.raises(ValueError, match=r"words|'a'|True|import|lambda"):
        parse(text, lambda name: name)


numbers = st.integers(0, 5)


@given(
    numbers,
    numbers,
    numbers,
    st.sampled_from(["a + b * c < 3", "not a < b and c >= 2", "-a < b - c or a == b", "(a + b) * c != a"]),
)
def test_expressions_mean_what_python_means(a: int, b: int, c: int, text: str) -> None:
    verdict = parse(text, lambda name: name)
    columns = {k: np.array([v], float) for k, v in {"a": a, "b": b, "c": c}.items()}
    assert bool(verdict(columns)[0]) is eval(text, {"a": a, "b": b, "c": c})  # our own four texts


def test_a_share_of_nothing_is_no_reason_and_something_of_nothing_is_one() -> None:
    verdict = parse("a / b > 0.5", lambda name: name)
    columns = {"a": np.array([0.0, 1.0]), "b": np.array([0.0, 0.0])}
    assert verdict(columns).tolist() == [False, True]
