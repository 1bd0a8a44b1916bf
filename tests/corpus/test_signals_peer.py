"""Every rule of datatrove on thousands of real documents, and word boundaries of arbitrary Unicode against uniseg.

datatrove runs with the ruleset's word splitter in place of spaCy's: what is compared are the rules.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from lavra.corpus.config import Source
from lavra.corpus.documents import Document
from lavra.corpus.formats import detect
from lavra.corpus.readers import Span, read_span
from lavra.corpus.rulesets.ruleset import load_ruleset, splitters_of
from lavra.corpus.signals.characters import classes, word_breaks
from lavra.corpus.signals.scan import scan
from lavra.corpus.signals.segments import unicode_words

pytestmark = pytest.mark.slow

DOCUMENTS = 5_000
CHARACTERS = 2_500  # of each: the peer is slow


@lru_cache(maxsize=4)
def segments(text: str, symbols: bool = True) -> tuple[str, ...]:
    """Words by lavra's kernel."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32).copy()
    starts, stops = np.empty(len(codes) + 1, np.int64), np.empty(len(codes) + 1, np.int64)
    count = unicode_words(codes, classes()[codes], word_breaks(), len(codes), symbols, starts, stops)
    return tuple(text[a:b] for a, b in zip(starts[:count], stops[:count], strict=True))


def test_word_boundaries_are_those_of_uniseg() -> None:
    from uniseg.wordbreak import words

    draw = random.Random(0)
    pieces = [
        *"aB1 ._'\":,-\t\r\n\u200d\u0308\u05d0\u30ab\u3042漢ไ",
        *[
            "\r\n",
            "👨\u200d👩",
            "🇧🇷",
            "don't",
            "3.14",
            "e.g.",
            '\u05d0"\u05d0',
            "a\u00ad",
            "\U0001f3fd",
            "_x",
        ],
    ]
    for _ in range(4_000):
        text = "".join(draw.choices(pieces, k=draw.randint(1, 12)))
        assert segments(text) == tuple(word for word in words(text) if not word.isspace()), repr(text)


@pytest.fixture(scope="module")
def documents(realdata: Path) -> list[str]:
    found: list[str] = []
    for name in ("en-misc", "en-docs", "en-wiki", "pt", "multilingual-docs", "code", "redpajama-sample"):
        path = realdata / f"text/{name}.jsonl.zst"
        layout = detect(path.name)
        assert layout is not None
        span = Span(str(path), path.name, layout, 0, path.stat().st_size)
        texts = [d.text for d in read_span(span, Source(path=str(path)), 1 << 24) if isinstance(d, Document)]
        random.Random(name).shuffle(texts)
        found += [text[:CHARACTERS] for text in texts[:1_200]]
    assert len(found) >= DOCUMENTS
    return found


def single_rules() -> dict[str, dict[str, Callable[[], object]]]:
    """Ruleset -> reason -> a filter of datatrove with that rule alone."""
    from datatrove.pipeline.filters import FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter

    quality = {
        "gopher_short_doc": {"min_doc_words": 50},
        "gopher_long_doc": {"max_doc_words": 100_000},
        "gopher_below_avg_threshold": {"min_avg_word_length": 3},
        "gopher_above_avg_threshold": {"max_avg_word_length": 10},
        "gopher_too_many_bullets": {"max_bullet_lines_ratio": 0.9},
        "gopher_too_many_end_ellipsis": {"max_ellipsis_lines_ratio": 0.3},
        "gopher_below_alpha_threshold": {"max_non_alpha_words_ratio": 0.8},
        "gopher_enough_stop_words": {"min_stop_words": 2},
    }
    off = dict.fromkeys(key for rule in quality.values() for key in rule)
    repetition = {name: {name: limit} for name, limit in (
        ("dup_para_frac", 0.3), ("dup_para_char_frac", 0.2), ("dup_line_frac", 0.3), ("dup_line_char_frac", 0.2)
    )}  # fmt: skip
    repetition |= {f"top_{n}_gram": {"top_n_grams": ((n, x),)} for n, x in ((2, 0.2), (3, 0.18), (4, 0.16))}
    repetition |= {
        f"duplicated_{n}_n_grams": {"dup_n_grams": ((n, round(0.20 - 0.01 * n, 2)),)} for n in range(5, 11)
    }
    none = dict.fromkeys(("dup_para_frac", "dup_para_char_frac", "dup_line_frac", "dup_line_char_frac"))
    none |= {"top_n_grams": (), "dup_n_grams": ()}
    symbols = {**off, "max_symbol_word_ratio": 0.1}
    gopher = {
        r: lambda k=k: GopherQualityFilter(**{**off, "max_symbol_word_ratio": None, **k})
        for r, k in quality.items()
    }
    gopher |= {
        r: lambda: GopherQualityFilter(**symbols)
        for r in ("gopher_too_many_hashes", "gopher_too_many_ellipsis")
    }
    gopher |= {r: lambda k=k: GopherRepetitionFilter(**{**none, **k}) for r, k in repetition.items()}
    whole = {
        "line_punct_thr": 0.0,
        "short_line_thr": 2.0,
        "char_duplicates_ratio": 2.0,
        "new_line_ratio": 1e9,
    }
    fineweb = {"line_punct_ratio": {"line_punct_thr": 0.12}, "short_line_ratio": {"short_line_thr": 0.67},
               "char_dup_ratio": {"char_duplicates_ratio": 0.01}, "list_ratio": {"new_line_ratio": 0.3}}  # fmt: skip
    return {
        "gopher@datatrove": gopher,
        "fineweb@datatrove": {
            r: lambda k=k: FineWebQualityFilter(**{**whole, **k}) for r, k in fineweb.items()
        },
    }


@pytest.mark.realdata
@pytest.mark.parametrize("name", ["gopher@datatrove", "fineweb@datatrove"])
def test_every_rule_says_what_datatrove_says(
    name: str, documents: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from datatrove.data import Document as Peer
    from datatrove.pipeline.filters import (
        fineweb_quality_filter,
        gopher_quality_filter,
        gopher_repetition_filter,
    )

    for module in (fineweb_quality_filter, gopher_quality_filter, gopher_repetition_filter):
        monkeypatch.setattr(module, "split_into_words", lambda text, language: list(segments(text)))
    ruleset = load_ruleset(name)
    verdicts = ruleset.judge(scan(pa.array(documents, pa.large_string()), splitters_of([ruleset])))
    filters = {reason: make() for reason, make in single_rules()[name].items()}
    assert set(filters) == set(ruleset.rules) - {"empty"}
    disagreements: Counter[str] = Counter()
    hits: Counter[str] = Counter()
    for column, text in enumerate(documents):
        mine = {r for r, hit in zip(ruleset.rules, verdicts[:, column], strict=True) if hit}
        for reason, peer in filters.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                said = peer.filter(Peer(text=text, id=""))
            # Two of its rules share one setting: the second speaks only where the first is silent.
            theirs = said is not True and said[1] == reason
            if reason == "gopher_too_many_ellipsis" and said is not True and said[1] != reason:
                continue
            hits[reason] += theirs
            disagreements[reason] += theirs != (reason in mine)
    print(f"\n{name}: {len(documents)} documents, hits {dict(hits)}, disagreements {+disagreements}")
    assert sum(hits.values()) > 1_000
    assert sum(disagreements.values()) <= 0.001 * len(documents)
