"""Speed and memory of importing tokenised sources.

    python benchmarks/token_import.py --tokens 64M --workers 1

The ids are real text (this Python's standard library under a tokenizer of 16,384 entries) repeated in another order,
with an end token behind each document. Nothing else is made or kept.
"""

from __future__ import annotations

import argparse
import resource
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np


def main() -> None:
    """Measure and print."""
    from lavra.tokenizer.bpe import Tokenizer, train_bpe
    from lavra.tokens.config import TokenSource
    from lavra.tokens.importing import Import, import_sources
    from lavra.tokens.pretokenized import scan_token_sources
    from lavra.units import parse_count

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="64M")
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [f.read_text(errors="replace") for f in files]
    tokenizer = Tokenizer(train_bpe(texts, vocab_size=16_384, pattern="gpt-2"))
    pieces = [text[i : i + 3000] for text in texts for i in range(0, len(text), 3000)]
    documents = [np.array([*ids, tokenizer.end_id], np.uint16) for ids in tokenizer.encode_batch(pieces)]
    chosen = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path, written = Path(folder) / "train.bin", 0
        with open(path, "wb") as file:
            while written < parse_count(arguments.tokens):
                document = documents[chosen.integers(len(documents))]
                file.write(document.tobytes())
                written += len(document)
        found = scan_token_sources([TokenSource(path=str(path), end_id=tokenizer.end_id)])
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
        wanted = Import(found, 0.005, 10_000_000, arguments.workers)
        counts = import_sources(wanted, tokenizer, Path(folder) / "out", number=0)["train"]
        seconds = time.perf_counter() - start
    kind = resource.RUSAGE_SELF if arguments.workers == 1 else resource.RUSAGE_CHILDREN
    peak = resource.getrusage(kind).ru_maxrss - (before if arguments.workers == 1 else 0)
    print(
        f"{written / 1e6:.0f}M tokens, {counts['documents_in']:,} documents: {seconds:.1f} s, "
        f"{written / seconds / arguments.workers / 1e6:.1f} Mtokens/s a worker, "
        f"{peak / 1024:.0f} MiB {'more' if arguments.workers == 1 else 'in the largest worker'}"
    )


if __name__ == "__main__":
    main()
