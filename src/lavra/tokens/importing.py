"""Tokenised sources -> token shards like those of the corpus, in two passes over parts of whole documents.

    read     every id is held against the vocabulary, every document gets the id of its text: no shard exists yet
    split    by the corpus's own rule (corpus/split.py), every document its own group
    write    one training and one validation shard a part

What a part leaves is written whole, so an interrupted import goes on with the parts that are missing. The records of
all documents stay in the artifact: they say which document of which file an id is.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lavra import artifact
from lavra.corpus.documents import Document
from lavra.corpus.executor import map_units
from lavra.corpus.formats import PROSE
from lavra.corpus.records import Records, iter_located, pack, read_records
from lavra.corpus.split import is_held_out, plan_split
from lavra.errors import PreflightError
from lavra.tokenizer.bpe import Tokenizer
from lavra.tokens.pretokenized import BLOCK_TOKENS, FilePart, TokenFile, cut_into_parts
from lavra.tokens.store import Encoded, TokenStore, part_exists, token_dtype, write_part

PART_TOKENS = 8 << 20  # a worker holds some 20 bytes for each
ORIGINS = "imported.json"


class Vocabulary(NamedTuple):
    """Entries of a tokenizer as one array of bytes: entry i is `data[offsets[i] : offsets[i] + lengths[i]]`."""

    end_id: int
    data: NDArray[np.uint8]
    offsets: NDArray[np.int32]
    lengths: NDArray[np.int32]

    @property
    def dtype(self) -> np.dtype:
        """Of stored ids."""
        return token_dtype(len(self.lengths))

    def text(self, tokens: NDArray) -> bytes:
        """UTF-8 of the tokens, a character cut at an end as it is."""
        blocks = (tokens[i : i + BLOCK_TOKENS] for i in range(0, len(tokens), BLOCK_TOKENS))
        return b"".join(self._gather(block) for block in blocks)

    def _gather(self, tokens: NDArray) -> bytes:
        lengths = self.lengths[tokens]
        stops = np.cumsum(lengths, dtype=np.int32)
        source = np.repeat(self.offsets[tokens] - (stops - lengths), lengths)
        source += np.arange(len(source), dtype=np.int32)
        return self.data[source].tobytes()


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """The entries of a byte-level tokenizer."""
    table = tokenizer.token_bytes()
    lengths = np.array([len(entry) for entry in table], np.int32)
    offsets = np.cumsum(lengths, dtype=np.int32) - lengths
    return Vocabulary(tokenizer.end_id, np.frombuffer(b"".join(table), np.uint8), offsets, lengths)


class Import(NamedTuple):
    """What to import, and how.

    Attributes:
        files: from `scan_token_sources`.
        validation_fraction: share of the bytes to hold out.
        validation_max_bytes: upper bound of the bytes held out.
        workers: processes.
    """

    files: Sequence[TokenFile]
    validation_fraction: float
    validation_max_bytes: int
    workers: int


def import_sources(wanted: Import, tokenizer: Tokenizer, out: Path, *, number: int) -> dict[str, Any]:
    """Write all documents to parts from `number` on; returns what came of them, by source.

    Raises:
        PreflightError: an id that the tokenizer does not have, or documents that cannot be told apart.
    """
    parts = list(cut_into_parts(wanted.files, number, PART_TOKENS))
    records = [_records_path(out, part.number) for part in parts]
    vocabulary = vocabulary_of(tokenizer)
    weights = [part.n_tokens for part in parts]
    reads = [_Read(part, vocabulary, path) for part, path in zip(parts, records, strict=True)]
    map_units(_read_part, reads, weights, workers=wanted.workers, label="  tokens: read")

    def chunks() -> Iterator[Records]:
        return chain.from_iterable(iter_located(unit, path) for unit, path in enumerate(records))

    # A cut is not made: no document of a source that is one document is held out.
    plan = plan_split(chunks, wanted.validation_fraction, wanted.validation_max_bytes, out / "scratch")
    held_out = (plan.groups, plan.documents)
    writes = [_Write(*read, *held_out, out) for read in reads]
    map_units(_write_part, writes, weights, workers=wanted.workers, label="  tokens: write")
    return _write_origins(out, reads, *held_out)


# --- the two passes -----------------------------------------------------------------------------


class _Read(NamedTuple):
    part: FilePart
    vocabulary: Vocabulary
    records: Path


class _Write(NamedTuple):
    part: FilePart
    vocabulary: Vocabulary
    records: Path
    groups: Records
    documents: Records
    out: Path


def _read_part(task: _Read) -> None:
    """Check the ids of a part and write its records, one a document; an empty document has 0 bytes."""
    part, vocabulary, path = task
    if path.exists():
        return
    tokens = _tokens(part, vocabulary)
    starts, stops = _contents(part, tokens, vocabulary.end_id)
    at = np.concatenate([[0], np.cumsum(vocabulary.lengths[tokens], dtype=np.int64)])
    text = memoryview(vocabulary.text(tokens))
    packed = []
    for position, (start, stop) in enumerate(zip(at[starts].tolist(), at[stops].tolist(), strict=True)):
        identity = hashlib.blake2b(
            text[start:stop], digest_size=16
        ).digest()  # as of a document of the corpus
        document = Document(identity, "", "", identity.hex(), PROSE, ".bin", "", stop - start, position)
        packed.append(pack(document, 0))
    artifact.write_bytes(path, b"".join(packed))


def _write_part(task: _Write) -> None:
    """Validation first: the part counts once its training list is there."""
    part, vocabulary, out = task.part, task.vocabulary, task.out
    if part_exists(out, "train", part.number):
        return
    records = read_records(task.records)
    tokens = _tokens(part, vocabulary)
    starts, stops = _contents(part, tokens, vocabulary.end_id)
    held_out, full = is_held_out(records, task.groups, task.documents), records["bytes"] > 0
    end = np.array([vocabulary.end_id], vocabulary.dtype)
    for split, chosen in (("validation", full & held_out), ("train", full & ~held_out)):
        encoded = Encoded()
        for i in np.flatnonzero(chosen).tolist():
            encoded.tokens.append(np.concatenate([tokens[starts[i] : stops[i]], end]))
            encoded.ids.append(_identity(records[i]))
            encoded.sizes.append(int(records["bytes"][i]))
        by_source = {part.file.source: encoded} if encoded.tokens else {}
        write_part(out, split, part.number, by_source, vocabulary.dtype)


def _tokens(part: FilePart, vocabulary: Vocabulary) -> NDArray:
    """Ids of a part as they will be stored, the source's end token become lavra's.

    Raises:
        PreflightError: an id that is not in the vocabulary.
    """
    ids = part.file.read(int(part.bounds[0]), int(part.bounds[-1]))
    ends = ids == (vocabulary.end_id if part.file.end_id is None else part.file.end_id)
    known = np.append(vocabulary.lengths > 0, False)  # the last for ids beyond
    size = len(known) - 1
    unknown = ~known[np.where((ids < 0) | (ids >= size), size, ids)] & ~ends
    if unknown.any():
        place = int(np.argmax(unknown))
        document = part.first + int(np.searchsorted(part.bounds, part.bounds[0] + place, side="right")) - 1
        raise PreflightError(
            f"token id {ids[place]} in document {document}; the tokenizer has the ids 0 to {size - 1}",
            where=part.file.path,
            hint="tokenizer.path must be the tokenizer that this file was written with",
        )
    tokens = ids.astype(vocabulary.dtype)
    tokens[ends] = vocabulary.end_id
    return tokens


def _contents(part: FilePart, tokens: NDArray, end_id: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each document's own tokens start and stop in the part, without the end tokens behind them."""
    bounds = part.bounds - part.bounds[0]
    starts, stops = bounds[:-1], bounds[1:].copy()
    while (closed := (stops > starts) & (tokens[np.maximum(stops, 1) - 1] == end_id)).any():
        stops[closed] -= 1
    return starts, stops


