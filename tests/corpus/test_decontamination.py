"""Benchmark items in the corpus. Oracle: words by a regular expression, runs by comparing lists."""

from __future__ import annotations

import json
import re
import unicodedata

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lavra.corpus.decontamination.config import Benchmark, Decontamination
from lavra.corpus.decontamination.items import item_runs, read_items
from lavra.corpus.decontamination.words import find_runs, make_runs, words_of
from lavra.corpus.documents import content_id
from lavra.corpus.near.shingles import SINGLE, roles
from lavra.errors import PreflightError
from lavra.recipe import load_recipe

QUESTION = (
    "Natalia sold clips to forty-eight of her friends in April, and then she sold half as many clips in May. "
    "How many clips did Natalia sell altogether in April and May?"
)
ANSWER = "Natalia sold twenty-four clips in May, so she sold seventy-two clips altogether."
WORDS = QUESTION.split()


def array(texts: list[str]) -> pa.LargeStringArray:
    return pa.array(texts, pa.large_string())


def table(folder) -> list[dict]:
    return pq.ParquetDataset(folder).read().to_pylist() if folder.exists() else []


def plain_words(text: str) -> list[str]:
    """Letters and digits of Latin script, without case and accents."""
    bare = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return re.findall(r"[0-9a-z]+", bare.lower())


def runs_in(words: list[str], runs: list[tuple[str, ...]]) -> set[tuple[int, int]]:
    """(first word, number of the run), by comparing."""
    starts = range(len(words))
    return {(i, n) for i in starts for n, run in enumerate(runs) if tuple(words[i : i + len(run)]) == run}


# --- words and runs ---


@settings(deadline=None)
@given(st.text(st.sampled_from("abcXYZ019áÉçñ .,-–\n\t'\"!àÅ"), max_size=60))
def test_words_are_letters_and_digits_without_case_and_accents(text: str) -> None:
    assert words_of(text) == plain_words(text)
    assert words_of(unicodedata.normalize("NFD", text)) == plain_words(text)


def test_scripts_without_spaces_have_words_of_one_character() -> None:
    assert words_of("天地玄黃，宇宙") == list("天地玄黃宇宙")
    assert words_of("ab天cd") == ["ab", "天", "cd"]
    # No more words than half the bytes, rounded up: the room that the kernels take.
    assert np.flatnonzero(roles() == SINGLE).min() >= 0x800


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.sampled_from("abcd"), max_size=30), min_size=1, max_size=6),
    st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4).map(tuple), max_size=8, unique=True),
)
def test_every_place_of_every_run_is_found_with_its_bytes(
    documents: list[list[str]], runs: list[tuple[str, ...]]
) -> None:
    texts = [" — ".join(words).upper() for words in documents]
    hits = find_runs(array(["dropped by a slice", *texts]).slice(1), make_runs(runs))
    found = {(int(h["document"]), int(h["first"]), int(h["run"])) for h in hits}
    assert found == {(d, i, n) for d, words in enumerate(documents) for i, n in runs_in(words, runs)}
    assert len(hits) == len(found)
    for hit in hits:
        part = texts[hit["document"]].encode()[hit["start_byte"] : hit["stop_byte"]].decode()
        assert tuple(words_of(part)) == runs[hit["run"]]


def test_more_hits_than_there_is_room_for_are_all_found() -> None:
    assert len(find_runs(array(["a " * 5000]), make_runs([("a", "a")]))) == 4999


def test_an_item_is_its_runs_or_its_parts_where_no_part_is_long_enough() -> None:
    long, short, tiny = [list(f"{name}{i}" for i in range(n)) for name, n in (("l", 6), ("s", 4), ("t", 1))]
    assert item_runs([long], 5, 3) == [(0, tuple(long[:5])), (1, tuple(long[1:]))]
    # A question that is too short alone: itself, and what crosses into the answer.
    assert item_runs([short, tiny], 5, 3) == [(0, (*short, *tiny)), (0, tuple(short))]
    assert item_runs([short, tiny], 6, 3) == [(0, tuple(short))]
    assert item_runs([short[:2], short[2:]], 6, 3) == [(0, tuple(short))]
    assert item_runs([short[:2]], 6, 3) == []


