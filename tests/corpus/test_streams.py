"""Bounded lines and decompression."""

import io

import pytest

from lavra.corpus.streams import iter_lines, seek_line


@pytest.mark.parametrize("text", [b"", b"a", b"a\n", b"a\n\nbb\n", b"\n\n", b"abcdef\nxy"])
def test_offsets_and_sizes_cover_the_stream_exactly(text):
    lines = list(iter_lines(io.BytesIO(text), 0, 100))
    assert b"".join(text[line.offset : line.offset + line.size] for line in lines) == text
    assert [line.data for line in lines] == text.splitlines()


@pytest.mark.parametrize(("length", "oversize"), [(9, False), (10, False), (11, True), (5000, True)])
def test_a_line_at_the_limit_is_whole_and_one_above_is_cut(length, oversize):
    line, after = iter_lines(io.BytesIO(b"x" * length + b"\nnext\n"), 0, 10)
    assert line.oversize is oversize and line.size == length + 1
    assert (after.offset, after.data) == (length + 1, b"next")


def test_seeking_lands_on_the_first_line_that_begins_at_or_after_the_offset():
    data = b"aa\nbbbb\nc\n"
    landed = [seek_line(io.BytesIO(data), offset) for offset in range(len(data) + 1)]
    assert landed == [0, 3, 3, 3, 8, 8, 8, 8, 8, 10, 10]
