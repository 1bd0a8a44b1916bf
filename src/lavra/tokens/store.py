"""Token shards on disk and their document index; one stream of tokens across shards.

A shard is a raw little-endian file of token ids and a `.npy` of its documents (`start` token,
content `id`, UTF-8 `bytes`), all of one source. A part lists its shards in a JSON file that is written
last: what no part lists does not exist. Each document's tokens are followed by exactly one end token.
Where documents begin is read from the index, never guessed from the end token.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lavra import artifact
from lavra.errors import PreflightError

DOCUMENT_DTYPE = np.dtype([("start", "<i8"), ("id", "S32"), ("bytes", "<i8")])


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 up to 65,536 entries, uint32 beyond."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


@dataclass
class Encoded:
    """Documents of one source on their way into a shard.

    Attributes:
        tokens: token ids of each document, end token included.
        ids: content id of each document (32 hex digits).
        sizes: UTF-8 bytes of each document.
    """

    tokens: list[NDArray] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


def write_part(
    folder: Path, split: str, number: int, by_source: Mapping[str, Encoded], dtype: np.dtype
) -> None:
    """Write one shard a source, then the part's list of them, which makes them count."""
    listing = []
    for place, (source, documents) in enumerate(by_source.items()):
        name = f"{split}-{number:05d}-{place:03d}"
        _write_shard(folder / name, documents, dtype)
        listing.append({"name": name, "source": source})
    artifact.write_json(_part_path(folder, split, number), {"shards": listing})


def part_exists(folder: Path, split: str, number: int) -> bool:
    """True when the part was written whole."""
    return _part_path(folder, split, number).exists()


def tokens_by_source(folder: Path, split: str, dtype: np.dtype) -> dict[str, int]:
    """Tokens of each source in the complete parts of a split, from the sizes of their files."""
    found: dict[str, int] = {}
    for path in sorted(folder.glob(f"{split}-*.part.json")):
        for shard in artifact.read_json(path)["shards"]:
            size = (folder / shard["name"]).with_suffix(".tokens").stat().st_size
            found[shard["source"]] = found.get(shard["source"], 0) + size // dtype.itemsize
    return found


def _part_path(folder: Path, split: str, number: int) -> Path:
    return folder / f"{split}-{number:05d}.part.json"


def _write_shard(stem: Path, documents: Encoded, dtype: np.dtype) -> None:
    index = np.zeros(len(documents.tokens), DOCUMENT_DTYPE)
    lengths = np.array([len(t) for t in documents.tokens], np.int64)
    index["start"] = np.cumsum(lengths) - lengths
    index["id"] = [i.encode() for i in documents.ids]
    index["bytes"] = documents.sizes
    with artifact.atomic_writer(stem.with_suffix(".tokens")) as file:
        for piece in documents.tokens:
            file.write(np.asarray(piece, dtype).tobytes())
    buffer = io.BytesIO()
    np.save(buffer, index)
    artifact.write_bytes(stem.with_suffix(".documents.npy"), buffer.getvalue())


def _map_tokens(path: Path, dtype: np.dtype) -> NDArray:
    """Tokens of a shard, mapped; an empty file cannot be mapped."""
    # A plain array over the map: slices of np.memmap itself cost a microsecond each.
    return np.asarray(np.memmap(path, dtype, "r")) if path.stat().st_size else np.empty(0, dtype)


