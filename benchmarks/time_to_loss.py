"""Time to one validation loss: lavra's default recipe against AdamW with a cosine schedule and a tuned learning rate.

    python benchmarks/time_to_loss.py --data en-books.jsonl.zst
    python benchmarks/time_to_loss.py --data en-books.jsonl.zst --seeds 1 --shares 0.5 0.6 0.7     a look

Everything but optimizer, schedule and learning rate is the same: text, tokenizer, model, batch, precision, compilation.
The baseline trains its whole horizon with each of five learning rates; the best mean over the seeds sets the loss to
reach. lavra then trains shorter horizons, each with its own decay, as a user who wants that loss would; the ratio is the
time of the shortest whose mean loss is not above the baseline's, over the baseline's time. Training time is that of
metrics.jsonl (compilation and validation in it); runs take turns, so that a machine that slows down slows both. A run
that the guard stops has reached no loss.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lavra import metrics
from lavra.errors import DivergedError

RECIPE = """\
name: base
corpus: {sources: [{path: DATA, name: books}], max_bytes: BYTES}
tokenizer: {vocab_size: 1024}
tokens: {seq_len: 256}
model: {d_model: 64, n_layers: 4, n_heads: 1}
train:
  batch_tokens: 2048
  precision: fp32
  compile: 'off'
  validations: 1
  validation_tokens: 200k
  sample_tokens: 0
  checkpoint_every: 1000h
  keep_checkpoints: 1
"""
BASELINE = ["train.optimizer=adamw", "train.schedule=cosine", "train.lr_floor=0.1"]


@dataclass(frozen=True)
class Result:
    """One training: its last validation loss (nats a token; infinite if it diverged) and seconds."""

    loss: float
    seconds: float


class Bench:
    """Runs trainings that share one plan's text, tokenizer and tokens."""

    def __init__(self, folder: Path, recipe: str) -> None:
        self.folder, self.recipe = folder, folder / "recipe.yaml"
        self.recipe.write_text(recipe)
        if self._lavra("tokens", f"run_dir={folder}/base", "budget.tokens=1M"):
            sys.exit("the text could not be prepared")

    def train(self, tokens: int, seed: int, overrides: list[str]) -> Result:
        """Train once and forget all but the result."""
        run_dir = self.folder / "run"
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir()
        for stage in ("corpus", "tokenizer", "tokens"):
            shutil.copytree(self.folder / "base" / stage, run_dir / stage)
        code = self._lavra(
            "pretrain", f"run_dir={run_dir}", f"budget.tokens={tokens}", f"seed={seed}", *overrides
        )
        last = list(metrics.read_jsonl(run_dir / "metrics.jsonl"))[-1]
        if code == DivergedError.exit_code:
            return Result(math.inf, last["time"])
        if code:
            sys.exit(f"lavra pretrain ended with {code}")
        return Result(last[metrics.VALIDATION_LOSS], last["time"])

    def _lavra(self, verb: str, *overrides: str) -> int:
        command = [sys.executable, "-m", "lavra", verb, str(self.recipe), *overrides, "--quiet"]
        return subprocess.run(command).returncode


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="text: a file, folder or glob")
    parser.add_argument("--bytes", default="12MB", help="text used (default 12MB)")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="baseline's horizon (default 1M)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2])
    parser.add_argument("--shares", type=float, nargs="*", default=[0.45, 0.5, 0.55, 0.6, 0.65])
    parser.add_argument(
        "--ours", nargs="*", default=[], metavar="key=value", help="overrides of lavra's recipe"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recipe = RECIPE.replace("DATA", json.dumps(options.data)).replace("BYTES", options.bytes)
        compare(Bench(Path(folder), recipe), options)


def compare(bench: Bench, options: argparse.Namespace) -> None:
    arms = {
        f"adamw cosine {rate:g}": (1.0, [*BASELINE, f"train.learning_rate={rate}"]) for rate in options.rates
    }
    arms |= {f"lavra {share:.0%} of the tokens": (share, options.ours) for share in options.shares}
    results: dict[str, list[Result]] = {name: [] for name in arms}
    for seed in range(options.seeds):
        for name, (share, overrides) in arms.items():
            result = bench.train(int(options.tokens * share), seed, overrides)
            results[name].append(result)
            print(f"seed {seed}: {name}: loss {result.loss:.4f}, {result.seconds:.1f} s", flush=True)
    print("\n| arm | validation loss, mean (each seed) | seconds, median |\n|---|---|---|")
    for name, found in results.items():
        each = ", ".join(f"{r.loss:.4f}" for r in found)
        print(f"| {name} | {loss_of(found):.4f} ({each}) | {seconds_of(found):.1f} |")
    verdict(results, options)


def verdict(results: dict[str, list[Result]], options: argparse.Namespace) -> None:
    baseline = min(
        (n for n in results if n.startswith("adamw")), key=lambda n: loss_of(results[n]), default=""
    )
    if not baseline:
        return
    target = loss_of(results[baseline])
    print(f"\nto reach: {target:.4f} ({baseline}, {seconds_of(results[baseline]):.1f} s)")
    rates = [f"adamw cosine {rate:g}" for rate in options.rates]
    if baseline in (rates[0], rates[-1]):
        print("the best learning rate is at the edge of those tried: widen --rates")
    reached = [n for n in results if n.startswith("lavra") and loss_of(results[n]) <= target]
    if not reached:
        print("lavra did not reach it: longer --shares")
        return
    first = min(reached, key=lambda n: seconds_of(results[n]))
    ratio = seconds_of(results[first]) / seconds_of(results[baseline])
    print(
        f"{first}: {loss_of(results[first]):.4f} in {seconds_of(results[first]):.1f} s: {ratio:.2f}x the time"
    )


def loss_of(results: list[Result]) -> float:
    return statistics.fmean(r.loss for r in results)


def seconds_of(results: list[Result]) -> float:
    return statistics.median(r.seconds for r in results)


if __name__ == "__main__":
    main()
