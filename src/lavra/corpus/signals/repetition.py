"""Kernels that find what a text repeats: equal lines, most frequent and repeated n-grams of words.

Texts are compared by 64-bit hashes: two different ones are equal with a probability of about 1e-19. Hash tables
are arrays with open addressing; a slot belongs to the current use when it holds its stamp, so nothing is cleared.
"""

from __future__ import annotations

import numpy as np

from lavra.corpus.signals.characters import Table
from lavra.corpus.signals.segments import kernel

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd: has an inverse modulo 2^64
_INVERSE = np.uint64(pow(int(_BASE), -1, 1 << 64))
_JOIN = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)


@kernel
def mix(value: int) -> int:
    """Spread the bits of a polynomial hash, so that its low bits choose a slot well."""
    value ^= value >> _SHIFT
    value *= _JOIN
    return value ^ (value >> _SHIFT)


@kernel
def slot_of(key: int, keys: Table, stamps: Table, stamp: int) -> int:
    """Where a key is, or the free slot where it belongs; the length of `keys` is a power of two."""
    mask = keys.shape[0] - 1
    slot = np.int64(key & np.uint64(mask))
    while stamps[slot] == stamp and keys[slot] != key:
        slot = (slot + 1) & mask
    return slot


@kernel
def hash_span(codes: Table, start: int, stop: int) -> int:
    """Hash of a part of a text; its order and length count."""
    value = np.uint64(1)
    for i in range(start, stop):
        value = value * _BASE + np.uint64(codes[i])
    return mix(value)


@kernel
def duplicates(
    codes: Table, starts: Table, stops: Table, count: int, keys: Table, stamps: Table, counts: Table, stamp: int
) -> tuple[int, int, int, int]:
    """Equal spans of a text: how many are second or later, their characters, how many have an equal, theirs."""
    second = second_characters = repeated = repeated_characters = 0
    for i in range(count):
        key, size = hash_span(codes, starts[i], stops[i]), stops[i] - starts[i]
        slot = slot_of(key, keys, stamps, stamp)
        if stamps[slot] == stamp:
            second += 1
            second_characters += size
            first = counts[slot] == 1
            counts[slot] = 2
            repeated += 2 if first else 1
            repeated_characters += 2 * size if first else size
        else:
            stamps[slot], keys[slot], counts[slot] = stamp, key, 1
    return second, second_characters, repeated, repeated_characters


@kernel
def word_hashes(
    codes: Table, starts: Table, stops: Table, count: int, sequence: Table, run: Table, power: Table, inverse: Table, sizes: Table
) -> None:
    """Prefix sums [count + 1] from which the hash of any n words follows in constant time.

    Args:
        sequence: of words one after the other, so that where one ends counts.
        run: of their characters without gaps, with `power` and `inverse`, the base to their number and its inverse.
        sizes: characters.
    """
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
def _join_power(n: int) -> int:
    value = np.uint64(1)
    for _ in range(n):
        value *= _JOIN
    return value


@kernel
def top_ngram(
    sequence: Table, sizes: Table, count: int, n: int, keys: Table, stamps: Table, counts: Table, firsts: Table, stamp: int
) -> tuple[int, int, int]:
    """The most frequent n-gram of words: occurrences, characters of the first and of the longest of equals.

    Args:
        firsts: scratch, where the n-gram of a slot was seen first.
    """
    most = longest = 0
    first = np.int64(0)
    power = _join_power(n)
    for i in range(count - n + 1):
        key = mix(sequence[i + n] - sequence[i] * power)
        slot = slot_of(key, keys, stamps, stamp)
        if stamps[slot] != stamp:
            stamps[slot], keys[slot], counts[slot], firsts[slot] = stamp, key, 0, i
        counts[slot] += 1
        size = sizes[i + n] - sizes[i]
        if counts[slot] > most:
            most, first, longest = counts[slot], firsts[slot], size
        elif counts[slot] == most:
            first, longest = min(first, firsts[slot]), max(longest, size)
    return most, (sizes[first + n] - sizes[first] if most else 0), longest


@kernel
def skipped_ngrams(
    run: Table, power: Table, inverse: Table, sizes: Table, count: int, n: int, keys: Table, stamps: Table, stamp: int
) -> int:
    """Characters of n-grams seen before, from left to right, going on after each (datatrove's reading of Gopher).

    Where words end does not count ("ab c" is "a bc").
    """
    characters = i = 0
    while i < count - n + 1:
        key = mix(run[i + n] - run[i] * power[i + n] * inverse[i])
        slot = slot_of(key, keys, stamps, stamp)
        if stamps[slot] == stamp:
            characters += sizes[i + n] - sizes[i]
            i += n
        else:
            stamps[slot], keys[slot] = stamp, key
            i += 1
    return characters


@kernel
def repeated_ngrams(
    sequence: Table, sizes: Table, count: int, n: int, keys: Table, stamps: Table, counts: Table, stamp: int, repeats: Table, known: bool
) -> int:
    """Characters of all words that lie in some n-gram that occurs more than once (DCLM's and RedPajama's reading).

    Args:
        repeats: which n-grams repeat, [count]; on entry, if `known`, those of n - 1: others cannot.
    """
    power = _join_power(n)
    last = count - n + 1
    for i in range(last):
        if known and not (repeats[i] and repeats[i + 1]):
            continue
        key = mix(sequence[i + n] - sequence[i] * power)
        slot = slot_of(key, keys, stamps, stamp)
        if stamps[slot] != stamp:
            stamps[slot], keys[slot], counts[slot] = stamp, key, 0
        counts[slot] += 1
    characters = covered = 0  # words before `covered` are counted
    for i in range(last):
        if known and not (repeats[i] and repeats[i + 1]):
            repeats[i] = False
            continue
        key = mix(sequence[i + n] - sequence[i] * power)
        repeats[i] = counts[slot_of(key, keys, stamps, stamp)] > 1
        if repeats[i]:
            characters += sizes[i + n] - sizes[max(i, covered)]
            covered = i + n
    for i in range(max(last, 0), count):
        repeats[i] = False
    return characters