# --- in the corpus ---


@pytest.fixture
def benchmark(tmp_path, write_jsonl):
    """records -> settings that look for them."""

    def make(records: list[dict], **options) -> Decontamination:
        path = write_jsonl(tmp_path / "gsm.test.jsonl", records)
        return Decontamination(benchmarks=(Benchmark(path=str(path)),), **options)

    return make


@pytest.fixture
def contaminated(tmp_path, build, accounting, write_jsonl, prose_text):
    """(settings, texts) -> ids of dropped documents, rows of the report, facts; the texts are d0, d1..."""

    def run(settings: Decontamination, texts: list[str], workers: int = 1):
        clean = [{"text": prose_text(i), "id": f"clean{i}"} for i in range(5)]
        told = [
            {"text": f"{prose_text(90 + i)}\nDéjà vu, 黃:\n{text}\nThe end.", "id": f"d{i}"}
            for i, text in enumerate(texts)
        ]
        for name, records in (("a", [*clean, *told[::2]]), ("b", told[1::2])):
            write_jsonl(tmp_path / f"in/{name}.jsonl", records)
        out = tmp_path / f"out{workers}"
        build(
            out,
            tmp_path / "in",
            decontamination=settings,
            near_duplicates={"enabled": False},
            workers=workers,
        )
        facts = accounting(out)
        dropped = table(out / "dropped")
        assert facts["totals"]["records_in"]["documents"] == 5 + len(texts)
        assert facts["totals"]["kept"]["documents"] == 5 + len(texts) - len(dropped)
        assert all(row["reasons"] == ["contaminated"] for row in dropped)
        names = {content_id(record["text"])[0].hex(): record["id"] for record in told}
        report = [{**row, "id": names[row["id"]]} for row in table(out / "contamination")]
        return {names[row["id"]]: row["duplicate_of"] for row in dropped}, report, facts["contamination"]

    return run


SAME_ITEM = {
    "as it is": QUESTION,
    "a dash between words": " - ".join(WORDS),
    "upper case": QUESTION.upper(),
    "accents": QUESTION.replace("a", "á").replace("e", "e\u0301"),
    "wrapped": "\n".join(" ".join(WORDS[i : i + 8]) for i in range(0, len(WORDS), 8)),
    "quoted": "\n".join("> " + " ".join(WORDS[i : i + 8]) for i in range(0, len(WORDS), 8)),
    "half of it": " ".join(WORDS[:16]),
    "from the question into the answer": " ".join(WORDS[-7:] + ANSWER.split()[:7]),
}


def test_an_item_is_found_however_it_is_set_and_the_report_says_where(benchmark, contaminated) -> None:
    settings = benchmark([{"id": "x", "question": "Another one."}, {"question": QUESTION, "answer": ANSWER}])
    dropped, report, facts = contaminated(settings, list(SAME_ITEM.values()), workers=2)
    assert dropped == {f"d{i}": "gsm: line 2" for i in range(len(SAME_ITEM))}
    by_id = {row["id"]: row for row in report}
    for i, (how, text) in enumerate(SAME_ITEM.items()):
        row = by_id[f"d{i}"]
        assert (row["benchmark"], row["line"]) == ("gsm", 2), how
        assert text.lstrip("> ").startswith(row["excerpt"][:30]), how
        assert words_of(row["excerpt"]) == words_of(text)[: len(words_of(row["excerpt"]))], how
    whole = len(plain_words(QUESTION)) / len(plain_words(QUESTION + ANSWER))
    assert by_id["d0"]["covered"] == pytest.approx(whole)
    assert facts["gsm"] == {
        "items": 2,
        "fields": ["question", "answer"],
        "too_short": 1,
        "too_common": 0,
        "items_found": 1,
        "documents": len(SAME_ITEM),
    }


def test_words_in_another_order_or_fewer_than_a_run_are_no_contamination(benchmark, contaminated) -> None:
    settings = benchmark([{"question": QUESTION}])
    others = [
        " ".join(reversed(WORDS)),
        " ".join(WORDS[:11]),
        " ".join(w for i, w in enumerate(WORDS) if i % 10),
    ]
    assert contaminated(settings, others)[:2] == ({}, [])


