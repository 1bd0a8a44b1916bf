"""Stage `tokens`: corpus + tokenizer -> token shards, one for each corpus part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from lavra import artifact, console
from lavra.artifact import Artifact
from lavra.corpus.store import Split, iter_part, part_paths
from lavra.tokenizer.bpe import Tokenizer, load_tokenizer
from lavra.tokens.store import TokenStore, shard_exists, token_dtype, write_shard

FORMAT_VERSION = 1
SLICE_BYTES = 2 << 20
SPLITS: tuple[Split, ...] = ("train", "validation")


def build_tokens(corpus: Artifact, tokenizer: Artifact, out: Path, *, inputs: dict[str, Any]) -> Artifact:
    """Encode every document, append one end token each; finished shards are kept on resume."""
    artifact.begin(out, "tokens", inputs)
    encoder = load_tokenizer(tokenizer.path / "tokenizer.json")
    parts = {split: part_paths(corpus.path, split) for split in SPLITS}
    total = sum(part.stat().st_size for paths in parts.values() for part in paths)
    with console.progress("  encoding", total) as bar:
        for split in SPLITS:
            for number, part in enumerate(parts[split]):
                if not shard_exists(out, split, number):
                    _encode_part(part, out, split, number, encoder)
                bar.advance(part.stat().st_size)
    stores = {split: open_store(out, split, encoder) for split in SPLITS}
    _check_identity(stores, corpus)
    summary = {
        f"{split}_{what}": getattr(store, f"n_{what}")
        for split, store in stores.items()
        for what in ("tokens", "documents")
    } | {"vocab_size": encoder.vocab_size, "dtype": token_dtype(encoder.vocab_size).name}
    return artifact.finish(out, "tokens", inputs, summary)


def open_store(folder: Path, split: str, tokenizer: Tokenizer) -> TokenStore:
    """The token stream of a split."""
    return TokenStore(folder, split, end_id=tokenizer.end_id, dtype=token_dtype(tokenizer.vocab_size))


def _encode_part(part: Path, out: Path, split: Split, number: int, encoder: Tokenizer) -> None:
    dtype = token_dtype(encoder.vocab_size)
    tokens: list[np.ndarray] = []
    ids: list[str] = []
    sizes: list[int] = []
    for batch in iter_part(part, ["id", "text", "bytes"]):
        for rows in _slices(batch):
            encoded = encoder.encode_batch(rows["text"].to_pylist())
            tokens += [np.array([*document, encoder.end_id], dtype) for document in encoded]
        ids += batch["id"].to_pylist()
        sizes += batch["bytes"].to_pylist()
    write_shard(out, split, number, tokens, ids, sizes, dtype)


def _slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Rows of about `SLICE_BYTES` of text: tokens being encoded take some 40 times their final memory."""
    ends = np.cumsum(batch["bytes"].to_numpy())
    start = 0
    while start < batch.num_rows:
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + SLICE_BYTES, side="right")))
        yield batch.slice(start, stop - start)
        start = stop


def _check_identity(stores: dict[Split, TokenStore], corpus: Artifact) -> None:
    """Documents in the corpus == documents in the store (law 4)."""
    for split, store in stores.items():
        expected = corpus.summary[f"{split}_documents"]
        assert store.n_documents == expected, f"{split}: {store.n_documents} of {expected} documents encoded"
