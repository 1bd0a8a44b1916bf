"""Texts as sets of shingles (five words in a row), and MinHash signatures of those sets.

A word is a run of letters, digits and marks of any script, in lower case; numbers stay what they are. In scripts without
spaces every character is a word. Punctuation separates words of prose and is a word itself in code, where `x + 1` and
`x - 1` differ. A text of fewer than five words has one shingle, all of them; without any it has none.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pyarrow as pa
import regex

from lavra.corpus.records import Records
from lavra.corpus.signals.characters import ALPHANUMERIC, MARK, SPACE, Table, classes, lower_case
from lavra.corpus.signals.repetition import mix
from lavra.corpus.signals.segments import kernel, most_bytes, utf8_buffers

VERSION = 1  # of words, shingles and permutations: signatures of another one are not comparable
SHINGLE_WORDS = 5

SEPARATOR, SYMBOL, WORD, SINGLE = range(4)  # what a code point does; SINGLE is a word of its own
_UNSPACED = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
_BASE = np.uint64(0x9E3779B97F4A7C15)
_JOIN = np.uint64(0xD6E8FEB86659FD93)


@cache
def roles() -> Table:
    """SEPARATOR, SYMBOL, WORD or SINGLE for every code point, uint8."""
    kinds = classes()
    table = np.where(kinds & (ALPHANUMERIC | MARK), WORD, np.where(kinds & SPACE, SEPARATOR, SYMBOL))
    single = regex.compile(_UNSPACED)
    assigned = np.flatnonzero(table == WORD)
    table[[code for code in assigned if single.match(chr(code))]] = SINGLE
    return table.astype(np.uint8)


@cache
def permutations(count: int) -> tuple[Table, Table]:
    """Multipliers (odd) and offsets of `count` maps x -> a x + b modulo 2^32; the same on every machine."""
    draw = np.random.Generator(np.random.PCG64(VERSION)).integers(0, 1 << 32, (2, count), np.uint32)
    return draw[0] | np.uint32(1), draw[1]


def signatures(texts: pa.LargeStringArray, code: Table, count: int) -> tuple[Records, Records]:
    """MinHash signatures.

    Args:
        texts: N of them, without nulls.
        code: whether punctuation counts, bool [N].
        count: hashes, K.

    Returns:
        uint32 [N, K], and the number of shingles (with repetitions) of each text [N]; without any a row means nothing.
    """
    data, offsets = utf8_buffers(texts)
    out, sizes = np.empty((len(texts), count), np.uint32), np.zeros(len(texts), np.int64)
    _signatures(data, offsets, code, roles(), lower_case(), *permutations(count), out, sizes)
    return out, sizes


def shingle_sets(texts: pa.LargeStringArray, code: Table) -> list[Records]:
    """The distinct shingles of each text, sorted 64-bit hashes."""
    data, offsets = utf8_buffers(texts)
    scratch = np.empty(most_bytes(offsets) + 1, np.uint64)
    found = []
    for i in range(len(texts)):
        count = _shingles(data, offsets[i], offsets[i + 1], code[i], roles(), lower_case(), scratch)
        found.append(np.unique(scratch[:count]))
    return found


@kernel
def _signatures(
    data: Table,
    offsets: Table,
    code: Table,
    roles: Table,
    lower: Table,
    multipliers: Table,
    shifts: Table,
    out: Table,
    sizes: Table,
) -> None:
    scratch = np.empty(most_bytes(offsets) + 1, np.uint64)
    for d in range(offsets.shape[0] - 1):
        count = _shingles(data, offsets[d], offsets[d + 1], code[d], roles, lower, scratch)
        sizes[d] = count
        row = out[d]
        row[:] = np.uint32(0xFFFFFFFF)
        for i in range(count):
            x = np.uint32(scratch[i] >> np.uint64(16))
            for j in range(row.shape[0]):
                row[j] = min(row[j], np.uint32(multipliers[j] * x + shifts[j]))


@kernel
def _shingles(data: Table, start: int, stop: int, code: bool, roles: Table, lower: Table, out: Table) -> int:
    """Hashes of the shingles of `data[start:stop]`, in order; returns how many."""
    ring = np.zeros(SHINGLE_WORDS, np.uint64)
    words, i = 0, start
    word, inside = np.uint64(1), False
    while i <= stop:
        point, width = np.uint32(32), 1  # past the end: a separator
        if i < stop:
            point, width = code_point(data, i)
        role = roles[point]
        i += width
        if role == WORD:
            word, inside = word * _BASE + np.uint64(lower[point]), True
            continue
        if inside:
            words = _add_word(mix(word), words, ring, out)
            word, inside = np.uint64(1), False
        if role == SINGLE or (code and role == SYMBOL):
            words = _add_word(mix(_BASE + np.uint64(point)), words, ring, out)
    if 0 < words < SHINGLE_WORDS:
        out[0] = _joined(ring, 0, words)
        return 1
    return max(0, words - SHINGLE_WORDS + 1)


@kernel
def code_point(data: Table, i: int) -> tuple[np.uint32, int]:
    """The code point whose UTF-8 begins at byte i, and its length."""
    byte = np.uint32(data[i])
    if byte < 0x80:
        return byte, 1
    if byte < 0xE0:
        return (byte & np.uint32(0x1F)) << np.uint32(6) | np.uint32(data[i + 1] & 0x3F), 2
    second = np.uint32(data[i + 1] & 0x3F)
    third = np.uint32(data[i + 2] & 0x3F)
    if byte < 0xF0:
        return (byte & np.uint32(0x0F)) << np.uint32(12) | second << np.uint32(6) | third, 3
    head = (byte & np.uint32(0x07)) << np.uint32(18) | second << np.uint32(12) | third << np.uint32(6)
    return head | np.uint32(data[i + 3] & 0x3F), 4


@kernel
def _add_word(word: np.uint64, words: int, ring: Table, out: Table) -> int:
    ring[words % SHINGLE_WORDS] = word
    words += 1
    if words >= SHINGLE_WORDS:
        out[words - SHINGLE_WORDS] = _joined(ring, words % SHINGLE_WORDS, SHINGLE_WORDS)
    return words


@kernel
def _joined(ring: Table, first: int, count: int) -> np.uint64:
    value = np.uint64(count)
    for k in range(count):
        value = (value ^ ring[(first + k) % SHINGLE_WORDS]) * _JOIN
        value ^= value >> np.uint64(32)
    return value