def test_a_short_item_is_looked_for_whole(benchmark, contaminated) -> None:
    short = "Which planet of ours has the most moons?"
    settings = benchmark([{"question": short, "choices": ["Mars", "Saturn", "the Earth"], "answer": 1}])
    dropped, _, facts = contaminated(settings, [f"He asked: {short} Nobody knew.", short[:-7]])
    assert dropped == {"d0": "gsm: line 1"}
    assert facts["gsm"]["too_short"] == 0 and facts["gsm"]["fields"] == ["question", "choices"]


def test_a_phrase_of_the_benchmark_is_not_looked_for(benchmark, contaminated) -> None:
    phrase = "Read the passage below and choose the one answer that best completes the following sentence:"
    items = [{"prompt": f"{phrase} {name} {QUESTION}"} for name in ("Ann", "Bob", "Eve")]
    settings = benchmark([*items, {"prompt": phrase}], max_items=3)
    dropped, _, facts = contaminated(settings, [phrase, QUESTION])
    assert dropped == {"d1": "gsm: line 1"}, "three items share the question: not too many"
    assert facts["gsm"]["too_common"] == 1


def test_code_is_found_without_regard_to_layout(benchmark, contaminated) -> None:
    prompt = (
        "def has_close_elements(numbers, threshold):\n"
        '    """Check if in given list of numbers, are any two numbers closer than the threshold."""\n'
    )
    settings = benchmark([{"task_id": "HumanEval/0", "prompt": prompt, "entry_point": "has_close_elements"}])
    other = "def has_close_elements( numbers ,threshold ) :\n\t# " + " ".join(prompt.split()[3:])
    dropped, _, facts = contaminated(settings, [prompt, other])
    assert set(dropped) == {"d0", "d1"}
    assert facts["gsm"]["fields"] == ["prompt"]


def test_found_items_can_be_reported_only(benchmark, contaminated) -> None:
    settings = benchmark([{"question": QUESTION}], policy="report")
    dropped, report, facts = contaminated(settings, [QUESTION])
    assert dropped == {} and [row["id"] for row in report] == ["d0"] and facts["gsm"]["items_found"] == 1


def test_one_and_many_workers_find_the_same(benchmark, contaminated) -> None:
    settings = benchmark([{"question": QUESTION}, {"question": ANSWER}])
    texts = [QUESTION, ANSWER, "nothing of the kind", QUESTION + ANSWER]
    assert contaminated(settings, texts, workers=1) == contaminated(settings, texts, workers=2)


# --- benchmark files ---


def problem_of(*paths, **options) -> PreflightError:
    benchmarks = tuple(Benchmark(path=str(path), **options) for path in paths)
    with pytest.raises(PreflightError) as caught:
        read_items(Decontamination(benchmarks=benchmarks))
    return caught.value


def test_what_is_wrong_with_a_benchmark_is_said_with_its_line(tmp_path, write_jsonl) -> None:
    assert "nowhere.jsonl" in str(problem_of(tmp_path / "nowhere.jsonl"))
    broken = write_jsonl(tmp_path / "broken.jsonl", [{"question": QUESTION}, b"", b"{oops"])
    assert "broken.jsonl, line 3" in str(problem_of(broken))
    assert "line 1" in str(problem_of(write_jsonl(tmp_path / "list.jsonl", [b"[1]"])))
    good = write_jsonl(tmp_path / "good.jsonl", [{"question": QUESTION}])
    assert "no field `prompt`; it has: question" in str(problem_of(good, fields=("prompt",)))
    assert "two benchmarks are called `good`" in str(problem_of(good, good))


def test_paths_of_benchmarks_are_seen_from_the_recipe(tmp_path) -> None:
    recipe = tmp_path / "recipes/r.yaml"
    recipe.parent.mkdir()
    data = {
        "corpus": {
            "sources": [{"path": "text"}],
            "decontamination": {"benchmarks": [{"path": "../benchmarks/gsm.jsonl"}]},
        }
    }
    recipe.write_text(json.dumps(data))
    found = load_recipe(str(recipe)).recipe.corpus.decontamination.benchmarks
    assert found[0].path == str(tmp_path / "benchmarks/gsm.jsonl")
