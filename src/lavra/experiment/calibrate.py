"""Calibration probe: a few real training steps of two small models, before anything is planned."""

from __future__ import annotations

import time

import psutil
import torch

from lavra.batch import Batch
from lavra.hardware.measure import measure_gemm
from lavra.hardware.probe import Machine, keep_freed_memory
from lavra.model.config import ModelConfig, ModelShape, shape_for
from lavra.model.decoder import build_decoder
from lavra.optim.build import OptimizerSettings, build_optimizer
from lavra.plan.estimates import Calibration, Probe
from lavra.train.step import accumulate

PROBE_WIDTHS = {"cpu": (128, 320), "cuda": (256, 1024)}
BF16_GAIN_NEEDED = 1.2  # bf16 GEMM / fp32 GEMM above which autocast pays for its casts
# Whole-model compilation by TorchInductor, measured (docs/lab-log.md).
COMPILE_GAIN = {"fp32": 1.12, "tf32": 1.3, "bf16": 1.3, "fp16": 1.3, "fp8": 1.3}


def calibrate(machine: Machine, precision: str) -> Calibration:
    """Measure GEMM ceilings and training throughput of probe models (a few seconds).

    Args:
        precision: `fp32`, `bf16`, or `auto` for the faster one here.
    """
    device = training_device()
    keep_freed_memory()
    gemm = measure_gemm(device)
    if precision == "auto":
        precision = "bf16" if gemm["bf16"] > BF16_GAIN_NEEDED * gemm["fp32"] else "fp32"
    base = psutil.Process().memory_info().rss
    probes = tuple(_probe(width, device, precision) for width in PROBE_WIDTHS[device.type])
    return Calibration(
        device=device.type,
        gemm_gflops=gemm,
        precision=precision,
        probes=probes,
        compile_gain=COMPILE_GAIN[precision],
        base_bytes=base,
    )


def training_device() -> torch.device:
    """The first CUDA device, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _probe(width: int, device: torch.device, precision: str, *, repeats: int = 3) -> Probe:
    config = ModelConfig(d_model=width, n_layers=3)
    shape = shape_for(config, 1_000_000, vocab_size=4096, seq_len=512)
    model = build_decoder(shape, seed=0, device=device)
    optimizer = build_optimizer(model, OptimizerSettings(learning_rate=1e-4))
    batch = _random_batch(shape, sequences=8)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        accumulate(model, batch, micro_batch_size=8, precision=precision)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return Probe(width, shape.flops_per_token(), batch.tokens.numel() / best)


def _random_batch(shape: ModelShape, sequences: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape.vocab_size, (sequences, shape.seq_len), generator=generator)
    positions = torch.arange(shape.seq_len).expand(sequences, -1)
    return Batch(
        tokens, tokens, positions, torch.ones_like(tokens, dtype=torch.bool), torch.arange(sequences)
    )
