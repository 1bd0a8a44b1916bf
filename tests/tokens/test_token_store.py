"""Oracle: the concatenation of the documents, each followed by one end token."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lavra import artifact
from lavra.console import set_quiet
from lavra.corpus.store import DOCUMENT_SCHEMA, part_writer
from lavra.errors import PreflightError
from lavra.tokenizer.bpe import END_OF_TEXT, SPECIAL_TOKENS, Tokenizer, load_tokenizer, train_bpe
from lavra.tokens.build import build_tokens, open_store
from lavra.tokens.store import Encoded, TokenStore, part_exists, token_dtype, write_part

document = st.lists(st.integers(1, 47), max_size=12)
shards = st.lists(st.lists(document, max_size=5), min_size=1, max_size=4).filter(any)


@settings(max_examples=30, deadline=None)
@given(shards=shards, data=st.data())
def test_reading_anywhere_equals_the_concatenation(write_store, shards, data) -> None:
    documents = [d for shard in shards for d in shard]
    stream = [token for d in documents for token in (*d, 0)]
    with tempfile.TemporaryDirectory() as folder:
        store = write_store(Path(folder), shards)
        assert (store.n_tokens, store.n_documents) == (len(stream), len(documents))
        start = data.draw(st.integers(0, len(stream)))
        stop = data.draw(st.integers(start, len(stream)))
        assert store.read(start, stop).tolist() == stream[start:stop]
        assert [store.document(i).tolist() for i in range(len(documents))] == [[*d, 0] for d in documents]
        owner = [i for i, d in enumerate(documents) for _ in range(len(d) + 1)]
        if start < stop:
            expected = [f"{i:032x}" for i in sorted(set(owner[start:stop]))]
            assert [store.document_id(i) for i in store.documents_in(start, stop)] == expected


@settings(max_examples=30, deadline=None)
@given(shards=shards)
def test_the_index_accounts_for_every_byte_of_the_shards(write_store, shards) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_store(folder, shards)
        for number, documents in enumerate(shards):
            index = np.load(folder / f"train-{number:05d}-000.documents.npy")
            size = (folder / f"train-{number:05d}-000.tokens").stat().st_size
            assert size == 2 * sum(len(d) + 1 for d in documents)
            assert [*index["start"], size // 2] == [
                sum(len(d) + 1 for d in documents[:i]) for i in range(len(documents) + 1)
            ]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_535, "<u2"), (65_536, "<u2"), (65_537, "<u4")])
def test_the_largest_id_of_a_vocabulary_survives(tmp_path, write_store, vocab_size: int, dtype: str) -> None:
    assert token_dtype(vocab_size) == np.dtype(dtype)
    store = write_store(tmp_path, [[[vocab_size - 1, 1]]], vocab_size)
    assert store.read(0, 3).tolist() == [vocab_size - 1, 1, 0]


def test_an_id_that_does_not_fit_is_refused_not_wrapped(tmp_path) -> None:
    with pytest.raises(OverflowError):
        write_part(tmp_path, "train", 0, {"text": Encoded([[65_536]], ["0" * 32], [1])}, token_dtype(65_536))
    assert not part_exists(tmp_path, "train", 0)


def test_a_missing_split_is_said(tmp_path) -> None:
    with pytest.raises(PreflightError, match="no train tokens"):
        TokenStore(tmp_path, "train", end_id=0, dtype=np.dtype("<u2"))


# --- the stage ---

TEXTS = [
    f"end {END_OF_TEXT} inside",
    "".join(SPECIAL_TOKENS),
    "plain text about plain things",
    "",
    f"{END_OF_TEXT}\n{END_OF_TEXT}",
]
SOURCES = ("web", "books")
CONCAT = {"packing": "concat", "seq_len": 8, "inputs": {}}


@pytest.fixture(scope="module")
def tokenizer_json() -> str:
    return train_bpe(TEXTS * 4, vocab_size=290, pattern="qwen2").to_str()


def corpus_and_tokenizer(folder: Path, tokenizer_json: str) -> tuple[artifact.Artifact, artifact.Artifact]:
    """TEXTS in two training parts and one validation part."""
    parts = {"train": [TEXTS[:3], TEXTS[3:]], "validation": [TEXTS[2:3]]}
    for split, texts in parts.items():
        for number, part in enumerate(texts):
            rows = [
                {name: "" for name in DOCUMENT_SCHEMA.names}
                | {
                    "id": f"{number:016x}{i:016x}",
                    "text": text,
                    "bytes": len(text.encode()),
                    "source": SOURCES[i % 2],
                }
                for i, text in enumerate(part)
            ]
            with part_writer(folder / f"corpus/{split}/part-{number:05d}.parquet", DOCUMENT_SCHEMA) as append:
                append(pa.RecordBatch.from_pylist(rows, DOCUMENT_SCHEMA))
    counts = {f"{split}_documents": sum(map(len, texts)) for split, texts in parts.items()}
    corpus = artifact.Artifact(folder / "corpus", "corpus", {}, "", counts)
    artifact.write_bytes(folder / "tokenizer/tokenizer.json", tokenizer_json.encode())
    return corpus, artifact.Artifact(folder / "tokenizer", "tokenizer", {}, "")


@pytest.fixture(autouse=True)
def quiet():
    set_quiet(True)
    yield
    set_quiet(False)


def test_each_document_ends_once_whatever_its_text_says(tmp_path, tokenizer_json) -> None:
    corpus, trained = corpus_and_tokenizer(tmp_path, tokenizer_json)
    built = build_tokens(corpus, trained, tmp_path / "tokens", **CONCAT)
    tokenizer = load_tokenizer(trained.path / "tokenizer.json")
    store = open_store(tmp_path / "tokens", "train", tokenizer)
    assert store.n_documents == built.summary["train_documents"] == len(TEXTS)
    by_source = [
        text for source in sorted(SOURCES) for part in (TEXTS[:3], TEXTS[3:])
        for text, owner in zip(part, itertools.cycle(SOURCES)) if owner == source
    ]  # fmt: skip
    for i, text in enumerate(by_source):
        *tokens, end = store.document(i).tolist()
        assert end == tokenizer.end_id and tokenizer.end_id not in tokens
        assert tokenizer.decode(tokens) == text
    assert store.sources == sorted(SOURCES)
    assert store.source_offsets[1] == sum(len(store.document(i)) for i in range(2))
    assert built.summary["train_tokens"] == store.n_tokens


def test_an_interrupted_build_keeps_whole_parts_and_ends_up_the_same(
    tmp_path, tokenizer_json, monkeypatch
) -> None:
    corpus, trained = corpus_and_tokenizer(tmp_path, tokenizer_json)
    encoded: list[int] = []
    encode = Tokenizer.encode_batch

    def failing(self, texts):
        encoded.append(len(texts))
        if len(encoded) == 2:
            raise KeyboardInterrupt
        return encode(self, texts)

    monkeypatch.setattr(Tokenizer, "encode_batch", failing)
    with pytest.raises(KeyboardInterrupt):
        build_tokens(corpus, trained, tmp_path / "tokens", **CONCAT)
    resumed = build_tokens(corpus, trained, tmp_path / "tokens", **CONCAT)
    assert encoded == [3, 2, 2, 1]  # the first part was not encoded again
    build_tokens(corpus, trained, tmp_path / "again", **CONCAT)
    files = [p.name for p in sorted((tmp_path / "again").iterdir())]
    assert files == [p.name for p in sorted(resumed.path.iterdir())]
    assert all((tmp_path / "again" / f).read_bytes() == (resumed.path / f).read_bytes() for f in files)
