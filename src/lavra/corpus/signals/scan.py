"""One pass over a batch of texts: Arrow strings -> a column of numbers for each signal.

A signal's name is enough to find its definition here: `TEXT` signals need no words; `WORD` signals are counted for
each way to split words and carry its name, as in `words.whitespace`.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa

from lavra.corpus.signals.characters import (
    ALPHANUMERIC,
    ASCII_LETTER,
    CLASS_SETS,
    CONTROL,
    DIGIT,
    LETTER,
    MARK,
    SPACE,
    SYMBOL,
    TERMINAL,
    UPPER,
    Table,
    classes,
    lower_case,
    word_breaks,
)
from lavra.corpus.signals.repetition import (
    Ngrams,
    cleared,
    count_ngrams,
    duplicates,
    hash_span,
    repeated_characters,
    skipped_characters,
    slot_of,
    top_ngram,
    word_hashes,
)
from lavra.corpus.signals.segments import (
    decode,
    kernel,
    lines,
    most_bytes,
    strip,
    unicode_words,
    utf8_buffers,
    whitespace_words,
)

Splitter = Literal["whitespace", "segments", "words"]
SPLITTERS: tuple[Splitter, ...] = get_args(Splitter)

TEXT = {
    "bytes": "UTF-8 bytes",
    "characters": "Code points",
    "letters": "Letters of any script",
    "marks": "Combining marks",
    "ascii_letters": "a to z, A to Z",
    "alphanumerics": "Letters and digits of any script",
    "upper_case": "Upper-case letters",
    "digits": "Characters with a numeric value",
    "white_space": "White space",
    "symbols": "Punctuation and controls, as datatrove counts them",
    "controls": "Control characters but tab, newline, form feed, escape",
    "newlines": "Line feeds",
    "hash_signs": "#",
    "ellipses": "... (not overlapping) and …",
    "opening_braces": "{",
    "braces": "{ and }",
    "lines": "Lines by str.splitlines()",
    "bullet_lines": "Lines that begin with • or -",
    "any_bullet_lines": "Text lines that begin with ● • * or -",
    "ellipsis_lines": "Lines that end with ... or …",
    "text_lines": 'Lines by split("\\n") that are not blank',
    "terminal_lines": "Text lines that end with a sentence-ending mark, nothing after it",
    "short_lines": "Text lines of at most 30 characters",
    "text_line_characters": "Characters of text lines",
    "second_text_line_characters": "Characters of text lines equal to one before",
    "repeated_text_lines": "Text lines that have an equal",
    "repeated_text_line_characters": "Characters of text lines that have an equal",
    "longest_line": "Characters of the longest line",
    "third_longest_line": "Characters of the third longest line; 0 below three lines",
    "pieces": 'Pieces between runs of "\\n", empty ones at the ends included',
    "second_pieces": "Pieces equal to one before",
    "second_piece_characters": "Characters of those",
    "paragraphs": 'Pieces between runs of two or more "\\n", of the text without white space around it',
    "paragraph_characters": "Characters of those",
    "second_paragraphs": "Paragraphs equal to one before",
    "second_paragraph_characters": "Characters of those",
    "repeated_paragraphs": "Paragraphs that have an equal",
    "repeated_paragraph_characters": "Characters of those",
}
WORD = {
    "words": "Words",
    "word_characters": "Characters of words",
    "proper_words": "Words with a character that is no symbol",
    "proper_word_characters": "Characters of those",
    "alphabetic_words": "Words with a letter of any script",
    "ascii_words": "Words with a letter a to z",
    "upper_case_words": "Words without a lower-case letter and with an upper-case one",
    "hash_words": "Words that hold #",
    "ellipsis_words": "Words that hold …",
    "longest_word": "Characters of the longest word",
    "distinct_words": "Different words",
    "word_entropy": "Entropy of the words, nats",
    "stop_words": "Occurrences of the be to of and that have with, in any case",
    "distinct_stop_words": "How many of those eight occur, in lower case",
    **{f"top_{n}gram": f"Occurrences of the most frequent {n}-gram" for n in (2, 3, 4)},
    **{f"top_{n}gram_characters": f"Characters of the first most frequent {n}-gram" for n in (2, 3, 4)},
    **{f"longest_top_{n}gram_characters": f"Characters of the longest most frequent {n}-gram" for n in (2, 3, 4)},
    **{
        f"skipped_{n}gram_characters": f"Characters of {n}-grams seen before, going on after each"
        for n in range(5, 11)
    },
    **{
        f"repeated_{n}gram_characters": f"Characters of words in an {n}-gram that repeats" for n in range(5, 11)
    },
}  # fmt: skip

# Rows of the result by name, as constants that the kernels see.
T: Any = namedtuple("T", TEXT)(*range(len(TEXT)))
W: Any = namedtuple("W", WORD)(*range(len(WORD)))
_ELLIPSIS, _DOT, _LINE_FEED = 0x2026, 46, 10
_DASH_BULLETS = (0x2022, 0x2D)  # • -
_ANY_BULLETS = (0x25CF, 0x2022, 0x2A, 0x2D)  # ● • * -
_SHORT_LINE = 30
_STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")  # Rae et al. 2021, A.1.1


def names(splitters: Sequence[Splitter]) -> list[str]:
    """Signals that `scan` computes, in its order."""
    return [*TEXT, *(f"{name}.{splitter}" for splitter in splitters for name in WORD)]


def describe(name: str) -> str:
    """What a signal counts.

    Raises:
        KeyError: no such signal.
    """
    plain, _, splitter = name.partition(".")
    return f"{WORD[plain]}, split by {splitter}" if splitter else TEXT[plain]


def scan(texts: pa.LargeStringArray, splitters: Sequence[Splitter]) -> pa.RecordBatch:
    """Signals of every text, a float64 column each, named by `names`.

    Args:
        texts: without nulls.
        splitters: `whitespace`, as `str.split()`; `segments` of UAX #29 that are not blank, punctuation among
            them; `words`, the segments that begin with a letter or a digit.
    """
    data, offsets = utf8_buffers(texts)
    tables = (classes(), word_breaks(), lower_case())
    modes = np.array([SPLITTERS.index(splitter) for splitter in splitters], np.int64)
    out = np.zeros((len(TEXT) + len(WORD) * len(splitters), len(texts)))
    _scan(data, offsets, *tables, _stop_hashes(), modes, out)
    return pa.RecordBatch.from_arrays([pa.array(column) for column in out], names(splitters))


def _stop_hashes() -> Table:
    return np.array(
        [hash_span(np.array([*map(ord, w)], np.uint32), 0, len(w)) for w in _STOP_WORDS], np.uint64
    )


@kernel
def _scan(
    data: Table,
    offsets: Table,
    classes: Table,
    breaks: Table,
    lower: Table,
    stop_hashes: Table,
    modes: Table,
    out: Table,
) -> None:
    """Scratch is as long as the longest text needs, and is not cleared between texts."""
    longest = max(1, most_bytes(offsets))
    size = 4
    while size < 2 * longest + 2:
        size *= 2
    codes, kinds = np.empty(longest + 1, np.uint32), np.empty(longest + 1, np.uint16)
    starts, stops = np.empty(longest + 2, np.int64), np.empty(longest + 2, np.int64)
    keys, counts, slots = np.empty(size, np.uint64), np.empty(size, np.int32), np.empty(size, np.int32)
    none = np.empty(1, np.uint64)
    sequence, run = np.empty(longest + 2, np.uint64), np.empty(longest + 2, np.uint64)
    power, inverse = np.empty(longest + 2, np.uint64), np.empty(longest + 2, np.uint64)
    sizes, repeats = np.empty(longest + 2, np.int64), np.empty(longest + 2, np.bool_)
    for d in range(offsets.shape[0] - 1):
        length = decode(data, offsets[d], offsets[d + 1], codes)
        for i in range(length):
            kinds[i] = classes[codes[i]]
        row = out[:, d]
        row[T.bytes] = offsets[d + 1] - offsets[d]
        _characters(codes, kinds, length, row)
        _lines(codes, kinds, length, starts, stops, keys, counts, row)
        for m in range(modes.shape[0]):
            if modes[m] == 0:
                count = whitespace_words(kinds, length, starts, stops)
            else:
                count = unicode_words(codes, kinds, breaks, length, modes[m] == 1, starts, stops)
            part = row[len(T) + m * len(W) :]
            _words(codes, kinds, lower, starts, stops, count, stop_hashes, keys, counts, part)
            word_hashes(codes, starts, stops, count, sequence, run, power, inverse, sizes)
            apart = Ngrams(sequence, none, none, sizes, count)
            _ngrams(apart, Ngrams(run, power, inverse, sizes, count), keys, counts, slots, repeats, part)


@kernel
def _characters(codes: Table, kinds: Table, length: int, row: Table) -> None:
    # Characters by class, then classes into signals: a few dozen of the 2048 sets of classes occur.
    sets = np.zeros(CLASS_SETS, np.int64)
    newlines = hash_signs = openings = closings = ellipses = dots = 0
    for i in range(length):
        code = codes[i]
        sets[kinds[i]] += 1
        if code > 125 and code != _ELLIPSIS:
            dots = 0
            continue
        newlines += code == _LINE_FEED
        hash_signs += code == 35
        openings += code == 123
        closings += code == 125
        dots = dots + 1 if code == _DOT else 0
        if dots == 3 or code == _ELLIPSIS:
            ellipses += 1
            dots = 0
    row[T.characters], row[T.newlines], row[T.hash_signs] = length, newlines, hash_signs
    row[T.opening_braces], row[T.braces], row[T.ellipses] = openings, openings + closings, ellipses
    for kind in range(CLASS_SETS):
        count = sets[kind]
        if count:
            row[T.letters] += count * (kind & LETTER != 0)
            row[T.marks] += count * (kind & MARK != 0)
            row[T.ascii_letters] += count * (kind & ASCII_LETTER != 0)
            row[T.alphanumerics] += count * (kind & ALPHANUMERIC != 0)
            row[T.upper_case] += count * (kind & UPPER != 0)
            row[T.digits] += count * (kind & DIGIT != 0)
            row[T.white_space] += count * (kind & SPACE != 0)
            row[T.symbols] += count * (kind & SYMBOL != 0)
            row[T.controls] += count * (kind & CONTROL != 0)


@kernel
def _lines(
    codes: Table,
    kinds: Table,
    length: int,
    starts: Table,
    stops: Table,
    keys: Table,
    counts: Table,
    row: Table,
) -> None:
    """Everything about lines, pieces and paragraphs."""
    count = lines(codes, kinds, length, True, starts, stops)
    row[T.lines] = count
    for k in range(count):
        start, stop = strip(kinds, starts[k], stops[k])
        row[T.bullet_lines] += start < stop and codes[start] in _DASH_BULLETS
        row[T.ellipsis_lines] += _ends_in_ellipsis(codes, start, stop)
    count = _text_lines(codes, kinds, length, starts, stops, row)
    found = duplicates(codes, starts, stops, count, keys, counts)
    row[T.second_text_line_characters] = found[1]
    row[T.repeated_text_lines], row[T.repeated_text_line_characters] = found[2], found[3]
    count = _pieces(codes, 0, length, 1, starts, stops)
    found = duplicates(codes, starts, stops, count, keys, counts)
    row[T.pieces], row[T.second_pieces], row[T.second_piece_characters] = count, found[0], found[1]
    start, stop = strip(kinds, 0, length)
    count = _pieces(codes, start, stop, 2, starts, stops)
    for k in range(count):
        row[T.paragraph_characters] += stops[k] - starts[k]
    found = duplicates(codes, starts, stops, count, keys, counts)
    row[T.paragraphs], row[T.second_paragraphs], row[T.second_paragraph_characters] = (
        count,
        found[0],
        found[1],
    )
    row[T.repeated_paragraphs], row[T.repeated_paragraph_characters] = found[2], found[3]


@kernel
def _ends_in_ellipsis(codes: Table, start: int, stop: int) -> bool:
    if stop > start and codes[stop - 1] == _ELLIPSIS:
        return True
    dots = stop - start >= 3
    for i in range(1, 4):
        dots = dots and codes[stop - i] == _DOT
    return dots


@kernel
def _text_lines(codes: Table, kinds: Table, length: int, starts: Table, stops: Table, row: Table) -> int:
    """Signals of each line by `split("\\n")`; spans of those that are not blank."""
    count = lines(codes, kinds, length, False, starts, stops)
    kept = 0
    first = second = third = 0
    for k in range(count):
        start, stop = starts[k], stops[k]
        size = stop - start
        first, second, third = (
            (size, first, second)
            if size > first
            else (first, size, second)
            if size > second
            else (first, second, max(third, size))
        )
        begin, end = strip(kinds, start, stop)
        if begin == end:
            continue
        row[T.any_bullet_lines] += codes[begin] in _ANY_BULLETS
        row[T.terminal_lines] += kinds[stop - 1] & TERMINAL != 0
        row[T.short_lines] += size <= _SHORT_LINE
        row[T.text_line_characters] += size
        starts[kept], stops[kept] = start, stop
        kept += 1
    row[T.text_lines], row[T.longest_line] = kept, first
    row[T.third_longest_line] = third if count >= 3 else 0
    return kept


@kernel
def _pieces(codes: Table, start: int, stop: int, run: int, starts: Table, stops: Table) -> int:
    """What `re.split("\\n{run,}")` gives of a part of a text, empty ones at its ends included."""
    count, begin, i = 0, start, start
    while i < stop:
        if codes[i] != _LINE_FEED:
            i += 1
            continue
        end = i
        while i < stop and codes[i] == _LINE_FEED:
            i += 1
        if i - end >= run:
            starts[count], stops[count] = begin, end
            count += 1
            begin = i
    starts[count], stops[count] = begin, stop
    return count + 1


@kernel
def _words(
    codes: Table,
    kinds: Table,
    lower: Table,
    starts: Table,
    stops: Table,
    count: int,
    stop_hashes: Table,
    keys: Table,
    counts: Table,
    row: Table,
) -> None:
    """Signals of single words."""
    seen = np.zeros(stop_hashes.shape[0], np.bool_)
    table = cleared(keys, count)
    lowered = np.empty(4, np.uint32)  # no stop word is longer
    row[W.words] = count
    entropy = 0.0  # sum of n log n
    for w in range(count):
        start, stop = starts[w], stops[w]
        size, every, union = stop - start, np.int64(0xFFFF), np.int64(0)
        holds_ellipsis = holds_hash = lowers = False
        for i in range(start, stop):
            kind, code = np.int64(kinds[i]), codes[i]
            every, union = every & kind, union | kind
            holds_hash |= code == 35
            holds_ellipsis |= code == _ELLIPSIS
            lowers |= kind & LETTER != 0 and kind & UPPER == 0
        row[W.word_characters] += size
        if not every & SYMBOL:
            row[W.proper_words] += 1
            row[W.proper_word_characters] += size
        row[W.alphabetic_words] += union & LETTER != 0
        row[W.ascii_words] += union & ASCII_LETTER != 0
        row[W.upper_case_words] += union & UPPER != 0 and not lowers
        row[W.hash_words] += holds_hash
        row[W.ellipsis_words] += holds_ellipsis
        row[W.longest_word] = max(row[W.longest_word], size)
        key = hash_span(codes, start, stop)
        if 2 <= size <= 4:
            for i in range(size):
                lowered[i] = lower[codes[start + i]]
            lower_key = hash_span(lowered, 0, size)
            for k in range(stop_hashes.shape[0]):
                row[W.stop_words] += lower_key == stop_hashes[k]
                seen[k] |= key == stop_hashes[k]
        slot = slot_of(key, table)
        if table[slot] == 0:
            table[slot], counts[slot] = key, 1
            row[W.distinct_words] += 1
        else:
            n = counts[slot]
            entropy += (n + 1) * math.log(n + 1) - n * math.log(n)
            counts[slot] = n + 1
    row[W.distinct_stop_words] = seen.sum()
    row[W.word_entropy] = math.log(count) - entropy / count if count else 0.0


@kernel
def _ngrams(
    apart: Ngrams, joined: Ngrams, keys: Table, counts: Table, slots: Table, repeats: Table, row: Table
) -> None:
    """Signals of n-grams; what repeats for n words is looked for among what repeats for n - 1.

    For `joined` that misses n-grams whose word boundaries all differ from those of their equals.
    """
    sizes, count = apart.sizes, apart.n_words
    for n in range(2, 11):
        count_ngrams(apart, n, repeats, n > 2, keys, counts, slots)
        if n < 5:
            most, first, longest = top_ngram(apart, n, repeats, counts, slots)
            row[W.top_2gram + n - 2], row[W.top_2gram_characters + n - 2] = most, first
            row[W.longest_top_2gram_characters + n - 2] = longest
        else:
            row[W.repeated_5gram_characters + n - 5] = repeated_characters(sizes, count, n, repeats)
    for n in range(5, 11):
        count_ngrams(joined, n, repeats, n > 5, keys, counts, slots)
        row[W.skipped_5gram_characters + n - 5] = skipped_characters(sizes, count, n, repeats, counts, slots)
