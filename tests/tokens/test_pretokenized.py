"""Tokenised sources; oracle: files written here by the published formats, and the documents that went into them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from lavra.artifact import Artifact, read_json
from lavra.corpus.documents import content_id
from lavra.errors import PreflightError
from lavra.tokenizer.bpe import Tokenizer, train_bpe
from lavra.tokens import importing
from lavra.tokens.build import build_tokens, open_store
from lavra.tokens.config import TokenSource
from lavra.tokens.importing import Import, Origins, held_out_documents, vocabulary_of
from lavra.tokens.pretokenized import TokenFile, cut_into_parts, scan_token_sources
from lavra.tokens.store import token_dtype

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
FOREIGN_END = 60000  # an end token that is no id of our tokenizer
Documents = Sequence[Sequence[Sequence[int]]]  # of sequences of ids


def write_megatron(prefix: Path, documents: Documents, dtype: str = "uint16", modes: bool = False) -> None:
    """`IndexedDatasetBuilder` of Megatron-LM, by its description."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    itemsize, bounds = np.dtype(dtype).itemsize, [0]
    for document in documents:
        bounds.append(bounds[-1] + len(document))
    with open(f"{prefix}.bin", "wb") as file:
        for sequence in sequences:
            file.write(np.array(sequence, dtype).tobytes())
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00")
        file.write(struct.pack("<Q", 1))
        file.write(struct.pack("<B", CODES[dtype]))
        file.write(struct.pack("<Q", len(sequences)))
        file.write(struct.pack("<Q", len(bounds)))
        file.write(np.array(lengths, np.int32).tobytes())
        file.write(np.array([sum(lengths[:i]) * itemsize for i in range(len(lengths))], np.int64).tobytes())
        file.write(np.array(bounds, np.int64).tobytes())
        if modes:
            file.write(np.zeros(len(sequences), np.int8).tobytes())


def write_llmc(
    path: Path, ids: Sequence[int], magic: int = 20240520, version: int = 1, dtype: str = "uint16"
):
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(ids)
    path.write_bytes(header.tobytes() + np.array(ids, dtype).tobytes())


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [f"Document {i}: the cat's hat — naïve 日本語 {i * 7919}\n" * (1 + i % 3) for i in range(60)]


@pytest.fixture(scope="module")
def tokenizer(texts: list[str]) -> Tokenizer:
    return Tokenizer(train_bpe(texts, vocab_size=330, pattern="gpt-2"))


@pytest.fixture
def build(tmp_path: Path, tokenizer: Tokenizer) -> Callable[..., Artifact]:
    """`build(*sources, **inputs)` -> tokens artifact of those sources and no corpus.

    A fifth of the bytes is held out.
    """
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/tokenizer.json").write_text(tokenizer._inner.to_str())
    zero = {"train_documents": 0, "validation_documents": 0}
    corpus = Artifact(tmp_path / "corpus", "corpus", {}, "", zero)

    def run(*sources: TokenSource, fraction: float = 0.2, workers: int = 1, **inputs: Any) -> Artifact:
        given = Artifact(tmp_path / "tokenizer", "tokenizer", {}, "")
        wanted = Import(scan_token_sources(sources), fraction, 10**9, workers)
        with mock.patch("os.fsync"):
            return build_tokens(
                corpus, given, tmp_path / "tokens", packing="concat", seq_len=16, inputs=inputs, wanted=wanted
            )

    return run


def stored(folder: Path, tokenizer: Tokenizer) -> dict[str, list[tuple[str, list[int], int]]]:
    """Source -> (id, tokens, bytes) of every stored document, both splits."""
    found: dict[str, list[tuple[str, list[int], int]]] = {}
    for split in ("train", "validation"):
        store = open_store(folder, split, tokenizer)
        sizes = np.concatenate([d["bytes"] for d in store._documents])
        for i in range(store.n_documents):
            source = store.sources[int(np.searchsorted(store.source_offsets, store.starts[i], "right")) - 1]
            found.setdefault(source, []).append(
                (store.document_id(i), store.document(i).tolist(), int(sizes[i]))
            )
    return found


def expected(texts: Sequence[str], tokenizer: Tokenizer) -> list[tuple[str, list[int], int]]:
    """What the corpus would have stored for these texts."""
    return [
        (content_id(text)[0].hex(), [*tokenizer.encode(text), tokenizer.end_id], content_id(text)[1])
        for text in texts
    ]


