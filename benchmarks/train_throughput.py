"""Training speed of lavra's default step against a plain eager fp32 loop, side by side in one run.

    python benchmarks/train_throughput.py [--size 3.4M] [--rounds 8]

Same shape, same initial weights, same random tokens. Each contender is a process of its own, as a user would run it,
and they take turns, so that a machine that slows down slows all; the ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import torch
from plain_decoder import PlainDecoder, load_weights, plain_step

from lavra.batch import Batch
from lavra.hardware.measure import measure_gemm
from lavra.hardware.probe import find_compiler, keep_freed_memory
from lavra.model.config import ModelConfig, ModelShape, shape_for
from lavra.model.decoder import build_decoder
from lavra.objective.causal import causal_numerator
from lavra.optim.adamw import build_adamw, clip_grad_norm, parameter_groups
from lavra.train.step import accumulate
from lavra.units import parse_count

SEQUENCES = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=parse_count, default=3_400_000)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--precision", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        contend(options.contender, options.size, options.precision)
    else:
        compare(options.size, options.rounds)


def compare(size: int, rounds: int) -> None:
    """Start the contenders, let them step in turns, print rates and ratios."""
    shape = shape_for(ModelConfig(), size, vocab_size=4096, seq_len=512)
    gemm = measure_gemm(torch.device("cpu"))
    precision = "bf16" if gemm["bf16"] > 1.2 * gemm["fp32"] else "fp32"
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, lavra in {precision}, GFLOP/s {gemm}"
    )
    print(
        f"{shape.parameter_count():,} parameters, width {shape.d_model}, {shape.n_layers} layers, context 512"
    )
    names = ["plain", "lavra eager", *(["lavra compiled"] if find_compiler() else [])]
    command = [sys.executable, __file__, "--size", str(size), "--precision", precision, "--contender"]
    contenders = {
        name: subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name in names
    }
    for name, process in contenders.items():
        ready = _ask(process)
        print(f"{name}: first step {ready['first']:.1f}s, losses {ready['losses']}")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    rss = {}
    for _ in range(rounds):
        for name, process in contenders.items():
            answer = _ask(process)
            seconds[name].append(answer["seconds"])
            rss[name] = answer["rss"]
    for name, process in contenders.items():
        process.stdin.close()
        process.wait()
        ratio = statistics.median(p / m for p, m in zip(seconds["plain"], seconds[name], strict=True))
        rate = SEQUENCES * 512 / statistics.median(seconds[name])
        mfu = rate * shape.flops_per_token() / gemm["fp32" if name == "plain" else precision] / 1e9
        print(
            f"{name}: {rate:,.0f} tokens/s, {ratio:.2f}x plain, MFU {mfu:.0%}, RSS {rss[name] / 2**20:.0f} MiB"
        )


def _ask(process: subprocess.Popen[str]) -> dict:
    process.stdin.write("step\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def contend(name: str, size: int, precision: str) -> None:
    """One contender: a warm-up on the first line of input, two steps on every other."""
    shape = shape_for(ModelConfig(), size, vocab_size=4096, seq_len=512)
    step = (
        plain_runner(shape) if name == "plain" else lavra_runner(shape, precision, name == "lavra compiled")
    )
    sys.stdin.readline()
    start = time.perf_counter()
    losses = [step()]
    first = time.perf_counter() - start
    losses += [step() for _ in range(2)]
    print(json.dumps({"first": first, "losses": [round(loss, 4) for loss in losses]}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        step()
        step()
        seconds = (time.perf_counter() - start) / 2
        print(json.dumps({"seconds": seconds, "rss": psutil.Process().memory_info().rss}), flush=True)


def random_batch(shape: ModelShape) -> Batch:
    generator = torch.Generator().manual_seed(0)
    stream = torch.randint(shape.vocab_size, (SEQUENCES, shape.seq_len + 1), generator=generator)
    positions = torch.arange(shape.seq_len).expand(SEQUENCES, -1)
    mask = torch.ones(SEQUENCES, shape.seq_len, dtype=torch.bool)
    return Batch(
        stream[:, :-1].contiguous(), stream[:, 1:].contiguous(), positions, mask, torch.arange(SEQUENCES)
    )


def plain_runner(shape: ModelShape) -> Callable[[], float]:
    batch, model = random_batch(shape), PlainDecoder(shape)
    load_weights(model, build_decoder(shape, seed=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    return lambda: plain_step(model, optimizer, batch.tokens, batch.targets)


def lavra_runner(shape: ModelShape, precision: str, compiled: bool) -> Callable[[], float]:
    keep_freed_memory()
    batch, model = random_batch(shape), build_decoder(shape, seed=0)
    optimizer = build_adamw(parameter_groups(model, 0.1), learning_rate=1e-3, betas=(0.9, 0.999))
    numerator = torch.compile(causal_numerator) if compiled else causal_numerator

    def step() -> float:
        result = accumulate(
            model, batch, micro_batch_size=SEQUENCES, precision=precision, numerator=numerator
        )
        clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return result.loss

    return step


if __name__ == "__main__":
    main()
