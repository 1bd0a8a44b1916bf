"""Near-duplicates. Oracles: sets of word tuples in plain Python, the S-curve, brute force over all pairs."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from itertools import combinations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lavra.corpus.near.bands import KEY, PAIR, band_keys, candidate_pairs, place, s_curve
from lavra.corpus.near.config import NearDuplicates
from lavra.corpus.near.shingles import shingle_sets, signatures
from lavra.corpus.near.verify import removals, similarity

LIMITS = NearDuplicates()


def array(texts: list[str]) -> pa.LargeStringArray:
    return pa.array(texts, pa.large_string())


def sets(texts: list[str], code: bool = False) -> list[set[int]]:
    return [set(found.tolist()) for found in shingle_sets(array(texts), np.full(len(texts), code))]


def signed(texts: list[str], count: int = 112, code: bool = False) -> np.ndarray:
    return signatures(array(texts), np.full(len(texts), code), count)[0]


def jaccard(a: set, b: set) -> float:
    return len(a & b) / len(a | b) if a | b else 0.0


def planted(similarity: float, number: int, shingles: int = 400) -> tuple[str, str, float]:
    """Two texts whose shingle sets overlap by about this much, and by exactly how much."""
    shared = round(2 * shingles * similarity / (1 + similarity))
    words = [f"w{number}x{i}" for i in range(2 * shingles - shared + 4)]
    first, second = words[: shingles + 4], words[shingles - shared :]
    return " ".join(first), " ".join(second), jaccard(*sets([" ".join(first), " ".join(second)]))


# --- shingles ---


@given(st.lists(st.sampled_from(["one", "two", "three", "four", "five", "six", "seven"]), max_size=40))
def test_shingles_are_the_distinct_runs_of_five_words(words: list[str]) -> None:
    runs = {tuple(words[i : i + 5]) for i in range(max(1, len(words) - 4))} - {()}
    assert len(sets([" ".join(words)])[0]) == len(runs)


def test_case_punctuation_and_white_space_do_not_tell_prose_apart_and_numbers_do() -> None:
    a, b, c = sets(
        [
            "The ship, it sailed at nine; nobody knew.",
            "the  ship it sailed\nat nine nobody knew",
            "the ship it sailed at 9 nobody knew",
        ]
    )
    assert a == b and jaccard(a, c) < 0.5
    tables = sets([" ".join(str(n * k) for n in range(50)) for k in (3, 7)])
    assert jaccard(*tables) < 0.1


def test_operators_are_words_of_code_only() -> None:
    texts = ["y = x + 1 ; z = y", "y = x - 1 ; z = y"]
    assert jaccard(*sets(texts)) == 1.0 and jaccard(*sets(texts, code=True)) < 0.5


def test_texts_without_spaces_have_shingles_of_characters() -> None:
    chinese, thai = "自然语言处理是人工智能的一个重要方向", "ภาษาไทยเขียนติดกันไม่มีช่องว่าง"
    assert all(len(found) > 10 for found in sets([chinese, thai]))


def test_short_texts_are_alike_only_if_their_words_are() -> None:
    cat, dog, shout, none, empty = sets(["cat", "dog", "CAT!", "...", ""])
    assert cat == shout and not cat & dog and len(cat) == 1 and none == empty == set()
    _, sizes = signatures(array(["cat", "...", ""]), np.zeros(3, bool), 8)
    assert sizes.tolist() == [1, 0, 0]


@settings(deadline=None)
@given(st.lists(st.text(max_size=60), min_size=1, max_size=5), st.booleans())
def test_any_text_is_read_the_same_alone_and_among_others(texts: list[str], code: bool) -> None:
    together = sets(texts, code)
    assert together == [sets([text], code)[0] for text in texts]
    assert np.array_equal(signed(texts, code=code)[::-1], signed(texts[::-1], code=code))


def test_signatures_are_the_same_in_every_process() -> None:
    code = (
        "import numpy as np, pyarrow as pa; from lavra.corpus.near.shingles import signatures;"
        "print(signatures(pa.array(['one two three four five six'], pa.large_string()), np.zeros(1, bool), 4)[0])"
    )
    found = {subprocess.check_output([sys.executable, "-c", code]) for _ in range(2)}
    assert found == {f"{signed(['one two three four five six'], 4)}\n".encode()}


@pytest.mark.parametrize("similarity", [0.2, 0.5, 0.8, 0.95])
def test_signatures_estimate_the_jaccard_similarity_within_three_deviations(similarity: float) -> None:
    errors, true = [], similarity
    for number in range(60):
        first, second, true = planted(similarity, number)
        a, b = signed([first, second], 128)
        errors.append(float((a == b).mean()) - true)
    deviation = math.sqrt(true * (1 - true) / 128)
    assert abs(np.mean(errors)) < 3 * deviation / math.sqrt(60)
    assert 0.7 * deviation < np.std(errors) < 1.3 * deviation


# --- candidates ---


def pairs_of(texts: list[str], tmp_path, bands: int = 16, rows: int = 7, buckets: int = 4) -> set[tuple]:
    keys = band_keys(signed(texts, bands * rows), 0, np.arange(len(texts)), bands)
    found = list(candidate_pairs(np.array_split(keys, 3), buckets, tmp_path / "scratch"))
    return {tuple(pair) for part in found for pair in part.tolist()}


@pytest.mark.parametrize("similarity", [0.5, 0.7, 0.8, 0.9])
def test_planted_pairs_become_candidates_as_often_as_the_s_curve_says(similarity: float, tmp_path) -> None:
    count, texts, expected = 300, [], 0.0
    for number in range(count):
        first, second, true = planted(similarity, number, 120)
        texts += [first, second]
        expected += s_curve(true, 16, 7)
    hits = len(pairs_of(texts, tmp_path) & {(2 * n + 1, 2 * n) for n in range(count)})
    spread = 4 * math.sqrt(count * max(0.01, expected / count * (1 - expected / count)))
    assert abs(hits - expected) <= spread


def test_a_unit_of_which_no_document_is_left_has_no_keys() -> None:
    keys = band_keys(np.empty((0, 112), np.uint32), 3, np.empty(0, np.int64), 16)
    assert keys.dtype == KEY and len(keys) == 0


def test_k_equal_documents_give_fewer_than_2k_pairs(tmp_path) -> None:
    text = " ".join(f"word{i}" for i in range(30))
    found = pairs_of([text] * 500, tmp_path)
    assert found == {(i, 0) for i in range(1, 500)} | {(i, i - 1) for i in range(1, 500)}


def test_number_of_buckets_does_not_matter(tmp_path) -> None:
    draw = random.Random(0)
    base = [f"w{i}" for i in range(60)]
    texts = [" ".join(base[: draw.randint(30, 60)]) for _ in range(60)]
    assert pairs_of(texts, tmp_path, buckets=1) == pairs_of(texts, tmp_path, buckets=16)
    assert not next(candidate_pairs([np.empty(0, KEY)], 2, tmp_path / "s")).size


# --- what goes ---


def decide(texts: list[str], pairs: list[tuple[int, int]], limits: NearDuplicates = LIMITS):
    values = shingle_sets(array(texts), np.zeros(len(texts), bool))
    bounds = np.concatenate([[0], np.cumsum([len(v) for v in values])])
    flat = np.concatenate(values)

    def similarities(wanted):
        return similarity(flat, bounds, wanted["member"].astype(np.int64), wanted["other"].astype(np.int64))

    return removals(np.array(sorted(pairs), PAIR), similarities, limits)


def all_pairs(count: int) -> list[tuple[int, int]]:
    return [(b, a) for a, b in combinations(range(count), 2)]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(8, 30)), min_size=2, max_size=9))
def test_given_all_pairs_what_goes_is_what_a_walk_in_corpus_order_removes(windows) -> None:
    words = [f"w{i}" for i in range(60)]
    texts = [" ".join(words[start : start + length]) for start, length in windows]
    shingles = sets(texts)
    stay: list[int] = []
    gone = set()
    for member, mine in enumerate(shingles):
        alike = [
            other
            for other in stay
            if jaccard(mine, shingles[other]) >= 0.8 or len(mine & shingles[other]) / len(mine) >= 0.95
        ]
        (gone.add if alike else stay.append)(member)
    found, _ = decide(texts, all_pairs(len(texts)))
    assert {r.member for r in found} == gone
    for removal in found:
        a, b = shingles[removal.member], shingles[removal.kept]
        assert removal.kept in stay and removal.jaccard == pytest.approx(jaccard(a, b))
        assert removal.containment == pytest.approx(len(a & b) / len(a))


def test_the_ends_of_a_chain_both_stay() -> None:
    # Neighbours share 82 %, the ends nothing.
    words, shingles, step = [f"w{i}" for i in range(4000)], 100, 10
    texts = [" ".join(words[k * step : k * step + shingles + 4]) for k in range(30)]
    shared = sets(texts)
    assert jaccard(shared[0], shared[1]) == pytest.approx(0.82, abs=0.01) and not shared[0] & shared[29]
    found, linked = decide(texts, [(k, k - 1) for k in range(1, 30)])
    stay = set(range(30)) - {r.member for r in found}
    assert len(stay) == 15
    assert set(linked) == stay - {0} and set(linked.values()) == {0}  # one side of the split


def test_a_cluster_of_equal_documents_loses_all_but_one_however_it_is_linked() -> None:
    texts = [" ".join(f"word{i}" for i in range(30))] * 40
    for pairs in (all_pairs(40), [(k, k - 1) for k in range(1, 40)], [(k, 0) for k in range(1, 40)]):
        found, linked = decide(texts, pairs)
        assert [(r.member, r.kept) for r in found] == [(k, 0) for k in range(1, 40)] and not linked


def test_a_candidate_that_is_not_alike_stays() -> None:
    first, second, true = planted(0.5, 0)
    assert true < 0.6 and decide([first, second], [(1, 0)]) == ([], {})


def test_a_part_of_an_earlier_document_goes_and_the_whole_of_an_earlier_part_stays() -> None:
    words = [f"w{i}" for i in range(200)]
    whole, part = " ".join(words), " ".join(words[:60])
    assert [r.member for r in decide([whole, part], [(1, 0)])[0]] == [1]
    assert decide([part, whole], [(1, 0)])[0] == []


def test_places_are_ordered_like_the_corpus() -> None:
    assert place(1, 0) > place(0, 2**32 - 1)


# --- in the corpus ---


@pytest.fixture
def copied(tmp_path, write_jsonl, prose_text):
    """60 documents, then slightly changed copies of the first 20 in another file."""
    texts = [prose_text(i, 30) for i in range(60)]
    changed = [
        text.replace(text.split()[40], "changed", 1) + f" Ending {i}." for i, text in enumerate(texts[:20])
    ]
    write_jsonl(tmp_path / "in/a.jsonl", [{"id": f"a{i}/x", "text": t} for i, t in enumerate(texts)])
    write_jsonl(tmp_path / "in/b.jsonl", [{"id": f"b{i}/x", "text": t} for i, t in enumerate(changed)])
    return tmp_path / "in"


def test_changed_copies_go_with_the_place_and_likeness_of_what_stays(
    tmp_path, copied, build, accounting
) -> None:
    import pyarrow.parquet as pq

    build(tmp_path / "out", copied, workers=2)
    reasons = accounting(tmp_path / "out")["reasons"]
    assert reasons["near_duplicate"]["documents"] == 20 and reasons["duplicate"]["documents"] == 0
    dropped = pq.ParquetDataset(tmp_path / "out/dropped").read().to_pylist()
    assert all(row["duplicate_of"].startswith("in: a.jsonl:byte ") for row in dropped)
    assert all(0.8 < row["similarity"] < 1 for row in dropped)
    build(tmp_path / "kept", copied, near_duplicates=NearDuplicates(enabled=False))
    assert accounting(tmp_path / "kept")["totals"]["kept"]["documents"] == 80


def test_a_chain_of_documents_is_held_out_or_trained_on_as_one(tmp_path, write_jsonl, build, rows) -> None:
    draw = random.Random(0)
    records = []
    for chain in range(40):
        words = [f"c{chain}w{i}" for i in range(200)]
        texts = [" ".join(words[k * 10 : k * 10 + 104]) for k in range(9)]
        records += [{"text": text, "id": f"{draw.random()}/{chain}"} for text in texts]
    draw.shuffle(records)
    write_jsonl(tmp_path / "a.jsonl", records)
    build(tmp_path / "out", tmp_path / "a.jsonl", rulesets=(), validation_fraction=0.3)
    sides = {
        side: {row["text"].split("w")[0] for row in rows(tmp_path / "out", side)}
        for side in ("train", "validation")
    }
    assert len(sides["train"]) > 20 and len(sides["validation"]) > 5
    assert not sides["train"] & sides["validation"]
