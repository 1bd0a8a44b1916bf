"""Document rules: pure functions of the text. Every rule is evaluated, every reason kept."""

from __future__ import annotations

import unicodedata
from collections import Counter
from functools import cache
from itertools import pairwise
from operator import mul
from typing import Any

import numpy as np

from lavra.corpus.config import Rules
from lavra.corpus.formats import Kind

RULE_REASONS = (
    "too_short",
    "few_letters",
    "duplicate_lines",
    "top_bigram",
    "long_line",
    "control_characters",
)
DUPLICATE = "duplicate"  # found after the rules, among the documents that no rule drops

_OTHER, _LETTER, _SPACE, _CONTROL = range(4)
_NOT_CONTROL = "\t\n\f\x1b"
_ASSIGNED = ((0, 0x34000), (0xE0000, 0xE1000))  # Unicode has no letters, spaces or controls elsewhere
_CHUNK_CHARACTERS = 1 << 20  # bounds the arrays of character classes


def reasons(text: str, kind: Kind, rules: Rules) -> list[str]:
    """Names of all rules that speak against a text, in the order of `RULE_REASONS`."""
    if not rules.enabled:
        return []
    letters, spaces, controls = count_characters(text)
    found = []
    if len(text) < rules.min_characters:
        found.append("too_short")
    if kind == "prose":
        if letters < rules.min_letter_fraction * (len(text) - spaces):
            found.append("few_letters")
        if duplicate_line_fraction(text) > rules.max_duplicate_line_fraction:
            found.append("duplicate_lines")
        limit = rules.max_top_bigram_fraction
        if top_bigram_fraction(text, len(text) - spaces, interesting=limit) > limit:
            found.append("top_bigram")
    elif longest_line(text) > rules.max_line_characters:
        found.append("long_line")
    if controls > rules.max_control_fraction * len(text):
        found.append("control_characters")
    return found


def count_characters(text: str) -> tuple[int, int, int]:
    """Letters (of any script, with their combining marks), spaces, and control characters of a text."""
    totals = np.zeros(4, np.int64)
    for start in range(0, len(text), _CHUNK_CHARACTERS):
        chunk = text[start : start + _CHUNK_CHARACTERS]
        codes: np.ndarray[Any, Any] = (
            np.frombuffer(chunk.encode("ascii"), np.uint8)
            if chunk.isascii()
            else np.frombuffer(chunk.encode("utf-32-le", "surrogatepass"), np.uint32)
        )
        totals += np.bincount(_classes()[codes], minlength=4)
    return int(totals[_LETTER]), int(totals[_SPACE]), int(totals[_CONTROL])


@cache
def _classes() -> np.ndarray[Any, Any]:
    """Class of every code point, uint8 [0x110000]."""

    def classify(character: str) -> int:
        if character.isspace():
            return _SPACE
        category = unicodedata.category(character)
        if category[0] in "LM":
            return _LETTER
        return _CONTROL if category == "Cc" and character not in _NOT_CONTROL else _OTHER

    classes = np.full(0x110000, _OTHER, np.uint8)
    for start, stop in _ASSIGNED:
        classes[start:stop] = [classify(chr(code)) for code in range(start, stop)]
    return classes


def duplicate_line_fraction(text: str) -> float:
    """Characters in second and later copies of lines / characters in all lines; 0 without lines.

    Characters, not lines: speaker names of a play, bullets and closing braces repeat in good text and
    weigh little. White space around a line does not count.
    """
    lines = list(map(str.strip, text.split("\n")))
    total = sum(map(len, lines))
    return (total - sum(map(len, set(lines)))) / total if total else 0.0


def top_bigram_fraction(text: str, characters: int, *, interesting: float = 0.0) -> float:
    """Characters in the most frequent word pair (the longest of equals) / characters of all words.

    A pair that occurs once is no repetition: 0. Texts that cannot exceed `interesting` give 0 early:
    both words of a pair occur at least as often as the pair, so twice the share of the heaviest
    single word bounds it from above.

    Args:
        text: words are what white space separates.
        characters: those of `text` that are no white space.
        interesting: fractions at or below it need not be exact.
    """
    words = text.split()
    if not words:
        return 0.0
    counts = Counter(words)
    heaviest = max(map(mul, counts.values(), map(len, counts)))
    if 2 * heaviest <= interesting * characters:
        return 0.0
    pairs = Counter(pairwise(words))
    count, length = max(((n, len(a) + len(b)) for (a, b), n in pairs.items()), default=(0, 0))
    return min(1.0, count * length / characters) if count > 1 else 0.0


def longest_line(text: str) -> int:
    """Characters of the longest line."""
    return max(map(len, text.split("\n")))
