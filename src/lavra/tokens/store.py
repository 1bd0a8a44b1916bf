"""Token shards on disk and their document index; one stream of tokens across shards.

A shard is a raw little-endian file of token ids and a `.npy` of its documents (`start` token,
content `id`, UTF-8 `bytes`). Each document's tokens are followed by exactly one end token. Where
documents begin is read from the index, never guessed from the end token.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lavra import artifact
from lavra.errors import PreflightError

DOCUMENT_DTYPE = np.dtype([("start", "<i8"), ("id", "S32"), ("bytes", "<i8")])


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 up to 65,536 entries, uint32 beyond."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def write_shard(
    folder: Path,
    split: str,
    number: int,
    tokens: list[NDArray],
    ids: list[str],
    sizes: list[int],
    dtype: np.dtype,
) -> None:
    """Write one shard; the document index goes last and makes the shard count.

    Args:
        tokens: token ids of each document, end token included.
        ids: content id of each document (32 hex digits).
        sizes: UTF-8 bytes of each document.
    """
    name = f"{split}-{number:05d}"
    documents = np.zeros(len(tokens), DOCUMENT_DTYPE)
    lengths = np.array([len(t) for t in tokens], np.int64)
    documents["start"] = np.cumsum(lengths) - lengths
    documents["id"] = [i.encode() for i in ids]
    documents["bytes"] = sizes
    with artifact.atomic_writer(folder / f"{name}.tokens") as file:
        for piece in tokens:
            file.write(np.asarray(piece, dtype).tobytes())
    buffer = io.BytesIO()
    np.save(buffer, documents)
    artifact.write_bytes(folder / f"{name}.documents.npy", buffer.getvalue())


def shard_exists(folder: Path, split: str, number: int) -> bool:
    """True when the shard was written whole."""
    return (folder / f"{split}-{number:05d}.documents.npy").exists()


def _map_tokens(path: Path, dtype: np.dtype) -> NDArray:
    """Tokens of a shard, mapped; an empty file cannot be mapped."""
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)


class TokenStore:
    """Read-only view of one split: `n_tokens` tokens of `n_documents` documents.

    Attributes:
        starts: `[n_documents]` int64, stream offset of each document's first token.
    """

    def __init__(self, folder: Path, split: str, *, end_id: int, dtype: np.dtype) -> None:
        paths = sorted(folder.glob(f"{split}-*.documents.npy"))
        if not paths:
            raise PreflightError(f"no {split} tokens in {folder}")
        self.end_id = end_id
        self._documents = [np.load(path, mmap_mode="r", allow_pickle=False) for path in paths]
        self._shards = [
            _map_tokens(path.with_name(path.name.replace(".documents.npy", ".tokens")), dtype)
            for path in paths
        ]
        lengths = np.array([len(shard) for shard in self._shards], np.int64)
        self._offsets = np.concatenate([[0], np.cumsum(lengths)])  # [shards + 1]
        self.starts: NDArray[np.int64] = np.concatenate(
            [d["start"] + o for d, o in zip(self._documents, self._offsets, strict=False)]
        )
        self.n_tokens = int(self._offsets[-1])
        self.n_documents = len(self.starts)

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens `[start, stop)` of the stream, across shards."""
        assert 0 <= start <= stop <= self.n_tokens
        pieces = []
        shard = int(np.searchsorted(self._offsets, start, side="right")) - 1
        while start < stop:
            upto = min(stop, int(self._offsets[shard + 1]))
            base = int(self._offsets[shard])
            pieces.append(self._shards[shard][start - base : upto - base])
            start, shard = upto, shard + 1
        return np.concatenate(pieces).astype(np.int64) if pieces else np.empty(0, np.int64)

    def document(self, index: int) -> NDArray[np.int64]:
        """All tokens of document `index`, end token included."""
        stop = int(self.starts[index + 1]) if index + 1 < self.n_documents else self.n_tokens
        return self.read(int(self.starts[index]), stop)

    def document_ids(self, start: int, stop: int) -> list[str]:
        """Content ids of the documents that tokens `[start, stop)` belong to."""
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        last = int(np.searchsorted(self.starts, stop, side="left"))
        counts = np.cumsum([len(d) for d in self._documents])
        result = []
        for index in range(max(first, 0), last):
            shard = int(np.searchsorted(counts, index, side="right"))
            local = index - (int(counts[shard - 1]) if shard else 0)
            result.append(self._documents[shard]["id"][local].decode())
        return result
