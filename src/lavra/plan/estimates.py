"""Closed forms behind the plan: memory, throughput, disk, seconds of each stage.

Rates of the text stages are round figures measured on one 2-core machine (docs/lab-log.md); the run
measures them again and the report shows both.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from lavra.model.config import ModelShape
from lavra.optim.config import OptimizerName
from lavra.optim.cost import state_count

BYTES_PER_TOKEN = 3.4  # before the tokenizer exists: vocabulary 4096 on English and code
CORPUS_BYTES_PER_SECOND_CORE = 6e6
TOKENIZER_BYTES_PER_SECOND = 1.5e6
ENCODE_BYTES_PER_SECOND_CORE = 0.8e6
IMPORT_TOKENS_PER_SECOND_CORE = 5e6  # benchmarks/token_import.py: 7.7e6
COMPRESS_BYTES_PER_SECOND = 0.5e6  # xz -9e and zstd -19 of the evaluated files
STAGE_OVERHEAD_SECONDS = 2.0  # processes start, files open
REPORT_SECONDS = 2.0
WORKSPACE_BYTES = 128 << 20  # libraries' buffers, chunks of logits, the heap's slack
COMPILE_BYTES = 64 << 20  # what the compiler leaves behind
COMPILE_SECONDS = {"off": 0.0, "blocks": 15.0, "model": 30.0}  # cold caches (docs/lab-log.md)
# Share of the whole-model gain over eager that compiled blocks reach.
BLOCKS_GAIN_SHARE = 0.9
WORKSPACE_BYTES_PER_PARAMETER = 9


@dataclass(frozen=True)
class Probe:
    """Training throughput measured on one small model."""

    d_model: int
    flops_per_token: float
    tokens_per_second: float


@dataclass(frozen=True)
class Calibration:
    """What was measured on this machine just before planning.

    Attributes:
        gemm_gflops: best GEMM throughput by dtype, GFLOP/s.
        precision: the faster training precision here.
        probes: eager training throughput of probe models, by rising width.
        compile_gain: throughput compiled / eager expected here.
        base_bytes: resident memory of this process with torch loaded and warmed up.
    """

    device: str
    gemm_gflops: dict[str, float]
    precision: str
    probes: tuple[Probe, ...]
    compile_gain: float
    base_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)

    @property
    def peak_flops(self) -> float:
        """Measured GEMM ceiling in the training precision, FLOP/s."""
        return self.gemm_gflops[self.precision] * 1e9


def training_tokens_per_second(
    shape: ModelShape, calibration: Calibration, *, compile: str, optimizer_flops_per_token: float = 0.0
) -> float:
    """Throughput: FLOP/s interpolated between the probes in log width, held flat outside them.

    The probes hold AdamW's step; `optimizer_flops_per_token` is what another one multiplies besides.
    """
    probes = calibration.probes
    achieved = [p.flops_per_token * p.tokens_per_second for p in probes]
    width = math.log(shape.d_model)
    widths = [math.log(p.d_model) for p in probes]
    if width <= widths[0]:
        flops = achieved[0] * shape.d_model / probes[0].d_model  # narrow models waste the vector units
    elif width >= widths[-1]:
        flops = achieved[-1]
    else:
        right = next(i for i, w in enumerate(widths) if w >= width)
        share = (width - widths[right - 1]) / (widths[right] - widths[right - 1])
        flops = achieved[right - 1] + share * (achieved[right] - achieved[right - 1])
    share = {"off": 0.0, "blocks": BLOCKS_GAIN_SHARE, "model": 1.0}[compile]
    gain = 1 + share * (calibration.compile_gain - 1)
    return 1 / (shape.flops_per_token() / (flops * gain) + optimizer_flops_per_token / flops)


def peak_memory_bytes(
    shape: ModelShape,
    micro_batch_size: int,
    *,
    optimizer: OptimizerName,
    compiled: bool,
    calibration: Calibration,
) -> int:
    """Steady-state memory of the training process: base, work space, states of the weights, activations.

    A parameter has its weight, its gradient and what the optimizer keeps, 4 bytes each; the work space was
    measured (docs/lab-log.md).
    """
    element = 4 if calibration.precision == "fp32" else 2
    states = (8 + WORKSPACE_BYTES_PER_PARAMETER) * shape.parameter_count() + 4 * state_count(shape, optimizer)
    activations = activation_bytes(shape, micro_batch_size, element, compiled=compiled)
    workspace = WORKSPACE_BYTES + (COMPILE_BYTES if compiled else 0)
    return int(calibration.base_bytes + workspace + states + activations)


def activation_bytes(shape: ModelShape, micro_batch_size: int, element: int, *, compiled: bool) -> float:
    """Tensors kept for the backward pass of one micro-batch, and the temporaries of a block on its way back.

    A token of a block keeps: both norm inputs and outputs, q, k, v before and after rotation, the attention
    output, gate, up, silu and their product; up to a context of 1024 attention without a soft cap keeps five
    eighths of its T x T probabilities, or in a window W at most T x (W + 128). Temporaries take about 12 d_ff a
    token, once. The output keeps no logits. Compiled graphs need four fifths of it all.
    """
    tokens = micro_batch_size * shape.seq_len
    kv = shape.n_kv_heads * shape.head_dim
    block = 6 * shape.d_model + 2 * (shape.d_model + 2 * kv) + 4 * shape.d_ff
    seen = 0.625 * shape.seq_len
    if shape.attention_window:
        seen = min(seen, shape.attention_window + 128)
    kept_probabilities = shape.seq_len <= 1024 and not shape.attention_soft_cap
    probabilities = shape.n_heads * seen if kept_probabilities else 0
    kept = shape.n_layers * (block + probabilities) + 12 * shape.d_ff
    return tokens * kept * element * (0.8 if compiled else 1.0)


def disk_bytes(
    shape: ModelShape, corpus_bytes: int, ready_tokens: int, *, optimizer: OptimizerName, keep: int
) -> int:
    """Corpus (compressed, with its intermediate copy), tokens (2 or 4 bytes), checkpoints kept plus one."""
    token = 2 if shape.vocab_size <= 1 << 16 else 4
    return int(
        corpus_bytes * 0.8
        + (corpus_bytes / BYTES_PER_TOKEN + ready_tokens) * token
        + (keep + 1) * 4 * (shape.parameter_count() + state_count(shape, optimizer))
    )


def stage_seconds(
    *,
    corpus_bytes: float,
    ready_tokens: float,
    tokenizer_bytes: float,
    evaluate_bytes: float,
    tokens_per_second: float,
    cores: int,
) -> dict[str, float]:
    """Expected seconds of every stage but plan and pretrain."""
    scored = 2 * evaluate_bytes / BYTES_PER_TOKEN / (2.6 * tokens_per_second)
    return {
        "corpus": STAGE_OVERHEAD_SECONDS + corpus_bytes / CORPUS_BYTES_PER_SECOND_CORE / cores,
        "tokenizer": STAGE_OVERHEAD_SECONDS + tokenizer_bytes / TOKENIZER_BYTES_PER_SECOND,
        "tokens": STAGE_OVERHEAD_SECONDS
        + corpus_bytes / ENCODE_BYTES_PER_SECOND_CORE / cores
        + ready_tokens / IMPORT_TOKENS_PER_SECOND_CORE / cores,
        "evaluate": STAGE_OVERHEAD_SECONDS + scored + evaluate_bytes / COMPRESS_BYTES_PER_SECOND,
        "report": REPORT_SECONDS,
    }
