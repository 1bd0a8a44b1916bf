"""Words as decontamination compares them, and runs of words looked up in a table of hashes.

A word is a run of letters and digits of any script, without case and accents; in scripts without spaces every character is
one. Punctuation is left out before runs are formed: neither a dash put in nor a wrapped line hides an item.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from lavra.corpus.near.shingles import SINGLE, WORD, code_point, roles
from lavra.corpus.records import Records
from lavra.corpus.signals.characters import MARK, Table, classes, lower_case
from lavra.corpus.signals.repetition import mix, slot_of
from lavra.corpus.signals.segments import kernel, most_bytes, utf8_buffers

_BASE = np.uint64(0x9E3779B97F4A7C15)
HIT = np.dtype([("document", "<i8"), ("first", "<i8"), ("stop", "<i8"), ("start_byte", "<i8"), ("stop_byte", "<i8"), ("run", "<i8")])  # fmt: skip


class Runs(NamedTuple):
    """Runs of words to look for.

    Attributes:
        lengths: in words, that occur, int64 [L].
        keys: open-addressing table of their hashes, uint64 [T]; 0 is free.
        numbers: of the run in each slot, int64 [T].
    """

    lengths: Records
    keys: Records
    numbers: Records


@cache
def folded() -> Table:
    """Every code point without case and accents, uint32; 0 for marks, which are left out."""
    table = lower_case().copy()
    for code in np.flatnonzero(roles() == WORD).tolist():
        base = unicodedata.normalize("NFKD", chr(code))
        if len(base) > 1 and all(map(unicodedata.combining, base[1:])):
            table[code] = lower_case()[ord(base[0])]
    table[classes() & MARK != 0] = 0
    return table


def words_of(text: str) -> list[str]:
    """The words of a text."""
    raw = text.encode()
    count, _, starts, stops = _split(np.frombuffer(raw, np.uint8))
    return [_plain(raw[starts[i] : stops[i]].decode()) for i in range(count)]


def make_runs(runs: list[tuple[str, ...]]) -> Runs:
    """A table of runs; each is found under its position in the list."""
    size = 1 << max(2, (2 * len(runs)).bit_length())
    keys, numbers = np.zeros(size, np.uint64), np.zeros(size, np.int64)
    for number, run in enumerate(runs):
        data = np.frombuffer(" ".join(run).encode(), np.uint8)
        count, hashes, _, _ = _split(data)
        assert count == len(run)
        _insert(hashes, count, number, keys, numbers)
    return Runs(np.array(sorted({len(run) for run in runs}), np.int64), keys, numbers)


def find_runs(texts: pa.LargeStringArray, runs: Runs) -> Records:
    """Where a text holds a run, by hash alone (`HIT`, in order): words `first` to `stop`, and their bytes in the text."""
    data, bounds = utf8_buffers(texts)
    room = 1 << 10
    while True:
        out = np.zeros((room, len(HIT.names or ())), np.int64)
        count = _find(data, bounds, roles(), folded(), *runs, out)
        if count <= room:
            return np.asarray(out[:count].view(HIT)[:, 0])
        room = count


def _plain(word: str) -> str:
    table = folded()
    return "".join(chr(table[ord(c)]) for c in word if table[ord(c)])


def _split(data: Table) -> tuple[int, Table, Table, Table]:
    room = _most_words(len(data))
    hashes, starts, stops = np.empty(room, np.uint64), np.empty(room, np.int64), np.empty(room, np.int64)
    return _words(data, 0, len(data), roles(), folded(), hashes, starts, stops), hashes, starts, stops


@kernel
def _most_words(length: int) -> int:
    """Words that so many bytes can hold: ASCII words have something between them, characters that are words have more bytes."""
    return length // 2 + 1


@kernel
def _words(
    data: Table,
    start: int,
    stop: int,
    roles: Table,
    folded: Table,
    hashes: Table,
    starts: Table,
    stops: Table,
) -> int:
    """Hash and bytes of each word; returns how many."""
    count, i = 0, start
    word, inside = np.uint64(1), False
    while i <= stop:
        point, width = np.uint32(32), 1  # past the end: a separator
        if i < stop:
            point, width = code_point(data, i)
        role, plain = roles[point], np.uint64(folded[point])
        if role == WORD and plain == 0:
            i += width
            if inside:
                stops[count] = i
            continue
        if role == WORD:
            if not inside:
                starts[count], inside = i, True
            word = word * _BASE + plain
            stops[count] = i + width
        else:
            if inside:
                hashes[count] = mix(word)
                count += 1
                word, inside = np.uint64(1), False
            if role == SINGLE:
                hashes[count], starts[count], stops[count] = mix(_BASE + plain), i, i + width
                count += 1
        i += width
    return count


@kernel
def _insert(hashes: Table, count: int, number: int, keys: Table, numbers: Table) -> None:
    value = np.uint64(0)
    for i in range(count):
        value = value * _BASE + hashes[i]
    key = mix(value + np.uint64(count))
    slot = slot_of(key, keys)
    keys[slot], numbers[slot] = key, number


@kernel
def _find(
    data: Table,
    bounds: Table,
    roles: Table,
    folded: Table,
    lengths: Table,
    keys: Table,
    numbers: Table,
    out: Table,
) -> int:
    """Number of hits; as many of them as there is room for are written to `out`."""
    room = _most_words(most_bytes(bounds))
    hashes, prefix = np.empty(room, np.uint64), np.empty(room + 1, np.uint64)
    starts, stops = np.empty(room, np.int64), np.empty(room, np.int64)
    powers = np.ones(lengths.shape[0], np.uint64)
    for k in range(lengths.shape[0]):
        for _ in range(lengths[k]):
            powers[k] *= _BASE
    found = 0
    for d in range(bounds.shape[0] - 1):
        count = _words(data, bounds[d], bounds[d + 1], roles, folded, hashes, starts, stops)
        prefix[0] = np.uint64(0)
        for i in range(count):
            prefix[i + 1] = prefix[i] * _BASE + hashes[i]
        for i in range(count):
            for k in range(lengths.shape[0]):
                last = i + lengths[k]
                if last > count:
                    break
                key = mix(prefix[last] - prefix[i] * powers[k] + np.uint64(lengths[k]))
                slot = slot_of(key, keys)
                if keys[slot] == 0:
                    continue
                if found < out.shape[0]:
                    row = out[found]
                    row[0], row[1], row[2], row[5] = d, i, last, numbers[slot]
                    row[3], row[4] = starts[i] - bounds[d], stops[last - 1] - bounds[d]
                found += 1
    return found
