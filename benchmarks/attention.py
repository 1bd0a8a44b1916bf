"""Attention on the CPU, forward and backward: lavra's beside what PyTorch offers, in one run.

    python benchmarks/attention.py                              2048 with documents, 512 plain causal
    python benchmarks/attention.py --threads 2 --rounds 20

The contenders take turns, so that a machine that slows down slows all. `mask` is scaled_dot_product_attention with a
boolean mask, `loop` calls it once a document, causally; both compute what lavra computes. `causal` lets the documents
of a row see each other: it is no substitute, but shows what keeping them apart costs or spares.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lavra.hardware.probe import keep_freed_memory
from lavra.model.attention import attention, document_starts_from_positions, masked_sdpa

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Setting:
    """One race. Document lengths are uniform between two bounds, the same number for one document a row."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    document_lengths: tuple[int, int]
    window: int | None = None
    soft_cap: float | None = None


SETTINGS = [
    Setting("2048, one document", 2, 8, 8, 2048, 64, (2048, 2048)),
    Setting("2048, documents of 512 to 1536", 2, 8, 8, 2048, 64, (512, 1536)),
    Setting("2048, documents of 64 to 512", 2, 8, 8, 2048, 64, (64, 512)),
    Setting("2048, documents of 8 to 64", 2, 8, 8, 2048, 64, (8, 64)),
    Setting("2048, one document, window 256", 2, 8, 8, 2048, 64, (2048, 2048), window=256),
    Setting("2048, documents of 64 to 512, grouped", 2, 8, 2, 2048, 64, (64, 512)),
    Setting("2048, documents of 64 to 512, soft cap", 2, 8, 8, 2048, 64, (64, 512), soft_cap=50.0),
    Setting("512, one document", 8, 4, 4, 512, 32, (512, 512)),
    Setting("512, one document, wider heads", 8, 2, 2, 512, 64, (512, 512)),
]


def positions_of(setting: Setting, seed: int = 0) -> Tensor:
    """`[B, T]`; the first document of a row is cut at a random place, as a window over a stream cuts it."""
    draw, shortest, longest = random.Random(seed), *setting.document_lengths
    rows = []
    for _ in range(setting.batch):
        first = draw.randint(1, longest) if shortest < setting.length else longest
        row = list(range(first))
        while len(row) < setting.length:
            row += range(draw.randint(shortest, longest))
        rows.append(row[: setting.length])
    return torch.tensor(rows)


def document_loop(positions: Tensor, groups: int) -> Function:
    """One causal call a document, without a mask."""
    documents = []
    for number, row in enumerate(positions):
        firsts = (row == 0).nonzero().flatten().tolist()
        documents += [(number, a, b) for a, b in zip(firsts, [*firsts[1:], len(row)], strict=True)]

    def loop(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        for row, first, end in documents:
            part = (x[row : row + 1, :, first:end] for x in (q, k, v))
            out[row : row + 1, :, first:end] = F.scaled_dot_product_attention(
                *part, is_causal=True, enable_gqa=groups > 1
            )
        return out

    return loop


def contenders(setting: Setting) -> dict[str, Function]:
    """What runs in a setting; PyTorch has no soft cap, and its loop no window."""
    positions, groups = positions_of(setting), setting.heads // setting.kv_heads
    starts = document_starts_from_positions(positions)
    window, soft_cap = setting.window, setting.soft_cap
    return {
        "lavra": lambda q, k, v: attention(q, k, v, starts, window=window, soft_cap=soft_cap),
        "mask": lambda q, k, v: masked_sdpa(q, k, v, starts, window=window),
        "loop": document_loop(positions, groups),
        "causal": lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=groups > 1
        ),
    }


def race(setting: Setting, rounds: int) -> dict[str, list[float]]:
    """Seconds of one forward and backward pass of each contender, `rounds` times."""
    heads = setting.heads, setting.kv_heads, setting.kv_heads
    shape = setting.batch, setting.length
    qkv = [torch.randn(*shape, n, setting.head_dim).transpose(1, 2).requires_grad_() for n in heads]
    gradient = torch.randn(*shape, setting.heads, setting.head_dim).transpose(1, 2)
    functions = contenders(setting)
    if setting.window is None and setting.soft_cap is None:
        found, masked, looped = (functions[name](*qkv) for name in ("lavra", "mask", "loop"))
        assert (found - masked).abs().max() < 1e-4 and (found - looped).abs().max() < 1e-4
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            torch.autograd.grad(function(*qkv), qkv, gradient)
            seconds[name].append(time.perf_counter() - start)
    return {name: values[1:] for name, values in seconds.items()}  # the first round warms up


def main() -> None:
    """Run all settings and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    print(f"PyTorch {torch.__version__}, {arguments.threads} threads, fp32, {arguments.rounds} rounds")
    print(
        "milliseconds: the best round. ratio: a contender's time over lavra's, best rounds (median of rounds)"
    )
    for setting in SETTINGS:
        seconds = race(setting, arguments.rounds)
        best = min(seconds["lavra"])
        parts = [f"lavra {1e3 * best:.1f} ms"]
        for name, values in seconds.items():
            if name != "lavra":
                median = statistics.median(x / y for x, y in zip(values, seconds["lavra"], strict=True))
                parts.append(f"{name} {min(values) / best:.2f} ({median:.2f})")
        print(f"{setting.name:40}", "   ".join(parts), flush=True)


if __name__ == "__main__":
    main()
