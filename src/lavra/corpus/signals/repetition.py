"""Kernels that find what a text repeats: equal lines, most frequent and repeated n-grams of words.

Texts are compared by 64-bit hashes: two different ones are equal with a probability of about 1e-19. Hash tables
are arrays with open addressing, cut from one long array and cleared for each use.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lavra.corpus.signals.characters import Table
from lavra.corpus.signals.segments import kernel

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd: has an inverse modulo 2^64
_INVERSE = np.uint64(pow(int(_BASE), -1, 1 << 64))
_JOIN = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)
_NOT_FREE = np.uint64(1 << 63)


@kernel
def mix(value: np.uint64) -> np.uint64:
    """Spread the bits of a polynomial hash, so that its low bits choose a slot well; never 0."""
    value ^= value >> _SHIFT
    value *= _JOIN
    return (value ^ (value >> _SHIFT)) | _NOT_FREE


@kernel
def cleared(keys: Table, count: int) -> Table:
    """An empty hash table for `count` keys at the front of `keys`: at most half full, a power of two long."""
    size = 4
    while size < 2 * count:
        size *= 2
    keys[:size] = 0
    return keys[:size]


@kernel
def slot_of(key: np.uint64, table: Table) -> Any:
    """Where a key is, or the free slot where it belongs; a free slot holds 0, which no text's hash is."""
    mask = table.shape[0] - 1
    slot = np.int64(key & np.uint64(mask))
    while table[slot] != 0 and table[slot] != key:
        slot = (slot + 1) & mask
    return slot


@kernel
def hash_span(codes: Table, start: int, stop: int) -> np.uint64:
    """Hash of a part of a text; its order and length count."""
    value = np.uint64(1)
    for i in range(start, stop):
        value = value * _BASE + np.uint64(codes[i])
    return mix(value)


@kernel
def duplicates(
    codes: Table, starts: Table, stops: Table, count: int, keys: Table, counts: Table
) -> tuple[int, int, int, int]:
    """Equal spans of a text: how many are second or later, their characters, how many have an equal, theirs."""
    second = second_characters = repeated = repeated_characters = 0
    if count < 2:
        return 0, 0, 0, 0
    table = cleared(keys, count)
    for i in range(count):
        key, size = hash_span(codes, starts[i], stops[i]), stops[i] - starts[i]
        slot = slot_of(key, table)
        if table[slot] == 0:
            table[slot], counts[slot] = key, 1
            continue
        second += 1
        second_characters += size
        repeated += 2 if counts[slot] == 1 else 1
        repeated_characters += 2 * size if counts[slot] == 1 else size
        counts[slot] = 2
    return second, second_characters, repeated, repeated_characters


class Ngrams(NamedTuple):
    """Prefix sums over the words of a text, [count + 1], from which the hash of any n-gram follows in constant time.

    Attributes:
        sums: of words one after the other, or of their characters without gaps.
        power, inverse: the base to the number of characters and its inverse; one entry where words stay apart.
        sizes: characters.
        n_words: of the text.
    """

    sums: Table
    power: Table
    inverse: Table
    sizes: Table
    n_words: int


@kernel
def word_hashes(
    codes: Table,
    starts: Table,
    stops: Table,
    count: int,
    sequence: Table,
    run: Table,
    power: Table,
    inverse: Table,
    sizes: Table,
) -> None:
    """Fill the arrays of two `Ngrams`: `sequence` keeps words apart, in `run` "ab c" is "a bc"."""
    sequence[0], run[0], power[0], inverse[0], sizes[0] = 0, 0, 1, 1, 0
    for w in range(count):
        value, p, q = np.uint64(0), np.uint64(1), np.uint64(1)
        for i in range(starts[w], stops[w]):
            value = value * _BASE + np.uint64(codes[i]) + np.uint64(1)
            p *= _BASE
            q *= _INVERSE
        sequence[w + 1] = sequence[w] * _JOIN + mix(value ^ p)
        run[w + 1] = run[w] * p + value
        power[w + 1] = power[w] * p
        inverse[w + 1] = inverse[w] * q
        sizes[w + 1] = sizes[w] + stops[w] - starts[w]


@kernel
def _ngram(hashes: Ngrams, i: int, n: int) -> np.uint64:
    """Hash of the n words from word i on."""
    sums = hashes.sums
    if hashes.power.shape[0] > 1:
        return mix(sums[i + n] - sums[i] * (hashes.power[i + n] * hashes.inverse[i]))
    return mix(sums[i + n] - sums[i] * _join_power(n))


@kernel
def _join_power(n: int) -> np.uint64:
    value = np.uint64(1)
    for _ in range(n):
        value *= _JOIN
    return value


@kernel
def count_ngrams(
    hashes: Ngrams, n: int, repeats: Table, known: bool, keys: Table, counts: Table, slots: Table
) -> None:
    """Count the n-grams of a text, and mark those that occur more than once.

    Args:
        repeats: result, [count + 1]; on entry, if `known`, those of n - 1: an n-gram that holds another cannot repeat.
        counts, slots: result: an n-gram that repeats, at i, occurs `counts[slots[i]]` times.
    """
    last = hashes.n_words - n + 1
    candidates = 0
    for i in range(last):
        repeats[i] = not known or (repeats[i] and repeats[i + 1])
        candidates += repeats[i]
    repeats[max(last, 0) : hashes.n_words + 1] = False
    table = cleared(keys, candidates)
    for i in range(last):
        if repeats[i]:
            key = _ngram(hashes, i, n)
            slot = slot_of(key, table)
            if table[slot] == 0:
                table[slot], counts[slot] = key, 0
            counts[slot] += 1
            slots[i] = slot
    for i in range(last):
        if repeats[i]:
            repeats[i] = counts[slots[i]] > 1


@kernel
def top_ngram(hashes: Ngrams, n: int, repeats: Table, counts: Table, slots: Table) -> tuple[int, int, int]:
    """The most frequent n-gram of words: occurrences, characters of the first and of the longest of equals.

    Args:
        repeats, counts, slots: of `count_ngrams`.
    """
    sizes = hashes.sizes
    most = first = longest = 0
    for i in range(hashes.n_words - n + 1):
        times = counts[slots[i]] if repeats[i] else 1
        if times > most:
            most, first, longest = times, sizes[i + n] - sizes[i], 0
        if times == most:
            longest = max(longest, sizes[i + n] - sizes[i])
    return most, first, longest


@kernel
def repeated_characters(sizes: Table, count: int, n: int, repeats: Table) -> int:
    """Characters of all words that lie in some n-gram that occurs more than once (DCLM's and RedPajama's reading)."""
    characters = covered = 0  # words before `covered` are counted
    for i in range(count - n + 1):
        if repeats[i]:
            characters += sizes[i + n] - sizes[max(i, covered)]
            covered = i + n
    return characters


@kernel
def skipped_characters(sizes: Table, count: int, n: int, repeats: Table, counts: Table, slots: Table) -> int:
    """Characters of n-grams seen before, from left to right, going on after each (datatrove's reading of Gopher).

    Args:
        counts: of `count_ngrams`; forgotten.
    """
    for i in range(count - n + 1):
        if repeats[i]:
            counts[slots[i]] = 0
    characters = i = 0
    while i < count - n + 1:
        if repeats[i]:
            if counts[slots[i]]:
                characters += sizes[i + n] - sizes[i]
                i += n
                continue
            counts[slots[i]] = 1
        i += 1
    return characters
