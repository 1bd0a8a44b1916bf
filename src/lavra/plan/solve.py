"""From a budget to a model, a batch, a horizon, and predictions that the run will be held to.

Inputs are facts measured elsewhere (`Calibration`, `Machine`) and the recipe's sections; everything
here is arithmetic. Decisions are frozen in plan.json once training starts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from lavra.errors import PreflightError
from lavra.hardware.probe import Machine
from lavra.laws.loss import predict_bits_per_byte
from lavra.model.config import ModelConfig, ModelShape, shape_for
from lavra.optim.config import OptimizerName
from lavra.optim.cost import step_flops
from lavra.plan.estimates import (
    BYTES_PER_TOKEN,
    COMPILE_SECONDS,
    Calibration,
    disk_bytes,
    peak_memory_bytes,
    stage_seconds,
    training_tokens_per_second,
)
from lavra.tokenizer.bpe import SMALLEST_VOCABULARY
from lavra.tokenizer.config import TokenizerConfig
from lavra.units import format_bytes, format_count, parse_count

SIZES = [int(10 ** (e / 16)) for e in range(16 * 5 + 4, 16 * 10 + 12)]  # 0.18M to 56B, 15 % apart
MINIMUM_STEPS = 40
TOKENS_PER_PARAMETER = 20
# Optimizers that AdamW's learning rate does not suit.
_OWN_SCALE = ("sgd", "momentum", "nesterov", "adafactor")
# `auto` is Muon up to this share of the model's own FLOPs: it needs about half of AdamW's tokens (docs/lab-log.md).
MUON_SHARE = 0.5
MEMORY_SHARE = 0.85  # of what is available


@dataclass(frozen=True)
class Wishes:
    """What the recipe fixes, or leaves to the plan with `auto` (field meanings: the rooms' configs)."""

    seq_len: int | str
    batch_tokens: int | str
    micro_batch_size: int | str
    learning_rate: float | str
    optimizer: OptimizerName | Literal["auto"]
    precision: str
    compile: str
    warmup_fraction: float
    decay_fraction: float
    keep_checkpoints: int
    corpus_max_bytes: int | str
    validation_max_bytes: int | str
    evaluate_max_bytes: int | str


@dataclass(frozen=True)
class Situation:
    """Everything the plan depends on.

    Attributes:
        budget_kind: `time` (seconds), `tokens` or `flops`.
        text_bytes: estimated bytes of source text.
        ready_tokens: tokens that come tokenised.
        elapsed: seconds since the command started.
    """

    budget_kind: str
    budget_value: float
    model: ModelConfig
    tokenizer: TokenizerConfig
    wishes: Wishes
    text_bytes: int
    machine: Machine
    calibration: Calibration
    elapsed: float
    inherited: ModelShape | None = None
    ready_tokens: int = 0


@dataclass(frozen=True)
class Spending:
    """What a budget buys at some throughput.

    Attributes:
        tokens: of training.
        train_seconds: compilation and training.
        stages: seconds of the other stages.
        evaluate_bytes: text that evaluation scores.
    """

    tokens: float
    train_seconds: float
    stages: dict[str, float]
    evaluate_bytes: int


@dataclass(frozen=True)
class Candidate:
    """One affordable model with what it would reach."""

    shape: ModelShape
    spending: Spending
    optimizer: OptimizerName
    tokens_per_second: float
    compile: str
    bits_per_byte: float
    basis: str
    batch_size: int
    micro_batch_size: int
    memory_bytes: int


def solve(situation: Situation) -> dict[str, Any]:
    """Choose and predict; returns the content of plan.json (see docs/plan.md).

    Raises:
        PreflightError: nothing fits in memory or time; names the nearest that does.
    """
    candidates = [_candidate(situation, size) for size in _sizes(situation)]
    fitting = [c for c in candidates if _fits(c, situation)]
    if not fitting:
        _refuse(candidates, situation)
    best = min(fitting, key=lambda c: c.bits_per_byte)
    return _plan(best, situation)


def _sizes(s: Situation) -> list[int]:
    if s.inherited is not None:
        return [s.inherited.parameter_count()]
    if s.model.size != "auto":
        return [int(s.model.size)]
    if s.model.d_model != "auto" and s.model.n_layers != "auto":
        return [1_000_000]  # the overrides decide, whatever the dial says
    if s.budget_kind == "tokens":
        # Tokens alone do not bound the size; about 20 tokens a parameter is compute-optimal (Hoffmann et al. 2022).
        optimal = max(SIZES[0], int(s.budget_value / TOKENS_PER_PARAMETER))
        return [*(n for n in SIZES if n < optimal), optimal]
    return SIZES


def _candidate(s: Situation, size: int) -> Candidate:
    seq_len = _seq_len(s, size)
    vocab_size = _vocab_size(s, size)
    shape = s.inherited or shape_for(s.model, size, vocab_size=vocab_size, seq_len=seq_len)
    compile_, rate = _compile_and_rate(s, shape)
    batch_size = _batch_size(s, shape, _spend(s, shape, compile_, rate).tokens)
    optimizer, optimizer_flops = _optimizer(s, shape, batch_size * shape.seq_len)
    rate = training_tokens_per_second(
        shape, s.calibration, compile=compile_, optimizer_flops_per_token=optimizer_flops
    )
    spending = _spend(s, shape, compile_, rate)
    bits, basis = predict_bits_per_byte(shape.parameter_count(), max(spending.tokens, 1.0))
    micro = _micro_batch(s, shape, batch_size, optimizer, compile_)
    memory = peak_memory_bytes(
        shape, micro, optimizer=optimizer, compiled=compile_ != "off", calibration=s.calibration
    )
    return Candidate(shape, spending, optimizer, rate, compile_, bits, basis, batch_size, micro, memory)


def _spend(s: Situation, shape: ModelShape, compile_: str, rate: float) -> Spending:
    evaluate_bytes = _evaluate_bytes(s, rate)
    corpus_bytes = min(_corpus_bytes(s, rate), s.text_bytes)
    stages = stage_seconds(
        corpus_bytes=corpus_bytes,
        ready_tokens=s.ready_tokens,
        tokenizer_bytes=min(s.tokenizer.train_max_bytes, corpus_bytes),
        evaluate_bytes=evaluate_bytes,
        tokens_per_second=rate,
        cores=s.machine.cores,
    )
    if s.budget_kind == "time":
        seconds = s.budget_value - s.elapsed - sum(stages.values())
        tokens = max(seconds - COMPILE_SECONDS[compile_], 0.0) * rate
        return Spending(tokens, seconds, stages, evaluate_bytes)
    tokens = _budget_tokens(s, shape)
    return Spending(tokens, tokens / rate + COMPILE_SECONDS[compile_], stages, evaluate_bytes)


def _budget_tokens(s: Situation, shape: ModelShape) -> float:
    """Of a budget in tokens or FLOPs."""
    return s.budget_value if s.budget_kind == "tokens" else s.budget_value / shape.flops_per_token()


def _optimizer(s: Situation, shape: ModelShape, batch_tokens: int) -> tuple[OptimizerName, float]:
    """The wish, or for `auto` Muon where its step is cheap; and its FLOPs a token of training."""
    gram = s.calibration.device == "cpu"
    wish = s.wishes.optimizer
    if wish != "auto":
        return wish, step_flops(shape, wish, gram=gram) / batch_tokens
    flops = step_flops(shape, "muon", gram=gram) / batch_tokens
    return ("muon", flops) if flops <= MUON_SHARE * shape.flops_per_token() else ("adamw", 0.0)


def _fits(c: Candidate, s: Situation) -> bool:
    in_time = c.spending.tokens >= MINIMUM_STEPS * c.shape.seq_len or s.budget_kind != "time"
    return in_time and _fits_memory(c, s)


def _refuse(candidates: list[Candidate], s: Situation) -> None:
    smallest = min(candidates, key=lambda c: c.memory_bytes)
    if not _fits_memory(smallest, s):
        sizes = [parse_count(format_count(n)) for n in SIZES]  # as they will be typed
        largest = max((n for n in sizes if _fits_memory(_candidate(s, n), s)), default=0)
        raise PreflightError(
            f"a model of {format_count(smallest.shape.parameter_count())} parameters needs "
            f"{format_bytes(smallest.memory_bytes)} to train; {format_bytes(s.machine.available_bytes)} are available",
            where="plan",
            hint=f"the largest that fits is about model.size={format_count(largest)}"
            if largest
            else "no size fits like this: lower tokens.seq_len, train.micro_batch_size, tokenizer.vocab_size, d_model",
        )
    cheapest = min(candidates, key=lambda c: sum(c.spending.stages.values()))
    need = (
        s.elapsed
        + sum(cheapest.spending.stages.values())
        + COMPILE_SECONDS[cheapest.compile]
        + MINIMUM_STEPS * cheapest.shape.seq_len / cheapest.tokens_per_second
    )
    raise PreflightError(
        f"a budget of {s.budget_value:.0f}s leaves {cheapest.spending.train_seconds:.0f}s to train after the other stages",
        where="plan",
        hint=f"give it about budget.time={math.ceil(need * 1.5)}s, or lower corpus.max_bytes",
    )


def _fits_memory(c: Candidate, s: Situation) -> bool:
    return c.memory_bytes <= MEMORY_SHARE * s.machine.available_bytes


def _vocab_size(s: Situation, size: int) -> int:
    """By model size (a larger vocabulary costs parameters a small model needs elsewhere), capped by the text."""
    if s.tokenizer.vocab_size != "auto":
        return int(s.tokenizer.vocab_size)
    ladder = ((10e6, 4096), (60e6, 8192), (200e6, 16384), (1e9, 32768), (math.inf, 65536))
    wanted = next(vocab for limit, vocab in ladder if size < limit)
    learnable = SMALLEST_VOCABULARY + int(min(s.text_bytes, s.tokenizer.train_max_bytes) / 60)
    return min(wanted, learnable)


def _seq_len(s: Situation, size: int) -> int:
    if s.wishes.seq_len != "auto":
        return int(s.wishes.seq_len)
    wanted = 512 if size < 60e6 else 1024 if size < 500e6 else 2048
    # A short corpus: at least eight windows, so that a batch does not repeat itself.
    longest = max(16, int((s.text_bytes / BYTES_PER_TOKEN + s.ready_tokens) / 8))
    return min(wanted, 1 << (longest.bit_length() - 1))


def _compile_and_rate(s: Situation, shape: ModelShape) -> tuple[str, float]:
    """What trains the most tokens with the compilation paid for; the simpler one unless 5 % is gained."""
    if not s.machine.compiler:
        choices = ["off"]
    elif s.wishes.compile != "auto":
        choices = [s.wishes.compile]
    else:
        choices = list(COMPILE_SECONDS)
    rates = {how: training_tokens_per_second(shape, s.calibration, compile=how) for how in choices}

    def effective(how: str) -> float:
        """Tokens a second of the whole training time."""
        if s.budget_kind == "time":
            seconds = s.budget_value - s.elapsed
            return rates[how] * max(0.0, 1 - COMPILE_SECONDS[how] / max(seconds, 1e-9))
        tokens = _budget_tokens(s, shape)
        return tokens / (tokens / rates[how] + COMPILE_SECONDS[how])

    best = choices[0]
    for how in choices[1:]:
        if effective(how) > 1.05 * effective(best):
            best = how
    return best, rates[best]


def _corpus_bytes(s: Situation, rate: float) -> int:
    """Text worth curating: half more than the budget can read once, at least 16 MB."""
    if s.wishes.corpus_max_bytes != "auto":
        return int(s.wishes.corpus_max_bytes)
    tokens = s.budget_value * (rate if s.budget_kind == "time" else 1.0)
    if s.budget_kind == "flops":
        return 1 << 62
    return max(16_000_000, int(1.5 * tokens * BYTES_PER_TOKEN))


def _evaluate_bytes(s: Situation, rate: float) -> int:
    """What 5 % of a time budget can score (each token is read about twice, forward only), at most 4 MB."""
    if s.wishes.evaluate_max_bytes != "auto":
        return int(s.wishes.evaluate_max_bytes)
    if s.budget_kind != "time":
        return 1_000_000
    return int(min(4e6, max(60e3, 0.05 * s.budget_value * 1.3 * rate * BYTES_PER_TOKEN)))


def _batch_size(s: Situation, shape: ModelShape, tokens: float) -> int:
    """Sequences an optimizer step; `auto` grows like the horizon to the 0.55 (1500 tokens at 1M)."""
    if s.wishes.batch_tokens != "auto":
        return max(1, round(int(s.wishes.batch_tokens) / shape.seq_len))
    wanted = 1500 * (max(tokens, 1e4) / 1e6) ** 0.55
    return max(1, 1 << round(math.log2(max(wanted / shape.seq_len, 1))))


def _micro_batch(
    s: Situation, shape: ModelShape, batch_size: int, optimizer: OptimizerName, compile_: str
) -> int:
    """Largest power of two that fits in memory, no more tokens than the kernels profit from.

    On a CPU compiled code of a narrow model is fastest where a layer's activations stay in the cache; measured at
    widths 256 and 512 (docs/lab-log.md).
    """
    if s.wishes.micro_batch_size != "auto":
        return min(int(s.wishes.micro_batch_size), batch_size)
    on_cpu = 1024 if compile_ != "off" and shape.d_model <= 256 else 4096
    useful = max(1, (on_cpu if s.calibration.device == "cpu" else 65536) // shape.seq_len)
    micro = min(batch_size, 1 << (useful.bit_length() - 1))
    while micro > 1 and (
        peak_memory_bytes(shape, micro, optimizer=optimizer, compiled=False, calibration=s.calibration)
        > MEMORY_SHARE * s.machine.available_bytes
    ):
        micro //= 2
    return micro


def peak_learning_rate(wish: float | str, d_model: int, optimizer: str) -> float:
    """The wish, or for `auto` 3e-3 up to width 256, falling like width^-1.2 (8e-4 at 768, 2.5e-4 at 2048).

    That is AdamW's. Lion's signs take a fifth (Chen et al. 2023: 3 to 10 times less). Muon's matrices take
    1.2e-2 up to width 128, 7e-3 at 256, and from there fall as AdamW's; at width 64 twice as much is as good,
    with activations ten times as large (docs/lab-log.md).
    """
    if wish != "auto":
        return float(wish)
    wide = max(1.0, d_model / 256) ** -1.2
    rate = 1.2e-2 * (128 / min(max(d_model, 128), 256)) ** 0.75 if optimizer == "muon" else 3e-3
    return float(f"{rate * wide / (5 if optimizer == 'lion' else 1):.2g}")


def share_of_steps(fraction: float, steps: int) -> int:
    """Optimizer steps of a warm-up or a decay, at least one."""
    return max(1, round(fraction * steps))


def horizon_of(steps: int, batch_tokens: int, decay_fraction: float) -> dict[str, Any]:
    """The plan's horizon that ends after `steps`, whatever the time."""
    return {
        "steps": steps,
        "decay": share_of_steps(decay_fraction, steps),
        "tokens": steps * batch_tokens,
        "decided": True,
        "seconds": None,
    }


def _plan(c: Candidate, s: Situation) -> dict[str, Any]:
    spending = c.spending
    batch_tokens = c.batch_size * c.shape.seq_len
    steps = max(MINIMUM_STEPS if s.budget_kind == "time" else 1, math.ceil(spending.tokens / batch_tokens))
    tokens = steps * batch_tokens
    validation = (
        int(spending.evaluate_bytes * 1.25)
        if s.wishes.validation_max_bytes == "auto"
        else int(s.wishes.validation_max_bytes)
    )
    corpus = min(_corpus_bytes(s, c.tokens_per_second), 1 << 62)
    stages = {**spending.stages, "pretrain": spending.train_seconds}
    stages = {"plan": s.elapsed, **stages}
    nats = c.bits_per_byte * math.log(2) * BYTES_PER_TOKEN
    return {
        "decisions": {
            "model": c.shape.model_dump(),
            "parameters": c.shape.parameter_count(),
            "vocab_size": c.shape.vocab_size,
            "seq_len": c.shape.seq_len,
            "batch_size": c.batch_size,
            "batch_tokens": batch_tokens,
            "micro_batch_size": c.micro_batch_size,
            "gradient_accumulation": math.ceil(c.batch_size / c.micro_batch_size),
            "optimizer": c.optimizer,
            "learning_rate": peak_learning_rate(s.wishes.learning_rate, c.shape.d_model, c.optimizer),
            "warmup_steps": share_of_steps(s.wishes.warmup_fraction, steps),
            "precision": s.calibration.precision if s.wishes.precision == "auto" else s.wishes.precision,
            "compile": c.compile,
            "device": s.calibration.device,
            "corpus_max_bytes": corpus if corpus < s.text_bytes else None,
            "validation_max_bytes": validation,
            "evaluate_max_bytes": spending.evaluate_bytes,
        },
        "horizon": horizon_of(steps, batch_tokens, s.wishes.decay_fraction)
        | {"decided": s.budget_kind != "time"},
        "budget": {"kind": s.budget_kind, "value": s.budget_value},
        "predictions": {
            "parameters": c.shape.parameter_count(),
            "flops": c.shape.flops_per_token() * tokens,
            "peak_memory_bytes": c.memory_bytes,
            "disk_bytes": disk_bytes(
                c.shape,
                min(corpus, s.text_bytes),
                s.ready_tokens,
                optimizer=c.optimizer,
                keep=s.wishes.keep_checkpoints,
            ),
            "tokens_per_second": round(c.tokens_per_second, 1),
            "wall_seconds": sum(stages.values()),
            "final_bpb": round(c.bits_per_byte, 3),
            "final_loss": round(nats, 3),
            "stage_seconds": stages,
        },
        "basis": {
            "parameters": "exact",
            "flops": "6 x matmul parameters + causal attention, a token",
            "peak_memory_bytes": "resident memory of this process + weights, gradients, moments + stored activations",
            "disk_bytes": "corpus, tokens, checkpoints kept, temporary copies",
            "tokens_per_second": f"measured here on probe models ({s.calibration.precision}, {s.calibration.device})",
            "wall_seconds": "sum of the stages; a time budget decides the horizon again when decay begins",
            "final_bpb": c.basis,
            "final_loss": f"final_bpb at an assumed {BYTES_PER_TOKEN} bytes a token",
        },
        "notes": _notes(c, s, tokens),
    }


def _notes(c: Candidate, s: Situation, tokens: float) -> list[str]:
    notes = []
    available = (
        min(s.text_bytes, _corpus_bytes(s, c.tokens_per_second)) * 0.9 / BYTES_PER_TOKEN + s.ready_tokens
    )
    if tokens > 4 * available:
        notes.append(
            f"the horizon passes {tokens / available:.0f} times over the text; beyond about 4 epochs repeats teach "
            "little (Muennighoff et al. 2023): add text"
        )
    if s.wishes.learning_rate == "auto" and c.optimizer in _OWN_SCALE:
        notes.append(
            f"train.learning_rate auto is AdamW's; {c.optimizer} steps on another scale: give it a rate"
        )
    if not s.machine.compiler and s.wishes.compile != "off":
        notes.append("no C++ compiler found: torch.compile is off, training runs eagerly")
    return notes
