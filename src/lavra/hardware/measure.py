"""Measured ceilings of this machine: GEMM throughput by dtype, memory bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

GEMM_SIZE = {"cpu": 1024, "cuda": 8192}


def gemm_gflops(dtype: torch.dtype, device: torch.device, *, repeats: int = 5) -> float:
    """Best of `repeats` square matrix products, in GFLOP/s (2 n^3 a product)."""
    n = GEMM_SIZE[device.type]
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / _best_seconds(lambda: a @ b, device, repeats) / 1e9


def copy_gigabytes_per_second(device: torch.device, *, repeats: int = 5) -> float:
    """Best of `repeats` 256 MB copies, bytes read plus bytes written, in GB/s."""
    source = torch.ones(64 << 20, device=device)
    target = torch.empty_like(source)
    return 2 * 4 * source.numel() / _best_seconds(lambda: target.copy_(source), device, repeats) / 1e9


def measure_gemm(device: torch.device) -> dict[str, float]:
    """GFLOP/s of fp32 and bf16 matrix products."""
    return {
        name: round(gemm_gflops(dtype, device), 1)
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    }


def _best_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    best = float("inf")
    run()
    for _ in range(repeats):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
