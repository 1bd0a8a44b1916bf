"""What is held out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lavra.corpus.records import LOCATED, group_hash
from lavra.corpus.split import FULL, cut_tail, is_held_out, plan_split
from lavra.errors import PreflightError


def records(documents):
    """(group name, kind, bytes) of each document -> located records."""
    located = np.zeros(len(documents), LOCATED)
    draw = np.random.default_rng(len(documents))
    located["hash_high"] = draw.integers(0, 2**64, len(documents), dtype=np.uint64)
    for row, (group, kind, size) in enumerate(documents):
        located[row]["group"], located[row]["kind"] = group_hash(group), kind
        located[row]["bytes"], located[row]["row"] = size, row
    return located


def held_out(tmp_path, documents, fraction=0.05, limit=10**12):
    located = records(documents)
    plan = plan_split(lambda: [located], fraction, limit, tmp_path / "scratch")
    assert not (tmp_path / "scratch").exists()
    return plan, is_held_out(located, plan.groups, plan.documents)


def books(count, chapters=3, kind=0, prefix="book"):
    return [(f"{prefix}{i}", kind, 100 + i % 17) for i in range(count) for _ in range(chapters)]


def test_whole_groups_fill_the_target(tmp_path):
    documents = books(400)
    plan, mask = held_out(tmp_path, documents)
    out = {group for (group, _, _), held in zip(documents, mask, strict=True) if held}
    assert sum(group in out for group, _, _ in documents) == mask.sum()
    size = sum(size for (_, _, size), held in zip(documents, mask, strict=True) if held)
    target = int(0.05 * sum(size for _, _, size in documents))
    assert FULL * target <= size <= target
    assert plan.notes == [] and plan.cut is None and len(plan.documents) == 0


def test_terabytes_do_not_overflow(tmp_path):
    documents = [(f"book{i}", i % 2, 10**10) for i in range(400)]
    plan, mask = held_out(tmp_path, documents, limit=10**15)
    assert plan.target_bytes == (10**11, 10**11) and mask.sum() == 20


def test_the_upper_bound_of_bytes_holds(tmp_path):
    documents = books(400)
    _, mask = held_out(tmp_path, documents, limit=1000)
    assert 0 < sum(size for (_, _, size), held in zip(documents, mask, strict=True) if held) <= 1000


@pytest.mark.parametrize("added", [1, 40, 400, 4000])
def test_added_data_moves_only_groups_at_the_boundary(tmp_path, added):
    before = [(f"book{i}", 0, 100) for i in range(400)]
    _, old = held_out(tmp_path, before)
    _, new = held_out(tmp_path, before + [(f"new{i}", 0, 100) for i in range(added)])
    new = new[: len(before)]
    # The old groups that are held out are the same, up to the end of their one fixed order.
    assert (old <= new).all() or (new <= old).all()
    assert abs(int(old.sum()) - int(new.sum())) <= max(4, 0.6 * old.sum())


def test_prose_and_code_are_both_held_out_in_proportion(tmp_path):
    documents = books(300) + books(60, kind=1, prefix="repo")
    _, mask = held_out(tmp_path, documents)
    for kind in (0, 1):
        total = sum(size for _, k, size in documents if k == kind)
        out = sum(size for (_, k, size), held in zip(documents, mask, strict=True) if held and k == kind)
        assert 0.5 * 0.05 * total < out <= 0.05 * total


def test_a_group_of_both_kinds_stays_together(tmp_path):
    documents = [
        (f"module{i}", kind, 1000 if kind else 50 + 13 * i % 97) for i in range(200) for kind in (0, 1)
    ]
    _, mask = held_out(tmp_path, documents)
    assert mask.any() and (mask[0::2] == mask[1::2]).all()


def test_one_group_is_divided_by_document_and_says_so(tmp_path):
    plan, mask = held_out(tmp_path, [("everything", 0, 100)] * 200)
    assert mask.sum() == 10 and "one by one" in plan.notes[0]


def test_small_leftovers_do_not_stand_for_large_groups(tmp_path):
    # Without the fallback the five bytes of the note would be the whole validation set.
    documents = [("a", 0, 100)] * 100 + [("b", 0, 100)] * 100 + [("note", 0, 5)]
    _, mask = held_out(tmp_path, documents)
    assert mask.sum() >= 8


def test_one_oversized_group_leaves_other_groups_whole(tmp_path):
    wiki = [("wiki", 0, 100)] * 1000
    modules = [(f"module{i}", kind, 20) for i in range(100) for kind in (0, 1)]
    _, mask = held_out(tmp_path, wiki + modules)
    assert mask[:1000].any()
    assert (mask[1000::2] == mask[1001::2]).all()


def test_one_document_gives_its_tail(tmp_path):
    plan, mask = held_out(tmp_path, [("only", 0, 1000)])
    assert not mask.any() and plan.cut == (0, 0, 50) and "tail" in plan.notes[0]


def test_a_single_character_cannot_be_divided(tmp_path):
    with pytest.raises(PreflightError, match="too little text"):
        held_out(tmp_path, [("only", 0, 1)])


@settings(deadline=None, max_examples=60)
@given(
    documents=st.lists(
        st.tuples(st.sampled_from("abcdefghij"), st.integers(0, 1), st.integers(2, 500)),
        min_size=1,
        max_size=60,
    ),
    fraction=st.floats(0.01, 0.49),
)
def test_both_sides_hold_text_and_whole_groups_do_not_straddle(tmp_path_factory, documents, fraction):
    plan, mask = held_out(tmp_path_factory.mktemp("split"), documents, fraction)
    sizes = np.array([size for _, _, size in documents])
    out = sizes[mask].sum() + (plan.cut.tail_bytes if plan.cut else 0)
    assert 0 < out < sizes.sum()
    assert out <= max(1, int(sizes.sum() * fraction))
    if not len(plan.documents):
        groups = [
            {g for (g, _, _), m in zip(documents, mask, strict=True) if m == side} for side in (True, False)
        ]
        assert not groups[0] & groups[1]


@pytest.mark.parametrize(
    ("text", "tail_bytes", "expected"),
    [
        ("line one\nline two\nline three\nend", 16, ("line one\nline two\n", "line three\nend")),
        ("abcdefghij", 3, ("abcdefg", "hij")),
        ("ééééé", 3, ("ééé", "éé")),
        ("é1", 2, ("é", "1")),
        ("x", 1, ("x", "")),
    ],
)
def test_a_tail_is_cut_at_a_line_or_between_characters(text, tail_bytes, expected):
    assert cut_tail(text, tail_bytes) == expected
