"""What each code point is, as tables that the kernels index: classes, word-break property, lower case.

From `unicodedata` and, for properties that it lacks, the `regex` package: newer Unicode versions of either change
them.
"""

from __future__ import annotations

import string
import unicodedata
from functools import cache
from typing import Any

import numpy as np
import regex

Table = np.ndarray[Any, np.dtype[Any]]

CODE_POINTS = 0x110000

# Classes of a code point, bits of one uint16.
LETTER = 1  # str.isalpha
SPACE = 2  # str.isspace
UPPER = 4  # str.isupper
DIGIT = 8  # str.isnumeric
LINE_BREAK = 16  # where str.splitlines breaks
SYMBOL = 32  # punctuation and controls as datatrove 0.10 counts them (utils/text.py)
TERMINAL = 64  # ends a sentence: Unicode's Sentence_Terminal and a few Khmer signs that datatrove adds
CONTROL = 128  # category Cc but tab, newline, form feed and escape
MARK = 256  # combining marks
ASCII_LETTER = 512
ALPHANUMERIC = 1024  # str.isalnum
CLASS_SETS = 2048

_BREAKS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
_SYMBOLS = string.punctuation + "«´»–—’“”„…∶━►、。〈〉《》「」【】！％（），．１：；？～"
_SYMBOL_CONTROLS = [*range(0, 9), *range(11, 13), *range(13, 32), *range(127, 160)]
_KHMER_TERMINALS = "\u17d6\u17d9\u17da"

# Word_Break values (UAX #29, table 3); EXTEND stands for Extend, Format and ZWJ, which a word swallows (WB4).
OTHER, CR, LF, NEWLINE, EXTEND, ZWJ, ALETTER, HEBREW, NUMERIC, KATAKANA = range(10)
MID_LETTER, MID_NUM, MID_NUM_LET, SINGLE_QUOTE, DOUBLE_QUOTE, EXTEND_NUM_LET = range(10, 16)
REGIONAL, SEGMENT_SPACE, PICTOGRAPH = range(16, 19)
_PROPERTIES = {
    CR: "WB=CR", LF: "WB=LF", NEWLINE: "WB=Newline", EXTEND: "WB=Extend", ZWJ: "WB=ZWJ", ALETTER: "WB=ALetter",
    HEBREW: "WB=Hebrew_Letter", NUMERIC: "WB=Numeric", KATAKANA: "WB=Katakana", MID_LETTER: "WB=MidLetter",
    MID_NUM: "WB=MidNum", MID_NUM_LET: "WB=MidNumLet", SINGLE_QUOTE: "WB=Single_Quote",
    DOUBLE_QUOTE: "WB=Double_Quote", EXTEND_NUM_LET: "WB=ExtendNumLet", REGIONAL: "WB=Regional_Indicator",
    SEGMENT_SPACE: "WB=WSegSpace",
}  # fmt: skip


@cache
def classes() -> Table:
    """Bits of every code point, uint16 [CODE_POINTS]."""
    table = np.zeros(CODE_POINTS, np.uint16)
    for code in _assigned():
        c = chr(code)
        table[code] = (
            LETTER * c.isalpha()
            | SPACE * c.isspace()
            | UPPER * c.isupper()
            | DIGIT * c.isnumeric()
            | ALPHANUMERIC * c.isalnum()
            | MARK * (unicodedata.category(c)[0] == "M")
        )
    for code in [*range(32), *range(127, 160)]:
        table[code] |= CONTROL * (chr(code) not in "\t\n\f\x1b")
    table[[ord(c) for c in _BREAKS]] |= LINE_BREAK
    terminals = [ord(c) for c in regex.findall(r"\p{Sentence_Terminal}", _every())]
    table[[*terminals, *map(ord, _KHMER_TERMINALS)]] |= TERMINAL
    table[[*terminals, *map(ord, _KHMER_TERMINALS + _SYMBOLS), *_SYMBOL_CONTROLS]] |= SYMBOL
    table[[*range(65, 91), *range(97, 123)]] |= ASCII_LETTER
    return table


@cache
def word_breaks() -> Table:
    """Word_Break value of every code point, uint8 [CODE_POINTS]."""
    table = np.zeros(CODE_POINTS, np.uint8)
    every = _every()
    for value, name in _PROPERTIES.items():
        table[[ord(c) for c in regex.findall(rf"\p{{{name}}}", every)]] = value
    table[[ord(c) for c in regex.findall(r"\p{WB=Format}", every)]] = EXTEND
    pictographs = np.array([ord(c) for c in regex.findall(r"\p{Extended_Pictographic}", every)])
    table[pictographs[table[pictographs] == OTHER]] = PICTOGRAPH
    return table


@cache
def lower_case() -> Table:
    """Lower case of every code point whose lower case is one code point, itself for the others, uint32."""
    table = np.arange(CODE_POINTS, dtype=np.uint32)
    for code in _assigned():
        lower = chr(code).lower()
        if len(lower) == 1:
            table[code] = ord(lower)
    return table


def _assigned() -> list[int]:
    """Code points that can have a class: Unicode assigns none between these planes."""
    return [code for plane in ((0, 0xD800), (0xE000, 0x34000), (0xE0000, 0xE1000)) for code in range(*plane)]


@cache
def _every() -> str:
    return "".join(map(chr, _assigned()))
