"""Stage `tokens`: corpus and tokenised sources + tokenizer -> token shards, one for each part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from lavra import artifact, console
from lavra.artifact import Artifact
from lavra.corpus.store import Split, iter_part, part_paths
from lavra.errors import PreflightError
from lavra.tokenizer.bpe import Tokenizer, load_tokenizer
from lavra.tokens.config import Packing
from lavra.tokens.importing import Import, import_sources
from lavra.tokens.packing import ConcatRows, load_plan, plan_rows, save_plan
from lavra.tokens.store import Encoded, TokenStore, part_exists, token_dtype, write_part
from lavra.tokens.windows import Windows

FORMAT_VERSION = 2
SLICE_BYTES = 2 << 20
SPLITS: tuple[Split, ...] = ("train", "validation")


def build_tokens(
    corpus: Artifact,
    tokenizer: Artifact,
    out: Path,
    *,
    packing: Packing,
    seq_len: int,
    inputs: dict[str, Any],
    wanted: Import | None = None,
) -> Artifact:
    """Encode every document, append one end token each, plan the rows; finished parts are kept on resume.

    Args:
        wanted: tokenised sources, when there are any.
    """
    artifact.begin(out, "tokens", inputs)
    encoder = load_tokenizer(tokenizer.path / "tokenizer.json")
    parts = {split: part_paths(corpus.path, split) for split in SPLITS}
    total = sum(part.stat().st_size for paths in parts.values() for part in paths)
    with console.progress("  encoding", total) as bar:
        for split in SPLITS:
            for part in parts[split]:
                number = int(part.stem.removeprefix("part-"))
                if not part_exists(out, split, number):
                    _encode_part(part, out, split, number, encoder)
                bar.advance(part.stat().st_size)
    imported: dict[str, Any] = {}
    if wanted is not None:
        numbers = [int(part.stem.removeprefix("part-")) for paths in parts.values() for part in paths]
        imported = import_sources(wanted, encoder, out, number=max(numbers, default=-1) + 1)
        _say_what_came(imported, corpus)
    stores = {split: open_store(out, split, encoder) for split in SPLITS}
    _check_identity(stores, corpus, imported)
    if packing != "concat":
        for split, store in stores.items():
            save_plan(out, split, plan_rows(store, seq_len, best_fit=packing == "best_fit"))
    came = {"imported_documents": 0, "dropped_empty_documents": 0} if imported else {}
    for counts in imported.values():
        came["imported_documents"] += counts["train"] + counts["validation"]
        came["dropped_empty_documents"] += counts["dropped"]["empty"]
    summary = {
        f"{split}_{what}": getattr(store, f"n_{what}")
        for split, store in stores.items()
        for what in ("tokens", "documents")
    } | {**came, "vocab_size": encoder.vocab_size, "dtype": token_dtype(encoder.vocab_size).name}
    return artifact.finish(out, "tokens", inputs, summary)


def open_store(folder: Path, split: str, tokenizer: Tokenizer) -> TokenStore:
    """The token stream of a split."""
    return TokenStore(folder, split, end_id=tokenizer.end_id, dtype=token_dtype(tokenizer.vocab_size))


def open_windows(folder: Path, split: str, tokenizer: Tokenizer, packing: Packing, seq_len: int) -> Windows:
    """The training rows of a split."""
    store = open_store(folder, split, tokenizer)
    rows = ConcatRows(store, seq_len) if packing == "concat" else load_plan(folder, split, seq_len)
    return Windows(store, rows)


def _encode_part(part: Path, out: Path, split: Split, number: int, encoder: Tokenizer) -> None:
    dtype = token_dtype(encoder.vocab_size)
    by_source: dict[str, Encoded] = {}
    for batch in iter_part(part, ["id", "text", "source", "bytes"]):
        for rows in _slices(batch):
            encoded = encoder.encode_batch(rows["text"].to_pylist())
            columns = [rows[name].to_pylist() for name in ("source", "id", "bytes")]
            for tokens, source, identity, size in zip(encoded, *columns, strict=True):
                documents = by_source.setdefault(source, Encoded())
                documents.tokens.append(np.array([*tokens, encoder.end_id], dtype))
                documents.ids.append(identity)
                documents.sizes.append(size)
    write_part(out, split, number, by_source, dtype)


def _slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Rows of about `SLICE_BYTES` of text: tokens being encoded take some 40 times their final memory."""
    ends = np.cumsum(batch["bytes"].to_numpy())
    start = 0
    while start < batch.num_rows:
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + SLICE_BYTES, side="right")))
        yield batch.slice(start, stop - start)
        start = stop


def _say_what_came(imported: Mapping[str, Any], corpus: Artifact) -> None:
    """One line a source.

    Raises:
        PreflightError: nothing at all is held out.
    """
    for name, counts in imported.items():
        console.say(
            f"  {name}: {counts['documents_in']:,} documents in = {counts['train']:,} train + "
            f"{counts['validation']:,} validation + {counts['dropped']['empty']:,} dropped (empty)"
        )
    for split in SPLITS:
        if not corpus.summary[f"{split}_documents"] + sum(c[split] for c in imported.values()):
            raise PreflightError(
                f"the tokenised sources leave no document for {split}",
                where="tokens.sources",
                hint="add documents, check end_id (it tells them apart), or raise corpus.validation_max_bytes above "
                "the size of some documents",
            )


def _check_identity(stores: dict[Split, TokenStore], corpus: Artifact, imported: Mapping[str, Any]) -> None:
    """Documents in the corpus and in the sources == documents in the store (law 4)."""
    for name, counts in imported.items():
        written = counts["train"] + counts["validation"] + counts["dropped"]["empty"]
        assert counts["documents_in"] == written, f"{name}: {written} of {counts['documents_in']} documents"
    for split, store in stores.items():
        expected = corpus.summary[f"{split}_documents"] + sum(c[split] for c in imported.values())
        assert store.n_documents == expected, f"{split}: {store.n_documents} of {expected} documents encoded"
