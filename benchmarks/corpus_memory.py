"""Peak memory and speed of the corpus stage on generated JSONL.

    python benchmarks/corpus_memory.py --gb 1 --workers 2

Memory is the proportional set size (PSS) summed over the build and its workers: shared pages count
once. The data is made in a temporary folder and removed.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

_INTERVAL_SECONDS = 0.2


def write_jsonl(path: Path, size_bytes: int, seed: int = 0) -> None:
    """Varied documents of about 1 to 10 kB, one in twenty a copy of an earlier one."""
    draw = random.Random(seed)
    words = [
        "".join(draw.choices("abcdefghijklmnopqrstuvwxyzãéõ", k=draw.randint(2, 10))) for _ in range(30_000)
    ]
    sentences = [
        " ".join(draw.choices(words, k=draw.randint(5, 25))).capitalize() + "." for _ in range(50_000)
    ]
    copies: list[str] = []
    written = number = 0
    with open(path, "w", encoding="utf-8") as file:
        while written < size_bytes:
            text = "\n".join(draw.choices(sentences, k=draw.randint(5, 80)))
            if copies and draw.random() < 0.05:
                text = draw.choice(copies)
            elif number % 100 == 0:
                copies.append(text)
            line = json.dumps({"id": f"book{number // 50}/{number}", "text": text}, ensure_ascii=False) + "\n"
            file.write(line)
            written += len(line.encode())
            number += 1


def build(data: Path, out: Path, workers: int) -> None:
    """Build the corpus in this process."""
    from lavra.corpus.build import build_corpus
    from lavra.corpus.config import CorpusConfig, Source
    from lavra.corpus.sources import scan_sources

    config = CorpusConfig(sources=(Source(path=str(data)),))
    scan = scan_sources(config)
    build_corpus(
        config,
        scan,
        out,
        max_bytes=None,
        validation_max_bytes=1 << 30,
        workers=workers,
        inputs={"files": scan.inputs()},
    )


def peak_pss_bytes(process: subprocess.Popen[bytes]) -> int:
    """Largest PSS of a process and its children until it ends."""
    root, peak = psutil.Process(process.pid), 0
    while process.poll() is None:
        total = 0
        try:
            for member in (root, *root.children(recursive=True)):
                total += member.memory_full_info().pss
        except psutil.Error:
            pass  # a process ended while it was looked at
        peak = max(peak, total)
        time.sleep(_INTERVAL_SECONDS)
    return peak


def main() -> None:
    """Generate, build in a child process, print one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the JSONL file")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--build", nargs=2, metavar=("DATA", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        build(Path(options.build[0]), Path(options.build[1]), options.workers)
        return
    folder = Path(tempfile.mkdtemp(prefix="lavra-corpus-memory-"))
    try:
        data = folder / "data.jsonl"
        write_jsonl(data, int(options.gb * 1e9))
        start = time.monotonic()
        command = [sys.executable, __file__, "--workers", str(options.workers)]
        child = subprocess.Popen([*command, "--build", str(data), str(folder / "out")])
        peak = peak_pss_bytes(child)
        seconds = time.monotonic() - start
        if child.returncode:
            raise SystemExit(child.returncode)
        rate = data.stat().st_size / 1e6 / seconds
        print(
            f"{options.gb:g} GB, {options.workers} workers: peak PSS {peak / 2**20:.0f} MiB, {rate:.1f} MB/s"
        )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
