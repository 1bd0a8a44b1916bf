"""Document rules against cases whose values are known by hand."""

import pytest

from lavra.corpus.config import Rules
from lavra.corpus.rules import (
    RULE_REASONS,
    count_characters,
    duplicate_line_fraction,
    longest_line,
    reasons,
    top_bigram_fraction,
)

GOOD = "The quick brown fox jumps over the lazy dog, while seven wizards watch from a tall and windy tower."


def bigram(text, **options):
    return top_bigram_fraction(text, len("".join(text.split())), **options)


def test_good_prose_has_no_reason():
    assert reasons(GOOD, "prose", Rules()) == []


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
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
    ],
)
def test_every_reason_is_kept(text, kind, expected):
    assert reasons(text, kind, Rules()) == expected
    assert [reason for reason in RULE_REASONS if reason in expected] == expected


def test_disabled_rules_say_nothing():
    assert reasons("\0", "prose", Rules(enabled=False)) == []


@pytest.mark.parametrize(
    "text", ["হিন্দী और বাংলা লেখা", "ไทยเขียนติดกัน", "日本語の文章です", "العربية لغة", "Ελληνικά и русский"]
)
def test_letters_of_every_script_count_with_their_marks(text):
    letters, spaces, _ = count_characters(text)
    assert letters == len(text) - spaces


def test_character_counts_agree_with_a_slow_count_on_mixed_text():
    text = "añ1 \u200b\u00a0\u0085\x00漢" * 3 + "\U0001f600"
    assert count_characters(text) == (
        sum(c.isalpha() for c in text),
        sum(c.isspace() for c in text),
        text.count("\0"),
    )


@pytest.mark.parametrize(
    ("text", "fraction"),
    [
        ("", 0),
        ("\n\n", 0),
        ("a\nb", 0),
        ("xx\nxx\nyy", 1 / 3),
        ("xx\n  xx \n\n\nyyyy", 2 / 8),
        ("x\nx\n\n\n\nx", 2 / 3),
    ],
)
def test_repeated_lines_weigh_their_characters_and_blank_lines_nothing(text, fraction):
    assert duplicate_line_fraction(text) == pytest.approx(fraction)


def test_short_repeated_lines_do_not_condemn_a_dialogue():
    lines = [f"{'Ion' if i % 2 else 'Socrates'}\n{GOOD} {i}" for i in range(40)]
    assert duplicate_line_fraction("\n".join(lines)) < 0.1


@pytest.mark.parametrize(
    ("text", "fraction"),
    [
        ("hello world hello world hello world", 1.0),
        ("every word is here once", 0.0),
        ("a b a b a b ab cd ab cd ab cd abc def abc def", 12 / 30),  # the longest of equally frequent pairs
        ("one", 0.0),
        ("", 0.0),
    ],
)
def test_top_bigram_of_known_texts(text, fraction):
    assert bigram(text) == pytest.approx(fraction)


def test_the_early_exit_of_the_bigram_rule_never_changes_a_verdict():
    for repeats in range(30):
        text = "alpha beta " * repeats + GOOD
        exact = bigram(text)
        for limit in (0.1, 0.2, 0.5):
            assert (bigram(text, interesting=limit) > limit) == (exact > limit)


def test_longest_line_ignores_the_newline():
    assert longest_line("ab\nabc\n") == 3
