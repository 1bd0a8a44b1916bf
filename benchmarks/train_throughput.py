"""Training speed of lavra's default step against a plain eager fp32 loop, in one run.

    python benchmarks/train_throughput.py [--size 3.4M] [--rounds 8]

Both train a decoder of the same shape on the same random tokens, in turns, so that a machine that
slows down slows both; the ratio is the median over rounds. Prints the loss of both after the warm-up.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from plain_decoder import PlainDecoder, plain_step

from lavra.batch import Batch
from lavra.hardware.measure import measure_gemm
from lavra.hardware.probe import find_compiler
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
    parser.add_argument("--steps", type=int, default=2, help="steps a round")
    arguments = parser.parse_args()
    shape = shape_for(ModelConfig(), arguments.size, vocab_size=4096, seq_len=512)
    batch = random_batch(shape)
    gemm = measure_gemm(torch.device("cpu"))
    precision = "bf16" if gemm["bf16"] > 1.2 * gemm["fp32"] else "fp32"
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, GEMM GFLOP/s {gemm}, lavra in {precision}"
    )
    print(
        f"{shape.parameter_count():,} parameters, width {shape.d_model}, {shape.n_layers} layers, context 512"
    )
    runners = {
        "plain": plain_runner(shape, batch),
        "lavra eager": lavra_runner(shape, batch, precision, compile_model=False),
    }
    if find_compiler():
        runners["lavra compiled (default of long runs)"] = lavra_runner(
            shape, batch, precision, compile_model=True
        )
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for name, run in runners.items():
        start = time.perf_counter()
        losses = [run() for _ in range(3)]
        print(f"{name}: warm-up {time.perf_counter() - start:.1f}s, loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    for _ in range(arguments.rounds):
        for name, run in runners.items():
            start = time.perf_counter()
            for _ in range(arguments.steps):
                run()
            seconds[name].append((time.perf_counter() - start) / arguments.steps)
    tokens = batch.tokens.numel()
    for name, measured in seconds.items():
        ratio = statistics.median(p / m for p, m in zip(seconds["plain"], measured, strict=True))
        rate = tokens / statistics.median(measured)
        print(f"{name}: {rate:,.0f} tokens/s, {ratio:.2f}x plain")


def random_batch(shape: ModelShape) -> Batch:
    generator = torch.Generator().manual_seed(0)
    stream = torch.randint(shape.vocab_size, (SEQUENCES, shape.seq_len + 1), generator=generator)
    positions = torch.arange(shape.seq_len).expand(SEQUENCES, -1)
    mask = torch.ones(SEQUENCES, shape.seq_len, dtype=torch.bool)
    return Batch(
        stream[:, :-1].contiguous(), stream[:, 1:].contiguous(), positions, mask, torch.arange(SEQUENCES)
    )


def plain_runner(shape: ModelShape, batch: Batch) -> Callable[[], float]:
    torch.manual_seed(0)
    model = PlainDecoder(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    return lambda: plain_step(model, optimizer, batch.tokens, batch.targets)


def lavra_runner(
    shape: ModelShape, batch: Batch, precision: str, *, compile_model: bool
) -> Callable[[], float]:
    model = build_decoder(shape, seed=0)
    optimizer = build_adamw(parameter_groups(model, 0.1), learning_rate=1e-3, betas=(0.9, 0.999))
    numerator = torch.compile(causal_numerator) if compile_model else causal_numerator

    def run() -> float:
        result = accumulate(
            model, batch, micro_batch_size=SEQUENCES, precision=precision, numerator=numerator
        )
        clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return result.loss

    return run


if __name__ == "__main__":
    main()
