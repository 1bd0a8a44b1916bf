"""The ruleset `lavra`, by which documents are judged unless the recipe says otherwise: cases known by hand."""

from __future__ import annotations

import pyarrow as pa
import pytest

from lavra.corpus.rulesets.ruleset import combine, splitters_of
from lavra.corpus.signals.scan import scan
from lavra.errors import UsageError

GOOD = "The quick brown fox jumps over the lazy dog, while seven wizards watch from a tall and windy tower."


def reasons(text: str, kind: str, **thresholds: float) -> list[str]:
    rules = combine(["lavra"], thresholds)
    documents = scan(pa.array([text], pa.large_string()), splitters_of([rules]))
    documents = documents.append_column("kind", pa.array([kind]))
    return [name for name, hit in zip(rules.rules, rules.judge(documents)[:, 0], strict=True) if hit]


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        (GOOD, "prose", []),
        ("Too short.", "prose", ["too_short"]),
        ("x = 1", "code", ["too_short"]),
        ("12 34 56 78 90 " * 10, "prose", ["few_letters", "top_bigram"]),
        ("12 34 56 78 90 " * 10, "code", []),
        ("buy now and save much\n" * 20, "prose", ["duplicate_lines", "top_bigram"]),
        ("x" * 1001, "code", ["long_line"]),
        ("x" * 1000 + "\n" + "y" * 1000, "code", []),
        (GOOD + "\0\0", "prose", ["control_characters"]),
        (GOOD + "\t\n\f\x1b", "prose", []),
        ("1\0", "prose", ["too_short", "few_letters", "control_characters"]),
        ("", "prose", ["too_short"]),
    ],
)
def test_every_reason_is_kept(text: str, kind: str, expected: list[str]) -> None:
    assert reasons(text, kind) == expected


@pytest.mark.parametrize(
    "text", ["হিন্দী और বাংলা লেখা", "ไทยเขียนติดกัน", "日本語の文章です", "العربية لغة", "Ελληνικά и русский"]
)
def test_letters_of_every_script_count_with_their_marks(text: str) -> None:
    assert reasons(text, "prose", min_characters=0, min_letter_fraction=1) == []


def test_short_repeated_lines_do_not_condemn_a_dialogue() -> None:
    lines = [f"{'Ion' if i % 2 else 'Socrates'}\n{GOOD} {i}" for i in range(40)]
    assert "duplicate_lines" not in reasons("\n".join(lines), "prose", max_duplicate_line_fraction=0.1)


def test_a_changed_threshold_changes_the_verdict_and_a_misspelt_one_is_an_error() -> None:
    assert reasons(GOOD, "prose", min_characters=200) == ["too_short"]
    with pytest.raises(UsageError, match=r"no threshold 'min_charcters', did you mean 'min_characters'"):
        reasons(GOOD, "prose", min_charcters=200)


def test_rulesets_together_keep_all_their_rules_and_shared_names_say_whose_they_are() -> None:
    both = combine(["gopher@dclm", "gopher@datatrove"], {})
    alone = [combine([name], {}) for name in ("gopher@dclm", "gopher@datatrove")]
    assert len(both.rules) == sum(len(ruleset.rules) for ruleset in alone)
    shared = set(alone[0].rules) & set(alone[1].rules)
    assert shared and not shared & set(both.rules)
    assert {f"{name}:{reason}" for reason in shared for name in ("gopher@dclm", "gopher@datatrove")} <= set(
        both.rules
    )
