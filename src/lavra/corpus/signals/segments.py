"""Kernels that cut a text: UTF-8 to code points, code points to words and lines.

Positions count code points. A kernel writes into arrays that the caller allots, from index 0, and returns how many.
"""

from __future__ import annotations

import numba
import numpy as np
import pyarrow as pa

from lavra.corpus.signals.characters import (
    ALETTER,
    ALPHANUMERIC,
    CR,
    DOUBLE_QUOTE,
    EXTEND,
    EXTEND_NUM_LET,
    HEBREW,
    KATAKANA,
    LF,
    LINE_BREAK,
    MID_LETTER,
    MID_NUM,
    MID_NUM_LET,
    NEWLINE,
    NUMERIC,
    PICTOGRAPH,
    REGIONAL,
    SEGMENT_SPACE,
    SINGLE_QUOTE,
    SPACE,
    ZWJ,
    Table,
)

kernel = numba.njit(nogil=True, cache=True)


def utf8_buffers(texts: pa.LargeStringArray) -> tuple[Table, Table]:
    """The bytes behind an array of N texts without nulls, and where each begins and ends in them, int64 [N + 1]."""
    assert texts.null_count == 0
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return np.frombuffer(data or b"", np.uint8), bounds


@kernel
def most_bytes(offsets: Table) -> int:
    """Bytes of the longest text; 0 without any."""
    longest = 0
    for d in range(offsets.shape[0] - 1):
        longest = max(longest, offsets[d + 1] - offsets[d])
    return longest


@kernel
def decode(data: Table, start: int, stop: int, codes: Table) -> int:
    """UTF-8 bytes `data[start:stop]` (valid, as Arrow holds them) -> code points."""
    count, i = 0, start
    while i < stop:
        byte = np.uint32(data[i])
        if byte < 0x80:
            codes[count] = byte
            i += 1
        elif byte < 0xE0:
            codes[count] = (byte & 0x1F) << 6 | (data[i + 1] & 0x3F)
            i += 2
        elif byte < 0xF0:
            codes[count] = (byte & 0x0F) << 12 | np.uint32(data[i + 1] & 0x3F) << 6 | (data[i + 2] & 0x3F)
            i += 3
        else:
            codes[count] = (
                (byte & 0x07) << 18
                | np.uint32(data[i + 1] & 0x3F) << 12
                | np.uint32(data[i + 2] & 0x3F) << 6
                | (data[i + 3] & 0x3F)
            )
            i += 4
        count += 1
    return count


@kernel
def whitespace_words(classes: Table, length: int, starts: Table, stops: Table) -> int:
    """Runs without white space, as `str.split()`; `classes` of each position."""
    count, inside = 0, False
    for i in range(length):
        if classes[i] & SPACE:
            if inside:
                stops[count] = i
                count += 1
                inside = False
        elif not inside:
            starts[count] = i
            inside = True
    if inside:
        stops[count] = length
        count += 1
    return count


@kernel
def unicode_words(
    codes: Table, classes: Table, breaks: Table, length: int, symbols: bool, starts: Table, stops: Table
) -> int:
    """Segments between the word boundaries of UAX #29.

    Args:
        breaks: Word_Break value by code point.
        symbols: all that are not white space alone; else only those that begin with a letter or a digit.
    """
    count, i = 0, 0
    while i < length:
        stop = _segment_end(codes, breaks, i, length)
        if symbols:
            taken = classes[i] & SPACE == 0
            for k in range(i + 1, i if taken else stop):
                taken = taken or classes[k] & SPACE == 0
        else:
            taken = classes[i] & ALPHANUMERIC != 0
        if taken:
            starts[count], stops[count] = i, stop
            count += 1
        i = stop
    return count


@kernel
def _swallow(codes: Table, breaks: Table, i: int, length: int) -> int:
    """The first position from i on that does not extend the character before it (WB4)."""
    while i < length and (breaks[codes[i]] == EXTEND or breaks[codes[i]] == ZWJ):
        i += 1
    return i