# --- what became of the documents ---------------------------------------------------------------


def _write_origins(out: Path, reads: Sequence[_Read], groups: Records, documents: Records) -> dict[str, Any]:
    """Count documents by source: in = train + validation + dropped; note where each part's documents come from."""
    sources: dict[str, Any] = defaultdict(
        lambda: {"documents_in": 0, "train": 0, "validation": 0, "dropped": {"empty": 0}}
    )
    for part, _, path in reads:
        counts, records = sources[part.file.source], read_records(path)
        full, held_out = records["bytes"] > 0, is_held_out(records, groups, documents)
        counts["documents_in"] += len(part.bounds) - 1
        counts["train"] += int((full & ~held_out).sum())
        counts["validation"] += int((full & held_out).sum())
        counts["dropped"]["empty"] += int((~full).sum())
    parts = {str(r.part.number): {"path": r.part.file.path, "first_document": r.part.first} for r in reads}
    artifact.write_json(out / ORIGINS, {"sources": sources, "parts": parts})
    return dict(sources)


class Origins:
    """Which document of which file an imported one is; the records of the part asked for last are kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._parts = artifact.read_json(folder / ORIGINS)["parts"] if (folder / ORIGINS).exists() else {}
        self._part = -1
        self._records: Records

    def find(self, part: int, identity: str) -> str:
        """`PATH#NUMBER` of a document, numbers from 0; "" where the part is none of an import."""
        if str(part) not in self._parts:
            return ""
        if part != self._part:
            self._part, self._records = part, read_records(_records_path(self.folder, part))
        origin, records = self._parts[str(part)], self._records
        high, low = int(identity[:16], 16), int(identity[16:], 16)
        position = int(np.argmax((records["hash_high"] == high) & (records["hash_low"] == low)))
        return f"{origin['path']}#{origin['first_document'] + position}"


def held_out_documents(folder: Path, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Imported validation documents as rows of the corpus: `id`, `text`, `path`, `key`, `kind`, `file_type`, `bytes`."""
    if not (folder / ORIGINS).exists():
        return
    store = TokenStore(folder, "validation", end_id=tokenizer.end_id, dtype=token_dtype(tokenizer.vocab_size))
    origins = Origins(folder)
    for index in range(store.n_documents):
        identity = store.document_id(index)
        if path := origins.find(store.part_of(index), identity):
            text = tokenizer.decode(store.document(index)[:-1].tolist())
            row = {"id": identity, "text": text, "path": path, "key": "", "kind": PROSE, "file_type": ".bin"}
            yield row | {"bytes": len(text.encode())}


def _records_path(folder: Path, part: int) -> Path:
    return folder / f"imported-{part:05d}.records"


def _identity(record: Any) -> str:
    return f"{int(record['hash_high']):016x}{int(record['hash_low']):016x}"
