"""Signals. Oracles: plain Python of the definitions under hypothesis, and cases whose values are known."""

from __future__ import annotations

import math
import re
from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lavra.corpus.signals.scan import SPLITTERS, TEXT, WORD, describe, names, scan


def signals(text: str) -> dict[str, float]:
    batch = scan(pa.array([text], pa.large_string()), SPLITTERS)
    return {name: batch.column(name)[0].as_py() for name in batch.schema.names}


REPEATING = st.lists(
    st.sampled_from(["a", "bb", "the", "cat", "#x", "…", "-", "Über", "\n", "\n\n"]), max_size=40
).map(" ".join)
TEXTS = st.one_of(st.text(max_size=80), REPEATING)


@settings(deadline=None, max_examples=150)
@given(TEXTS)
def test_characters_and_lines_are_what_python_counts(text: str) -> None:
    found = signals(text)
    lines = text.split("\n")
    full = [line for line in lines if line.strip()]
    assert found["characters"] == len(text) and found["bytes"] == len(text.encode())
    assert found["letters"] == sum(map(str.isalpha, text)) and found["upper_case"] == sum(
        map(str.isupper, text)
    )
    assert found["digits"] == sum(map(str.isnumeric, text)) and found["white_space"] == sum(
        map(str.isspace, text)
    )
    assert found["ellipses"] == text.count("...") + text.count("…")
    assert found["lines"] == len(text.splitlines()) and found["text_lines"] == len(full)
    assert found["longest_line"] == max(map(len, lines))
    assert found["short_lines"] == sum(len(line) <= 30 for line in full)
    assert found["any_bullet_lines"] == sum(line.strip()[0] in "●•*-" for line in full)
    copies = Counter(full)
    assert found["repeated_text_lines"] == sum(n for n in copies.values() if n > 1)
    assert found["second_text_line_characters"] == sum(len(line) * (n - 1) for line, n in copies.items())
    pieces = re.split("\n+", text)
    assert found["pieces"] == len(pieces) and found["second_pieces"] == len(pieces) - len(set(pieces))
    paragraphs = re.split("\n{2,}", text.strip())
    assert found["paragraph_characters"] == sum(map(len, paragraphs))
    assert found["second_paragraphs"] == len(paragraphs) - len(set(paragraphs))


@settings(deadline=None, max_examples=150)
@given(TEXTS)
def test_words_and_what_they_repeat_are_what_python_counts(text: str) -> None:
    found, words = signals(text), text.split()

    def value(name: str) -> float:
        return found[f"{name}.whitespace"]

    counts = Counter(words)
    assert value("words") == len(words) and value("distinct_words") == len(counts)
    assert value("word_characters") == sum(map(len, words))
    assert value("longest_word") == max(map(len, words), default=0)
    assert value("alphabetic_words") == sum(any(map(str.isalpha, word)) for word in words)
    entropy = -sum(n / len(words) * math.log(n / len(words)) for n in counts.values())
    assert value("word_entropy") == pytest.approx(entropy, abs=1e-9)
    for n in (2, 3, 4):
        grams = Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
        most = max(grams.values(), default=0)
        longest = max((sum(map(len, gram)) for gram, count in grams.items() if count == most), default=0)
        assert value(f"top_{n}gram") == most and value(f"longest_top_{n}gram_characters") == longest
    for n in (5, 7, 10):
        grams = Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
        covered = set()
        for i in range(len(words) - n + 1):
            if grams[tuple(words[i : i + n])] > 1:
                covered.update(range(i, i + n))
        assert value(f"repeated_{n}gram_characters") == sum(len(words[i]) for i in covered)


@settings(deadline=None)
@given(st.lists(TEXTS, max_size=6))
def test_a_text_has_the_same_signals_alone_and_among_others(texts: list[str]) -> None:
    batch = scan(pa.array(texts, pa.large_string()), SPLITTERS)
    assert batch.schema.names == names(SPLITTERS) and all(describe(name) for name in batch.schema.names)
    assert batch.to_pylist() == [signals(text) for text in texts]


