"""Exact deduplication against a dictionary."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lavra.corpus import records as records_module
from lavra.corpus.dedup import copies_of_unit, deduplicate, iter_kept, open_copies
from lavra.corpus.documents import Document
from lavra.corpus.records import (
    RECORD,
    bucket_count,
    contains,
    group_hash,
    iter_located,
    pack,
    partition,
    read_records,
)


def write_units(folder, units):
    """Texts of each unit -> record files."""
    paths = []
    for unit, texts in enumerate(units):
        packed = []
        for row, text in enumerate(texts):
            identity = hashlib.blake2b(text.encode(), digest_size=16).digest()
            document = Document(
                identity, text, "", f"group {text}", "prose", ".txt", "", len(text), 100 + row
            )
            packed.append(pack(document, file=unit))
        paths.append(folder / f"{unit}.bin")
        if packed:  # a unit without documents has no file
            paths[-1].write_bytes(b"".join(packed))
    return paths


def located(paths):
    return (chunk for unit, path in enumerate(paths) for chunk in iter_located(unit, path))


def brute_force(units):
    first, copies = {}, []
    for unit, texts in enumerate(units):
        for row, text in enumerate(texts):
            if text in first:
                kept_unit, kept_row = first[text]
                copies.append((unit, row, kept_unit, 100 + kept_row, 0, 1))
            else:
                first[text] = unit, row
    return copies


@settings(deadline=None, max_examples=30)
@given(
    units=st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=12), min_size=1, max_size=6),
    many=st.booleans(),
)
def test_the_first_of_equal_documents_survives(tmp_path_factory, units, many):
    folder = tmp_path_factory.mktemp("dedup")
    paths = write_units(folder, units)
    # A large claimed count forces many buckets.
    deduplicate(located(paths), 500_000 if many else sum(map(len, units)), folder / "copies")
    found = [
        tuple(map(int, copy))
        for unit in range(len(units))
        for copy in copies_of_unit(open_copies(folder / "copies"), unit)
    ]
    assert found == brute_force(units)
    kept = [
        tuple(row)
        for chunk in iter_kept(located(paths), folder / "copies")
        for row in chunk[["unit", "row"]].tolist()
    ]
    copies = {copy[:2] for copy in found}
    assert kept == [
        (u, r) for u, texts in enumerate(units) for r in range(len(texts)) if (u, r) not in copies
    ]
    assert not (folder / "copies.scratch").exists()


def test_chunk_size_does_not_matter(tmp_path, monkeypatch):
    units = [[str(i % 7) for i in range(50)], [str(i % 11) for i in range(50)]]
    paths = write_units(tmp_path, units)
    monkeypatch.setattr(records_module, "_CHUNK_ROWS", 3)
    deduplicate(located(paths), 100, tmp_path / "copies")
    found = [
        tuple(map(int, copy))
        for unit in range(2)
        for copy in copies_of_unit(open_copies(tmp_path / "copies"), unit)
    ]
    assert found == brute_force(units)


def test_a_record_holds_what_the_document_says(tmp_path):
    (path,) = write_units(tmp_path, [["text"]])
    (record,) = read_records(path)
    identity = hashlib.blake2b(b"text", digest_size=16).hexdigest()
    assert f"{record['hash_high']:016x}{record['hash_low']:016x}" == identity
    assert record["group"] == group_hash("group text") and record["bytes"] == 4 and record["position"] == 100


@pytest.mark.parametrize("buckets", [1, 2, 16])
def test_buckets_partition_all_records_in_the_order_of_the_key(tmp_path, buckets):
    chunk = np.zeros(1000, RECORD)
    chunk["group"] = np.random.default_rng(0).integers(0, 2**64, 1000, dtype=np.uint64)
    located = np.zeros(1000, records_module.LOCATED)
    located["group"] = chunk["group"]
    paths = partition([located], "group", buckets, tmp_path / "b")
    parts = [np.sort(records_module.read_bucket(path)["group"]) for path in paths]
    assert np.array_equal(np.concatenate(parts), np.sort(chunk["group"]))


def test_buckets_stay_small_as_the_corpus_grows():
    for count in (0, 1, 10**5, 10**6, 10**7, 8 * 10**7):
        size = count * records_module.LOCATED.itemsize / bucket_count(count)
        assert size <= 17 << 20
    assert bucket_count(10**9) == 256


def test_contains_agrees_with_a_set():
    members = np.array([3, 5, 2**63], np.uint64)
    values = np.array([0, 3, 4, 5, 2**63, 2**64 - 1], np.uint64)
    assert contains(values, members).tolist() == [False, True, False, True, True, False]
    assert not contains(values, members[:0]).any()