# --- what comes out -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64", "int16"])
@pytest.mark.parametrize("closed", [True, False], ids=["append-eod", "no eod"])
def test_megatron_documents_become_those_of_their_texts(
    tmp_path, build, tokenizer, texts, dtype: str, closed: bool
) -> None:
    end = [tokenizer.end_id] if closed else []
    write_megatron(tmp_path / "web", [[tokenizer.encode(t) + end] for t in texts], dtype, modes=closed)
    built = build(TokenSource(path=str(tmp_path / "web")))
    assert sorted(stored(built.path, tokenizer)["web"]) == sorted(expected(texts, tokenizer))
    assert built.summary["validation_documents"] >= 3


def test_sequences_of_a_document_are_joined_and_empty_documents_are_counted(
    tmp_path, build, tokenizer, texts
) -> None:
    def sequences(text: str) -> list[list[int]]:
        ids = [*tokenizer.encode(text), tokenizer.end_id]
        return [ids[:5], [], ids[5:9], ids[9:]]

    none: list[list[int]] = []
    end = tokenizer.end_id
    empty = [[[]], [[end]], [[end], [end]]]
    doubled = [[*tokenizer.encode(texts[30]), end], [end, end]]
    documents = [none, *map(sequences, texts[:30]), *empty, doubled, *map(sequences, texts[31:]), none]
    write_megatron(tmp_path / "web", documents)
    built = build(TokenSource(path=str(tmp_path / "web.bin"), name="w"))
    assert sorted(stored(built.path, tokenizer)["w"]) == sorted(expected(texts, tokenizer))
    counts = read_json(built.path / "imported.json")["sources"]["w"]
    assert counts["documents_in"] == 65 and counts["dropped"] == {"empty": 5}
    assert counts["train"] + counts["validation"] == 60


@pytest.mark.parametrize("order", ["behind", "before"])
@pytest.mark.parametrize("kind", ["raw", "llm.c", "llm.c uint32"])
def test_a_stream_is_cut_at_its_end_tokens_which_become_ours(
    tmp_path, build, tokenizer, texts, order: str, kind: str
) -> None:
    ids: list[int] = []
    for text in texts:
        encoded = tokenizer.encode(text)
        ids += [*encoded, FOREIGN_END] if order == "behind" else [FOREIGN_END, *encoded]
    path = tmp_path / "owt.bin"
    if kind == "raw":
        path.write_bytes(np.array(ids, np.uint16).tobytes())
    elif kind == "llm.c":
        write_llmc(path, ids)
    else:
        write_llmc(path, ids, 20240801, 7, "uint32")
    with mock.patch("lavra.tokens.pretokenized.BLOCK_TOKENS", 7):  # end tokens on either side of a block
        built = build(TokenSource(path=str(path), end_id=FOREIGN_END))
    assert sorted(stored(built.path, tokenizer)["owt"]) == sorted(expected(texts, tokenizer))
    assert read_json(built.path / "imported.json")["sources"]["owt"]["dropped"] == {"empty": 0}


def test_a_stream_keeps_its_unfinished_last_document_and_drops_what_is_empty(
    tmp_path, build, tokenizer
) -> None:
    ids = [5, 6, FOREIGN_END, FOREIGN_END, 7, FOREIGN_END, 8, 9, 9]
    (tmp_path / "a.bin").write_bytes(np.array(ids, "<u2").tobytes())
    built = build(TokenSource(path=str(tmp_path / "a.bin"), end_id=FOREIGN_END), fraction=0.4)
    end = tokenizer.end_id
    documents = sorted(tokens for _, tokens, _ in stored(built.path, tokenizer)["a"])
    assert documents == [[5, 6, end], [7, end], [8, 9, 9, end]]
    assert read_json(built.path / "imported.json")["sources"]["a"]["dropped"] == {"empty": 1}


def test_the_text_of_a_document_may_be_longer_than_a_block(tmp_path, build, tokenizer, texts) -> None:
    write_megatron(tmp_path / "web", [[tokenizer.encode(t)] for t in texts])
    with mock.patch.object(importing, "BLOCK_TOKENS", 11):
        built = build(TokenSource(path=str(tmp_path / "web")))
    assert sorted(stored(built.path, tokenizer)["web"]) == sorted(expected(texts, tokenizer))