class TokenStore:
    """Read-only view of one split: `n_tokens` tokens of `n_documents` documents, source after source.

    Attributes:
        sources: names of the sources, in the order of the stream.
        source_offsets: `[sources + 1]` int64, stream offset where each source begins, and the end.
        starts: `[n_documents]` int64, stream offset of each document's first token.
    """

    def __init__(self, folder: Path, split: str, *, end_id: int, dtype: np.dtype) -> None:
        listings = sorted(folder.glob(f"{split}-*.part.json"))
        listed = [
            shard | {"part": int(path.name.split(".")[0].removeprefix(f"{split}-"))}
            for path in listings
            for shard in artifact.read_json(path)["shards"]
        ]
        if not listed:
            raise PreflightError(f"no {split} tokens in {folder}")
        self.end_id = end_id
        self.sources = sorted({shard["source"] for shard in listed})
        listed.sort(key=lambda shard: (shard["source"], shard["name"]))
        self._parts = [shard["part"] for shard in listed]
        stems = [folder / shard["name"] for shard in listed]
        self._documents = [
            np.load(s.with_suffix(".documents.npy"), mmap_mode="r", allow_pickle=False) for s in stems
        ]
        self._shards = [_map_tokens(s.with_suffix(".tokens"), dtype) for s in stems]
        lengths = np.array([len(shard) for shard in self._shards], np.int64)
        self._offsets = np.concatenate([[0], np.cumsum(lengths)])  # [shards + 1]
        self.starts: NDArray[np.int64] = np.concatenate(
            [d["start"] + o for d, o in zip(self._documents, self._offsets, strict=False)]
        )
        self._first_document = np.cumsum([0, *map(len, self._documents)])  # [shards + 1]
        self.n_tokens = int(self._offsets[-1])
        self.n_documents = len(self.starts)
        owners = np.searchsorted(self.sources, [shard["source"] for shard in listed])
        sizes = np.bincount(owners, lengths, len(self.sources)).astype(np.int64)
        self.source_offsets: NDArray[np.int64] = np.concatenate([[0], np.cumsum(sizes)])

    def read_pieces(
        self, out: NDArray, at: NDArray[np.int64], starts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> None:
        """Copy tokens `[starts[i], stops[i])` of the stream to `out[at[i]:]`, for every i; none is empty."""
        shards = np.searchsorted(self._offsets, starts, side="right") - 1
        bases, ends = self._offsets[shards], self._offsets[shards + 1]
        columns = (at, starts, stops, shards, bases, ends)
        for to, start, stop, shard, base, end in zip(*(c.tolist() for c in columns), strict=True):
            if stop <= end:
                out[to : to + stop - start] = self._shards[shard][start - base : stop - base]
            else:
                out[to : to + stop - start] = self._across_shards(start, stop, shard)

    def _across_shards(self, start: int, stop: int, shard: int) -> NDArray:
        pieces = []
        while start < stop:
            base, upto = int(self._offsets[shard]), min(stop, int(self._offsets[shard + 1]))
            pieces.append(self._shards[shard][start - base : upto - base])
            start, shard = upto, shard + 1
        return np.concatenate(pieces)

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens `[start, stop)` of the stream."""
        assert 0 <= start <= stop <= self.n_tokens
        out = np.empty(stop - start, np.int64)
        if start < stop:
            self.read_pieces(out, np.array([0]), np.array([start]), np.array([stop]))
        return out

    @property
    def n_bytes(self) -> int:
        """UTF-8 bytes of all documents; read from the whole index."""
        return sum(int(d["bytes"].sum()) for d in self._documents)

    def bounds(self, index: int) -> tuple[int, int]:
        """Stream offsets `[start, stop)` of document `index`, end token included."""
        stop = int(self.starts[index + 1]) if index + 1 < self.n_documents else self.n_tokens
        return int(self.starts[index]), stop

    def document(self, index: int) -> NDArray[np.int64]:
        """All tokens of document `index`, end token included."""
        return self.read(*self.bounds(index))

    def document_id(self, index: int) -> str:
        """Content id of document `index`."""
        shard = int(np.searchsorted(self._first_document, index, side="right")) - 1
        return self._documents[shard]["id"][index - self._first_document[shard]].decode()

    def part_of(self, index: int) -> int:
        """Number of the part that document `index` was written with."""
        return self._parts[int(np.searchsorted(self._first_document, index, side="right")) - 1]

    def documents_in(self, start: int, stop: int) -> range:
        """Indices of the documents that tokens `[start, stop)` belong to."""
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        return range(max(first, 0), int(np.searchsorted(self.starts, stop, side="left")))