@kernel
def _segment_end(codes: Table, breaks: Table, start: int, length: int) -> int:
    """Where the segment that begins at `start` ends: rules WB3 to WB16."""
    left = breaks[codes[start]]
    i = start + 1
    if left == CR:
        return i + 1 if i < length and breaks[codes[i]] == LF else i
    if left in (LF, NEWLINE):
        return i
    if left == SEGMENT_SPACE:
        while i < length and breaks[codes[i]] == SEGMENT_SPACE:
            i += 1
        # An extender ends the run of spaces (WB3d), and belongs to it (WB4).
    flags = 1 if left == REGIONAL else 0  # regional indicators so far
    while True:
        while left == ALETTER and i < length and breaks[codes[i]] == ALETTER:  # most of most texts
            i += 1
        after = _swallow(codes, breaks, i, length)
        if after >= length:
            return length
        right = breaks[codes[after]]
        joined = after > i and breaks[codes[after - 1]] == ZWJ and right == PICTOGRAPH  # WB3c
        if after == i == start + 1 and left == ZWJ and right == PICTOGRAPH:
            joined = True
        if not joined:
            middle = -1
            if MID_LETTER <= right <= DOUBLE_QUOTE:
                middle = _over_a_middle(codes, breaks, left, right, after, length)
            if middle >= 0:
                after, right = middle, breaks[codes[middle]]
            elif not _joins(left, right, flags):
                return after
        flags = flags + 1 if right == REGIONAL else 0
        left, i = right, after + 1


@kernel
def _joins(left: int, right: int, flags: int) -> bool:
    """Whether no boundary lies between two values, looking at nothing else (WB5, 7a, 8 to 10, 13, 15).

    Args:
        flags: regional indicators up to the left one.
    """
    letter = left in (ALETTER, HEBREW)
    next_letter = right in (ALETTER, HEBREW)
    if (letter or left == NUMERIC) and (next_letter or right == NUMERIC):
        return True
    if left == HEBREW and right == SINGLE_QUOTE:
        return True
    if left == KATAKANA and right == KATAKANA:
        return True
    if right == EXTEND_NUM_LET:
        return letter or left in (NUMERIC, KATAKANA, EXTEND_NUM_LET)
    if left == EXTEND_NUM_LET:
        return next_letter or right in (NUMERIC, KATAKANA)
    return left == REGIONAL and right == REGIONAL and flags % 2 == 1


@kernel
def _over_a_middle(codes: Table, breaks: Table, left: int, right: int, after: int, length: int) -> int:
    """Position of the letter or digit that a mark between two of them joins (WB6, 7, 7b, 7c, 11, 12), or -1."""
    far = _swallow(codes, breaks, after + 1, length)
    if far >= length:
        return -1
    beyond = breaks[codes[far]]
    quote = right in (MID_NUM_LET, SINGLE_QUOTE)
    if left in (ALETTER, HEBREW):
        if (right == MID_LETTER or quote) and (beyond in (ALETTER, HEBREW)):
            return far
        if left == HEBREW and right == DOUBLE_QUOTE and beyond == HEBREW:
            return far
    if left == NUMERIC and (right == MID_NUM or quote) and beyond == NUMERIC:
        return far
    return -1


@kernel
def lines(codes: Table, classes: Table, length: int, universal: bool, starts: Table, stops: Table) -> int:
    """Lines without their breaks: those of `str.splitlines()` if `universal`, else of `split("\\n")`."""
    count, begin, i = 0, 0, 0
    while i < length:
        if (classes[i] & LINE_BREAK != 0) if universal else codes[i] == 10:
            starts[count], stops[count] = begin, i
            count += 1
            if universal and codes[i] == 13 and i + 1 < length and codes[i + 1] == 10:
                i += 1
            begin = i + 1
        i += 1
    if begin < length or not universal:
        starts[count], stops[count] = begin, length
        count += 1
    return count


@kernel
def strip(classes: Table, start: int, stop: int) -> tuple[int, int]:
    """The span without white space around it."""
    while start < stop and classes[start] & SPACE:
        start += 1
    while stop > start and classes[stop - 1] & SPACE:
        stop -= 1
    return start, stop