def test_two_sources_in_many_parts_by_several_workers_are_the_same_as_in_one(
    tmp_path, build, tokenizer, texts
) -> None:
    write_megatron(tmp_path / "web", [[tokenizer.encode(t)] for t in texts[:40]])
    (tmp_path / "books").mkdir()
    for name, some in (("b", texts[40:45]), ("a", texts[45:])):
        ids = [i for text in some for i in [*tokenizer.encode(text), 0]]
        (tmp_path / f"books/{name}.bin").write_bytes(np.array(ids, np.uint16).tobytes())
    sources = (TokenSource(path=str(tmp_path / "web")), TokenSource(path=str(tmp_path / "books"), end_id=0))
    built = build(*sources)
    whole = {name: sorted(documents) for name, documents in stored(built.path, tokenizer).items()}
    assert whole == {
        "web": sorted(expected(texts[:40], tokenizer)),
        "books": sorted(expected(texts[40:], tokenizer)),
    }
    with mock.patch.object(importing, "PART_TOKENS", 100):
        cut = build(*sources, again=1, workers=2)
    assert len(read_json(cut.path / "imported.json")["parts"]) > 10
    assert {n: sorted(d) for n, d in stored(cut.path, tokenizer).items()} == whole
    assert cut.summary["validation_documents"] == built.summary["validation_documents"]


def test_equal_documents_stay_on_one_side(tmp_path, build, tokenizer, texts) -> None:
    ids = [i for text in [*texts, *texts] for i in [*tokenizer.encode(text), 0]]
    (tmp_path / "a.bin").write_bytes(np.array(ids, np.uint16).tobytes())
    built = build(TokenSource(path=str(tmp_path / "a.bin"), end_id=0))
    sides = [
        {store.document_id(i) for i in range(store.n_documents)}
        for store in (open_store(built.path, split, tokenizer) for split in ("train", "validation"))
    ]
    assert sides[0] and sides[1] and not sides[0] & sides[1]


def test_a_large_vocabulary_is_stored_in_uint32(tmp_path, build) -> None:
    from tokenizers import AddedToken

    inner = train_bpe(["some text to learn from " * 9], vocab_size=265, pattern="gpt-2")
    inner.add_tokens([AddedToken(f"word{i}") for i in range(70_000)])
    large = Tokenizer(inner)
    (tmp_path / "tokenizer/tokenizer.json").write_text(inner.to_str())
    documents = [[70_000 + i, 12, 66_000 - i] for i in range(30)]
    write_megatron(tmp_path / "web", [[d] for d in documents], "int32")
    built = build(TokenSource(path=str(tmp_path / "web")))
    assert built.summary["dtype"] == "uint32" == token_dtype(large.vocab_size).name
    assert sorted(t for _, t, _ in stored(built.path, large)["web"]) == [
        [*d, large.end_id] for d in documents
    ]


# --- the texts of tokens ------------------------------------------------------------------------


def test_bytes_of_tokens_are_the_text_that_decode_gives(tokenizer, texts) -> None:
    vocabulary = vocabulary_of(tokenizer)
    odd = "".join(map(chr, range(0, 0x250))) + "🎉 \x00\r\n\t­"
    for text in [*texts, odd]:
        assert vocabulary.text(np.array(tokenizer.encode(text))) == text.encode()
    assert vocabulary.text(np.array([tokenizer.end_id])) == b"<|endoftext|>"


def test_a_tokenizer_that_is_not_byte_level_is_refused(tokenizer) -> None:
    from tokenizers import decoders

    other = Tokenizer(train_bpe(["ab ab"], vocab_size=260, pattern="gpt-2"))
    other._inner.decoder = decoders.Metaspace()
    with pytest.raises(PreflightError, match="byte-level"):
        other.token_bytes()


# --- what is refused ----------------------------------------------------------------------------


def torn_bin(folder: Path) -> None:
    (folder / "web.bin").write_bytes((folder / "web.bin").read_bytes()[:-2])


def torn_index(folder: Path) -> None:
    (folder / "web.idx").write_bytes((folder / "web.idx").read_bytes()[:-1])


