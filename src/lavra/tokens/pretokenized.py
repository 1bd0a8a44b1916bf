"""Token files that exist already: what they hold and where their documents lie, checked before anything is read.

    Megatron    PREFIX.bin (ids) and PREFIX.idx: `MMIDIDX\\0\\0`, version 1 (u64), type of the ids (u8), sequences (u64),
                document bounds (u64), then sequence lengths (i32), byte offsets (i64), and document bounds (i64), which
                count sequences: 0 first, the number of sequences last (Megatron-LM, `IndexedDataset`)
    llm.c       256 x int32 (magic, version, number of tokens), then the ids; modded-nanogpt writes the same
    raw         uint16 ids and nothing else (nanoGPT)
    a run       a run directory of lavra: its training shards, `.tokens` and `.documents.npy` (tokens/store.py)

The documents of llm.c's and raw files lie between the source's end tokens, which may close them or open them.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lavra import artifact
from lavra.errors import PreflightError
from lavra.tokens.config import TokenSource

BLOCK_TOKENS = 1 << 20  # worked on at a time
_MEGATRON_MAGIC = b"MMIDIDX\0\0"
_MEGATRON_HEADER = np.dtype(
    [("magic", "V9"), ("version", "<u8"), ("type", "u1"), ("sequences", "<u8"), ("bounds", "<u8")]
)
_MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_LLMC_HEADER_BYTES = 256 * 4
_PROBE_TOKENS = 1024
_OWN_INDEX = ".documents.npy"
_LLMC_TYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # (magic, version)


@dataclass(frozen=True)
class TokenFile:
    """One file of token ids.

    Attributes:
        source: name of its source.
        path: absolute, of the file with the ids.
        name: relative to the source's folder.
        identity: size and time of last change of the file, and of its index.
        dtype: of the ids.
        header: bytes before the first id.
        n_tokens: ids in it.
        end_id: the source's end token; None: the tokenizer's.
        index: path of the `.idx` or `.documents.npy`, or "".
    """

    source: str
    path: str
    name: str
    identity: tuple[int, ...]
    dtype: str
    header: int
    n_tokens: int
    end_id: int | None
    index: str

    def read(self, start: int, stop: int) -> NDArray:
        """Ids `[start, stop)`, as they are stored."""
        offset = self.header + start * np.dtype(self.dtype).itemsize
        ids = np.fromfile(self.path, self.dtype, count=stop - start, offset=offset)
        if len(ids) != stop - start:
            raise PreflightError("the file became shorter while it was read", where=self.path)
        return ids

    def document_bounds(self) -> NDArray[np.int64]:
        """`[documents + 1]` int64: document i is the ids `[bounds[i], bounds[i + 1])`, its end token included."""
        if self.index.endswith(_OWN_INDEX):
            starts = np.load(self.index, allow_pickle=False)["start"]
            return np.append(starts, self.n_tokens).astype(np.int64)
        return _MegatronIndex(self.index).document_bounds() if self.index else self._bounds_by_end_tokens()

    def _bounds_by_end_tokens(self) -> NDArray[np.int64]:
        found = [
            np.flatnonzero(self.read(start, min(start + BLOCK_TOKENS, self.n_tokens)) == self.end_id) + start
            for start in range(0, self.n_tokens, BLOCK_TOKENS)
        ]
        after = np.concatenate([*found, np.empty(0, np.int64)]) + 1
        if not len(after):
            raise PreflightError(
                f"no end token {self.end_id} among {self.n_tokens} tokens: its documents cannot be told apart",
                where=self.path,
                hint="set end_id to the token that separates the documents of this file",
            )
        # At the very beginning it opens the first document; it closes none.
        first = [] if after[0] == 1 else [0]
        last = [] if after[-1] == self.n_tokens else [self.n_tokens]
        return np.concatenate([first, after, last]).astype(np.int64)


# --- finding files ------------------------------------------------------------------------------


def scan_token_sources(sources: Sequence[TokenSource], taken: Collection[str] = ()) -> list[TokenFile]:
    """Every file of every source, in source order and then by name; sizes are held against headers and indices.

    Args:
        taken: names of the corpus's sources.

    Raises:
        PreflightError: a path does not exist, a file is torn or of a kind not known, a raw file has no `end_id`, or
            two sources share a name.
    """
    names = [s.name or os.path.splitext(os.path.basename(s.path))[0] for s in sources]
    for name, count in Counter([*names, *taken]).items():
        if count > 1 and name in names:
            raise PreflightError(
                f"two sources are named `{name}`", where="tokens.sources", hint="give each a `name`"
            )
    return [
        _token_file(path, os.path.relpath(path, _root(source.path)), name, source.end_id)
        for source, name in zip(sources, names, strict=True)
        for path in _paths(source.path)
    ]


def file_inputs(files: Sequence[TokenFile]) -> list[list[Any]]:
    """What an artifact made of these files depends on: as for the corpus, name, size and time of each."""
    return [[f.source, f.name, *f.identity, f.end_id] for f in files]


def tokens_folder(path: str) -> str:
    """The complete tokens of a run directory of lavra; "" where the path is none."""
    folder = os.path.join(path, "tokens")
    return folder if os.path.isfile(os.path.join(folder, artifact.COMPLETE)) else ""


def _root(path: str) -> str:
    """The folder that names are relative to."""
    while glob.has_magic(path):
        path = os.path.dirname(path)
    return path if os.path.isdir(path) else os.path.dirname(path)


def _paths(path: str) -> list[str]:
    """The files with ids that a source means: a `.bin`, a Megatron prefix, a folder or glob of `.bin` files, a run."""
    if folder := tokens_folder(path):
        return sorted(glob.glob(os.path.join(glob.escape(folder), "train-*.tokens")))
    path = path.removesuffix(".idx")
    if os.path.isfile(path):
        return [path]
    if os.path.isfile(f"{path}.bin"):
        return [f"{path}.bin"]
    pattern = os.path.join(glob.escape(path), "*") if os.path.isdir(path) else path
    found = sorted(p for p in glob.glob(pattern, recursive=True) if p.endswith(".bin"))
    if not found:
        raise PreflightError(
            f"no token file at {path}",
            where="tokens.sources",
            hint="name a .bin, a Megatron prefix, a folder, or a run directory whose tokens are complete",
        )
    return found


def _token_file(path: str, name: str, source: str, end_id: int | None) -> TokenFile:
    status = os.stat(path)
    index = path.removesuffix(".bin") + ".idx"
    if path.endswith(".tokens"):
        index = path.removesuffix(".tokens") + _OWN_INDEX
        marker = Path(path).with_name(artifact.COMPLETE)
        dtype, header = artifact.read_json(marker)["summary"]["dtype"], 0
        n_tokens = status.st_size // np.dtype(dtype).itemsize
    elif os.path.isfile(index) and index != path:
        dtype, header, n_tokens = _MegatronIndex(index).layout()
    else:
        index, (dtype, header, n_tokens) = "", _stream_layout(path, status.st_size)
        if end_id is None:
            raise PreflightError(
                "only the source's end token says where the documents of this file begin",
                where=path,
                hint="set end_id in tokens.sources (GPT-2: 50256); a Megatron file has its .idx beside it",
            )
    itemsize = np.dtype(dtype).itemsize
    if (expected := header + n_tokens * itemsize) != status.st_size:
        raise PreflightError(
            f"the file is torn: {status.st_size} bytes, {expected} expected "
            f"({n_tokens} tokens of {itemsize} bytes, header {header})",
            where=path,
            hint="copy or write it again",
        )
    found = [status, os.stat(index)] if index else [status]
    identity = tuple(value for s in found for value in (s.st_size, s.st_mtime_ns))
    return TokenFile(source, path, name, identity, dtype, header, n_tokens, end_id, index)


def _stream_layout(path: str, size: int) -> tuple[str, int, int]:
    """Type of the ids, bytes of the header, number of tokens."""
    head = np.fromfile(path, "<i4", count=3) if size >= _LLMC_HEADER_BYTES else np.zeros(3, "<i4")
    if (kind := (int(head[0]), int(head[1]))) in _LLMC_TYPES:
        return _LLMC_TYPES[kind], _LLMC_HEADER_BYTES, int(head[2])
    first = np.fromfile(path, "<u2", count=_PROBE_TOKENS)
    if len(first) == _PROBE_TOKENS and (first[1::2] < 4).all():
        raise PreflightError(
            "its ids look 32 bits wide; a file without header or .idx is read as 16 bits an id",
            where=path,
            hint="write it as llm.c does (magic 20240801, version 7), or as a Megatron .bin and .idx",
        )
    return "<u2", 0, -(-size // 2)


class _MegatronIndex:
    """A `.idx` file, mapped; its parts fit each other or a `PreflightError` says what does not."""

    def __init__(self, path: str) -> None:
        self.path = path
        size = os.path.getsize(path)
        if size < _MEGATRON_HEADER.itemsize:
            raise self._error(f"{size} bytes are no index")
        header = np.fromfile(path, _MEGATRON_HEADER, count=1)[0]
        if header["magic"].tobytes() != _MEGATRON_MAGIC or header["version"] != 1:
            raise self._error("no Megatron index of version 1")
        if (kind := int(header["type"])) not in _MEGATRON_TYPES:
            raise self._error(f"ids of type code {kind}; known: {sorted(_MEGATRON_TYPES)}")
        self.dtype = _MEGATRON_TYPES[kind]
        sequences, bounds = int(header["sequences"]), int(header["bounds"])
        expected = _MEGATRON_HEADER.itemsize + 12 * sequences + 8 * bounds
        if size not in (expected, expected + sequences):  # a byte for each sequence's mode may follow
            raise self._error(f"the index is torn: {size} bytes, {expected} expected")
        data = np.asarray(np.memmap(path, "u1", "r"))[_MEGATRON_HEADER.itemsize :]
        self.lengths = data[: 4 * sequences].view("<i4")
        self.pointers = data[4 * sequences : 12 * sequences].view("<i8")
        self.bounds = data[12 * sequences : 12 * sequences + 8 * bounds].view("<i8")

    def layout(self) -> tuple[str, int, int]:
        """As of a stream; checks that sequences follow each other and that documents hold them all."""
        starts, itemsize = self._sequence_starts(), np.dtype(self.dtype).itemsize
        if (self.lengths < 0).any() or (self.pointers != starts[:-1] * itemsize).any():
            raise self._error("its sequences do not lie one behind the other")
        bounds = self.bounds
        whole = len(bounds) > 0 and bounds[0] == 0 and bounds[-1] == len(self.lengths)
        if not whole or (np.diff(bounds) < 0).any():
            raise self._error(f"its documents do not hold each of the {len(self.lengths)} sequences once")
        return self.dtype, 0, int(starts[-1])

    def document_bounds(self) -> NDArray[np.int64]:
        """In tokens."""
        return self._sequence_starts()[self.bounds]

    def _sequence_starts(self) -> NDArray[np.int64]:
        """`[sequences + 1]`."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def _error(self, what: str) -> PreflightError:
        return PreflightError(what, where=self.path, hint="write the .idx and the .bin again, or copy both")


# --- parts --------------------------------------------------------------------------------------


class FilePart(NamedTuple):
    """A run of whole documents of one file.

    Attributes:
        number: of the part in the store.
        file: where they are.
        first: number of the first document in its file.
        bounds: `[documents + 1]` int64, token offsets in the file.
    """

    number: int
    file: TokenFile
    first: int
    bounds: NDArray[np.int64]

    @property
    def n_tokens(self) -> int:
        """Ids of the part, end tokens included."""
        return int(self.bounds[-1] - self.bounds[0])


def cut_into_parts(files: Sequence[TokenFile], number: int, part_tokens: int) -> Iterator[FilePart]:
    """Parts of up to `part_tokens` tokens, numbered from `number`; a longer document is a part by itself."""
    for file in files:
        bounds = file.document_bounds()
        first, documents = 0, len(bounds) - 1
        while first < documents:
            fitting = int(np.searchsorted(bounds, bounds[first] + part_tokens, side="right")) - 1
            stop = max(first + 1, fitting)
            yield FilePart(number, file, first, bounds[first : stop + 1])
            number, first = number + 1, stop
