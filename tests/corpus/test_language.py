"""Languages of texts. Oracle: sentences whose language is known."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lavra.corpus.language import UNKNOWN, identify

ENGLISH = "The committee will publish its findings on the state of the harbour next week."
PORTUGUESE = "A comissão vai publicar na próxima semana as suas conclusões sobre o estado do porto."


def test_a_line_feed_does_not_end_the_text() -> None:
    lines = "\n".join(PORTUGUESE.split())
    assert identify([lines]) == identify([PORTUGUESE]) and identify([PORTUGUESE])[0].code == "pt"


def test_capitals_are_the_same_language() -> None:
    assert [g.code for g in identify([ENGLISH.upper(), PORTUGUESE.upper()])] == ["en", "pt"]


@pytest.mark.parametrize("text", ["", " \n\t", "12 34 …", "👍👍👍", "\0\ufffd", "\u200d" * 9])
def test_a_text_without_letters_has_no_language(text: str) -> None:
    assert identify([text]) == [(UNKNOWN, 0.0)]


@settings(deadline=None)
@given(st.lists(st.one_of(st.text(max_size=50), st.just("word"), st.just(ENGLISH + PORTUGUESE)), max_size=5))
def test_any_text_gets_one_guess_and_a_probability(texts: list[str]) -> None:
    found = identify(texts)
    assert len(found) == len(texts) and all(0 <= guess.score <= 1 and guess.code for guess in found)


@pytest.mark.slow
@pytest.mark.realdata
def test_sentences_of_66_languages_are_told_apart(realdata: Path) -> None:
    packed = realdata / "lid/lingua-sentences.jsonl.zst"
    lines = subprocess.run(["zstd", "-dc", packed], check=True, capture_output=True).stdout.splitlines()
    rows = [json.loads(line) for line in lines]
    right: Counter[str] = Counter()
    count = Counter(row["lang"] for row in rows)
    for row, guess in zip(rows, identify([row["text"] for row in rows]), strict=True):
        right[row["lang"]] += row["lang"] == guess.code
    known = [language for language in count if right[language]]  # nine have no label in lid.176
    assert len(known) >= 66
    assert sum(right[k] for k in known) / sum(count[k] for k in known) >= 0.89
    assert right["pt"] / count["pt"] >= 0.98 and right["en"] / count["en"] >= 0.99


def test_a_corpus_keeps_the_languages_that_are_wanted(tmp_path, write_jsonl, build, accounting, rows) -> None:
    texts = (
        [f"{ENGLISH} {i}" for i in range(20)] + [f"{PORTUGUESE} {i}" for i in range(20)] + ["mmm hm " * 20]
    )
    write_jsonl(tmp_path / "a.jsonl", [{"text": text, "id": f"{i}/x"} for i, text in enumerate(texts)])
    options = {"rulesets": (), "near_duplicates": {"enabled": False}}
    build(tmp_path / "out", tmp_path / "a.jsonl", languages=("pt",), **options)
    kept = [row for side in ("train", "validation") for row in rows(tmp_path / "out", side)]
    assert {row["language"] for row in kept} == {"pt"} and len(kept) == 20
    assert accounting(tmp_path / "out")["reasons"]["other_language"]["documents"] == 21
    build(tmp_path / "all", tmp_path / "a.jsonl", **options)
    assert accounting(tmp_path / "all")["totals"]["kept"]["documents"] == 41