def poke(at: int, data: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = bytearray((folder / "web.idx").read_bytes())
        content[at : at + len(data)] = data
        (folder / "web.idx").write_bytes(bytes(content))

    return change


# header 34, lengths 3 x 4, pointers 3 x 8, bounds 3 x 8
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (torn_bin, "the file is torn: 10 bytes, 12 expected"),
        (torn_index, "the index is torn: 93 bytes, 94 expected"),
        (poke(0, b"TNTIDX"), "no Megatron index of version 1"),
        (poke(9, b"\x02"), "no Megatron index of version 1"),
        (poke(17, b"\x07"), "type code 7"),
        (poke(34, struct.pack("<i", 3)), "one behind the other"),
        (poke(34, struct.pack("<i", -2)), "one behind the other"),
        (poke(34, struct.pack("<3i3q", 5, -1, 2, 0, 10, 8)), "one behind the other"),
        (poke(54, struct.pack("<q", 8)), "one behind the other"),
        (poke(70, struct.pack("<q", 1)), "each of the 3 sequences once"),
        (poke(78, struct.pack("<q", 4)), "each of the 3 sequences once"),
        (poke(86, struct.pack("<q", 2)), "each of the 3 sequences once"),
    ],
)
def test_a_damaged_megatron_pair_is_one_error_that_names_the_file(
    tmp_path, damage: Callable[[Path], None], words: str
) -> None:
    write_megatron(tmp_path / "web", [[[1, 2]], [[3, 4, 5], [6]]])
    assert scan_token_sources([TokenSource(path=str(tmp_path / "web"))])[0].n_tokens == 6
    damage(tmp_path)
    with pytest.raises(PreflightError) as error:
        scan_token_sources([TokenSource(path=str(tmp_path / "web"))])
    assert words in error.value.what and error.value.where.startswith(str(tmp_path / "web."))


def refusal(*sources: TokenSource, taken: Sequence[str] = ()) -> str:
    with pytest.raises(PreflightError) as error:
        scan_token_sources(sources, taken)
    return str(error.value)


def test_streams_that_cannot_be_whole_or_understood_are_refused(tmp_path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"\1\0\2\0\3")
    assert "torn: 5 bytes, 6 expected" in refusal(TokenSource(path=str(path), end_id=1))
    write_llmc(path, [1, 2, 3])
    path.write_bytes(path.read_bytes() + b"\0\0")
    assert "torn: 1032 bytes, 1030 expected" in refusal(TokenSource(path=str(path), end_id=1))
    write_llmc(path, [1, 2, 3])
    assert "set end_id" in refusal(TokenSource(path=str(path)))
    assert "no token file" in refusal(TokenSource(path=str(tmp_path / "nothing")))
    np.array([1, 50_000, 7, 50_256] * 300, np.uint32).tofile(path)
    assert "32 bits wide" in refusal(TokenSource(path=str(path), end_id=50_256))
    write_llmc(path, [1, 2, 3])
    named = TokenSource(path=str(path), end_id=1)
    assert "two sources are named `a`" in refusal(named, named)
    assert "two sources are named `a`" in refusal(named, taken=["a"])
    file = scan_token_sources([TokenSource(path=str(path), end_id=77)])[0]
    with pytest.raises(PreflightError, match="no end token 77 among 3 tokens"):
        file.document_bounds()


@pytest.mark.parametrize("bad", [330, 40_000, -1, -300])
def test_an_id_that_the_tokenizer_does_not_have_is_named_before_a_shard_is_written(
    tmp_path, build, tokenizer, texts, bad: int
) -> None:
    documents = [[tokenizer.encode(text)] for text in texts]
    documents[41][0][3] = bad
    write_megatron(tmp_path / "web", documents, "int32")
    with mock.patch.object(importing, "PART_TOKENS", 100), pytest.raises(PreflightError) as error:
        build(TokenSource(path=str(tmp_path / "web")))
    assert f"token id {bad} in document 41; the tokenizer has the ids 0 to 329" in error.value.what
    assert error.value.where == str(tmp_path / "web.bin")
    assert not list((tmp_path / "tokens").glob("*.tokens"))


def test_a_source_of_one_document_without_a_corpus_leaves_nothing_to_validate_on(tmp_path, build) -> None:
    write_megatron(tmp_path / "web", [[[5, 6, 7, 8]]])
    with pytest.raises(PreflightError, match="leave no document for validation"):
        build(TokenSource(path=str(tmp_path / "web")))


