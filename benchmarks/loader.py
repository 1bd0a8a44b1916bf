"""How fast batches are made from a store of a million documents, on one core, and how fast such a store opens.

    python benchmarks/loader.py

A batch is whole: tokens, targets, positions (which are the document mask) and loss mask, in the permuted order. Documents
have 20 to 2,000 tokens, drawn log-uniformly, in 8 parts. Files are in the page cache.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from lavra.tokens.packing import ConcatRows, plan_rows
from lavra.tokens.sampler import Sampler
from lavra.tokens.store import Encoded, TokenStore, write_part
from lavra.tokens.windows import Windows

DOCUMENTS, PARTS, SEQ_LEN, SECONDS = 1_000_000, 8, 512, 2.0
DTYPE = np.dtype("<u2")


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        print(f"open: {statistics.median(opening(folder) for _ in range(5)) * 1e3:.1f} ms, median of 5")
        store = TokenStore(folder, "train", end_id=0, dtype=DTYPE)
        print(f"{store.n_documents:,} documents, {store.n_tokens:,} tokens")
        print("\n| packing | rows a batch | Mtokens/s |\n|---|---|---|")
        for packing in ("concat", "best_fit"):
            rows = (
                ConcatRows(store, SEQ_LEN)
                if packing == "concat"
                else plan_rows(store, SEQ_LEN, best_fit=True)
            )
            for size in (8, 64, 256):
                speed = rate(Sampler(Windows(store, rows), seed=1), size)
                print(f"| {packing} | {size} | {speed / 1e6:.1f} |", flush=True)


def write(folder: Path) -> None:
    random = np.random.default_rng(0)
    each = DOCUMENTS // PARTS
    for part in range(PARTS):
        lengths = np.exp(random.uniform(np.log(20), np.log(2000), each)).astype(np.int64)
        ids = random.integers(1, 4096, lengths.sum()).astype(DTYPE)
        tokens = np.split(ids, np.cumsum(lengths)[:-1])
        encoded = Encoded(tokens, [f"{part * each + i:032x}" for i in range(each)], [1] * each)
        with mock.patch("os.fsync"):
            write_part(folder, "train", part, {"web": encoded}, DTYPE)


def opening(folder: Path) -> float:
    started = time.perf_counter()
    TokenStore(folder, "train", end_id=0, dtype=DTYPE)
    return time.perf_counter() - started


def rate(sampler: Sampler, size: int) -> float:
    """Tokens a second of processor time."""
    started, batches = time.process_time(), 0
    while time.process_time() - started < SECONDS:
        sampler.batch(np.arange(batches * size, (batches + 1) * size))
        batches += 1
    return batches * size * SEQ_LEN / (time.process_time() - started)


if __name__ == "__main__":
    main()