def test_a_slice_of_an_array_is_read_from_its_own_place() -> None:
    texts = pa.array(["one", "two words", "three more words"], pa.large_string())
    assert scan(texts.slice(1, 1), ["whitespace"]).column("words.whitespace").to_pylist() == [2]


# --- worked cases of the rules' definitions ---

A = "alpha beta gamma delta.\n" * 2 + "some other line of text here now."
B = " ".join(["one two three four five"] * 2)
C = "the cat sat on the mat while the dog ran"


def test_one_of_three_lines_repeats_one_before_and_two_of_three_have_an_equal() -> None:
    found = signals(A)
    assert found["second_pieces"] / found["pieces"] == pytest.approx(1 / 3)
    assert found["repeated_text_lines"] / found["text_lines"] == pytest.approx(2 / 3)
    assert found["second_piece_characters"] / found["characters"] == pytest.approx(0.284, abs=5e-4)
    assert found["repeated_text_line_characters"] / found["text_line_characters"] == pytest.approx(
        0.582, abs=5e-4
    )


def test_blank_lines_are_no_duplicates() -> None:
    found = signals("X\nY\n\n\n\nZ")
    assert found["second_pieces"] == 0 and found["repeated_text_lines"] == 0


def test_top_bigrams_of_the_worked_cases() -> None:
    def share(text: str, name: str, spaces: int, whole: str) -> float:
        found = signals(text)
        return (found[f"{name}.words"] + spaces) * found["top_2gram.words"] / found[whole]

    assert share(B, "top_2gram_characters", 1, "characters") == pytest.approx(0.298, abs=5e-4)
    assert share(C, "top_2gram_characters", 1, "characters") == pytest.approx(0.175, abs=5e-4)
    assert share(B, "longest_top_2gram_characters", 0, "word_characters.words") == pytest.approx(
        0.474, abs=5e-4
    )
    hello = "hello world hello world hello world"
    assert share(hello, "longest_top_2gram_characters", 0, "word_characters.words") == pytest.approx(1)


def test_among_equally_frequent_bigrams_the_longest_counts() -> None:
    found = signals("a b a b a b ab cd ab cd ab cd abc def abc def")
    assert found["top_2gram.words"] * found["longest_top_2gram_characters.words"] == 12
    assert found["word_characters.words"] == 30


def test_words_covered_by_any_repeated_5gram() -> None:
    assert signals(B)["repeated_5gram_characters.words"] == signals(B)["word_characters.words"]
    found = signals("hello world hello\n world hello. apple world hello world hello world hello world")
    assert found["repeated_5gram_characters.words"] == 60 and found["word_characters.words"] == 65
    assert signals(B)["skipped_5gram_characters.segments"] / len(B) == pytest.approx(0.404, abs=5e-4)


def test_a_bullet_counts_at_the_start_of_a_line_only() -> None:
    for bullet in "●•*-":
        assert (
            signals(f"{bullet} one\n  {bullet} two\nthree {bullet} four\n{bullet}{bullet}{bullet} five")[
                "any_bullet_lines"
            ]
            == 3
        )


def test_stop_words_are_counted_as_words() -> None:
    found = signals("The best of the best")
    assert found["stop_words.whitespace"] == 3 and found["distinct_stop_words.whitespace"] == 2
    assert signals("Then Tom and Sally withheld bees")["stop_words.whitespace"] == 1
    joined = signals("The.and.that")
    assert joined["stop_words.whitespace"] == 0
    assert signals("T h i s \n isoneword !!!")["words.whitespace"] == 6


def test_a_text_of_one_line_and_an_empty_one_have_every_signal() -> None:
    assert signals("one line")["top_4gram.words"] == 0
    assert set(signals("").values()) <= {0.0, 1.0} and len(signals("")) == len(TEXT) + 3 * len(WORD)


def test_hostile_texts_take_linear_time() -> None:
    # Each froze a pipeline built on backtracking expressions.
    for text in (
        "👍" * 50_000,
        "a" * 200_000,
        "\n" * 200_000,
        "0" * 100_000,
        "." * 100_000,
        "\u200d" * 50_000,
    ):
        assert signals(text)["characters"] == len(text)