def test_an_entry_that_the_vocabulary_leaves_out_is_unknown(tmp_path, build) -> None:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models

    inner = Inner(models.BPE(vocab={"a": 0, "b": 1, "c": 5}, merges=[]))
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>"])
    (tmp_path / "tokenizer/tokenizer.json").write_text(inner.to_str())
    write_megatron(tmp_path / "web", [[[0, 1]], [[0, 2, 5]]])
    with pytest.raises(PreflightError, match="token id 2 in document 1"):
        build(TokenSource(path=str(tmp_path / "web")))


def test_a_file_that_shrinks_after_it_was_looked_at_is_no_shorter_source(tmp_path) -> None:
    write_megatron(tmp_path / "web", [[[1, 2]], [[3]]])
    file = scan_token_sources([TokenSource(path=str(tmp_path / "web"))])[0]
    torn_bin(tmp_path)
    with pytest.raises(PreflightError, match="became shorter"):
        file.read(0, 3)


# --- finding documents again, and continuing -----------------------------------------------------


def test_a_document_is_found_again_by_file_and_number(tmp_path, build, tokenizer, texts) -> None:
    write_megatron(tmp_path / "web", [[[]], *([tokenizer.encode(t)] for t in texts)])
    with mock.patch.object(importing, "PART_TOKENS", 100):
        built = build(TokenSource(path=str(tmp_path / "web")))
    origins = Origins(built.path)
    place = {content_id(text)[0].hex(): f"{tmp_path}/web.bin#{i + 1}" for i, text in enumerate(texts)}
    for split in ("train", "validation"):
        store = open_store(built.path, split, tokenizer)
        for i in range(store.n_documents):
            identity = store.document_id(i)
            assert origins.find(store.part_of(i), identity) == place[identity]
    assert origins.find(99_999, "0" * 32) == ""
    rows = list(held_out_documents(built.path, tokenizer))
    assert len(rows) == built.summary["validation_documents"]
    for row in rows:
        assert row["path"] == place[row["id"]] and row["bytes"] == len(row["text"].encode())
        assert row["id"] == blake2b(row["text"].encode(), digest_size=16).hexdigest()


def test_an_interrupted_import_keeps_its_finished_parts_and_ends_the_same(
    tmp_path, build, tokenizer, texts
) -> None:
    write_megatron(tmp_path / "web", [[tokenizer.encode(t)] for t in texts])
    source = TokenSource(path=str(tmp_path / "web"))

    def snapshot(folder: Path) -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in folder.iterdir()}

    with mock.patch.object(importing, "PART_TOKENS", 150):
        whole = snapshot(build(source).path)
        write_part, written = importing.write_part, []

        def killed(folder: Path, split: str, number: int, *rest: Any) -> None:
            if len(written) == 5:  # between validation and training of the third part
                raise KeyboardInterrupt
            written.append((split, number))
            write_part(folder, split, number, *rest)

        with mock.patch.object(importing, "write_part", killed), pytest.raises(KeyboardInterrupt):
            build(source, n=2)
        before = {p: p.stat().st_mtime_ns for p in (tmp_path / "tokens").iterdir()}
        again = build(source, n=2)
        kept = {p.name for p, time in before.items() if p.exists() and p.stat().st_mtime_ns == time}
    done = {f"train-{number:05d}" for split, number in written if split == "train"}
    assert len(done) == 2 and done <= {name.split("-000.")[0] for name in kept}
    assert {name for name in whole if name.endswith(".records")} <= kept
    result = snapshot(again.path)
    assert {n: c for n, c in result.items() if n != "COMPLETE"} == {
        n: c for n, c in whole.items() if n != "COMPLETE"
    }


def test_parts_hold_whole_documents_in_order_and_a_long_one_alone(tmp_path) -> None:
    lengths = [3, 0, 2, 50, 1, 0, 4, 4, 0]
    write_megatron(tmp_path / "web", [[[7] * n] for n in lengths])
    file: TokenFile = scan_token_sources([TokenSource(path=str(tmp_path / "web"))])[0]
    parts = list(cut_into_parts([file], 4, 6))
    assert [part.number for part in parts] == list(range(4, 4 + len(parts)))
    assert [n for part in parts for n in np.diff(part.bounds).tolist()] == lengths
    assert [part.first for part in parts] == np.cumsum([0, *(len(p.bounds) - 1 for p in parts)])[:-1].tolist()
    assert all(part.n_tokens <= 6 or len(part.bounds) == 2 for part in parts)
