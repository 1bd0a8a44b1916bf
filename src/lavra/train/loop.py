"""The training loop. What is not the loop is a callback or a pure function."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

from lavra import metrics
from lavra.checkpoint.store import (
    latest_checkpoint,
    load_model,
    load_optimizer,
    load_state,
    prune,
    save_checkpoint,
)
from lavra.errors import DivergedError, PreflightError
from lavra.metrics import JsonlWriter
from lavra.model.decoder import Decoder
from lavra.objective.causal import causal_numerator
from lavra.optim.adamw import build_adamw, clip_grad_norm, parameter_groups
from lavra.optim.schedules import Schedule, lr_multiplier
from lavra.tokens.windows import Sampler
from lavra.train.signals import StopRequest
from lavra.train.step import StepResult, accumulate


@dataclass(frozen=True)
class TrainSettings:
    """Decisions of one training run; frozen in plan.json."""

    batch_size: int  # sequences an optimizer step
    micro_batch_size: int
    learning_rate: float
    schedule: Schedule
    warmup: int
    weight_decay: float
    betas: tuple[float, float]
    grad_clip: float
    precision: str
    compile: bool
    seed: int
    checkpoint_every: float  # seconds
    keep_checkpoints: int
    log_every: int


@dataclass
class Horizon:
    """When training ends. A time-boxed run fixes `steps` once, when its decay begins.

    Attributes:
        steps: optimizer steps; an estimate until `decided`.
        decay: steps of the final decay.
        seconds: training time allowed (None: steps are given, nothing is decided later).
        decay_fraction: share of `seconds` kept for the decay.
    """

    steps: int
    decay: int
    decided: bool
    seconds: float | None = None
    decay_fraction: float = 0.35

    @property
    def open(self) -> bool:
        """True while a time-boxed run has not fixed its last step; `steps` bounds nothing yet."""
        return self.seconds is not None and not self.decided

    def decide(self, step: int, elapsed: float, step_seconds: float) -> bool:
        """Fix the horizon if decay must begin now; True when that happened at this call.

        The learning rate before this moment did not depend on the horizon, so a run with the decided
        horizon known from the start takes exactly the same steps.
        """
        if self.seconds is None or self.decided:
            return False
        if elapsed < (1 - self.decay_fraction) * self.seconds:
            return False
        self.decay = max(1, int((self.seconds - elapsed) / step_seconds))
        self.steps, self.decided = step + self.decay, True
        return True


@dataclass
class TrainState:
    """Everything that resume needs besides weights and optimizer moments."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # time in training, over all attempts
    micro_batch_size: int = 0


@dataclass
class StepFacts:
    """What callbacks see after each optimizer step."""

    step: int
    last: bool
    model: Decoder
    metrics: dict[str, Any] = field(default_factory=dict)


class Callback(Protocol):
    """Called after every optimizer step; may add to `facts.metrics` before they are written."""

    def __call__(self, facts: StepFacts) -> None:
        """Look at a step that was just taken."""


def train(
    model: Decoder,
    sampler: Sampler,
    settings: TrainSettings,
    horizon: Horizon,
    *,
    run_dir: Path,
    stop: StopRequest,
    callbacks: Sequence[Callback] = (),
    on_horizon: Callable[[Horizon, int], None] = lambda horizon, step: None,
    on_event: Callable[[int, str, str], None] = lambda step, kind, text: None,
    peak_flops: float | None = None,
) -> TrainState:
    """Train to the horizon, resuming from the newest complete checkpoint in `run_dir/checkpoints`.

    Args:
        callbacks: run in order after each step.
        on_horizon: called once when a time-boxed run fixes its last step.
        on_event: called with (step, kind, text) for the run's event log.
        peak_flops: measured ceiling in FLOP/s, for MFU.

    Raises:
        DivergedError: loss or gradient norm not finite; the optimizer did not move.
        RequeueError, InterruptedByUser: a signal asked for a stop; a checkpoint was written.
        PreflightError: a micro-batch of one sequence does not fit in memory.
    """
    folder = run_dir / "checkpoints"
    optimizer = build_adamw(
        parameter_groups(model, settings.weight_decay),
        learning_rate=settings.learning_rate,
        betas=settings.betas,
    )
    state = _resume(folder, model, optimizer, settings)
    metrics.truncate_after(run_dir / "metrics.jsonl", state.step)
    log = JsonlWriter(run_dir / "metrics.jsonl")
    numerator = torch.compile(causal_numerator) if settings.compile else causal_numerator
    clock = _Clock(state.seconds, state.step)
    process = psutil.Process()
    saved_at, saved_step = clock.seconds(), state.step

    def save() -> None:
        state.seconds = clock.seconds()
        save_checkpoint(folder, step=state.step, model=model, optimizer=optimizer, state=asdict(state))
        prune(folder, settings.keep_checkpoints)

    while horizon.open or state.step < horizon.steps:
        if horizon.decide(state.step, clock.seconds(), clock.step_seconds()):
            on_horizon(horizon, state.step)
        started = time.perf_counter()
        batch = sampler.batch(state.step * settings.batch_size, settings.batch_size)
        waited = time.perf_counter() - started
        multiplier = lr_multiplier(
            state.step,
            schedule=settings.schedule,
            warmup=settings.warmup,
            horizon=sys.maxsize if horizon.open else horizon.steps,
            decay=horizon.decay,
        )
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * multiplier
        result, state.micro_batch_size = _accumulate_within_memory(
            model, batch, state.micro_batch_size, settings.precision, numerator, state.step, on_event
        )
        grad_norm = float(clip_grad_norm(model.parameters(), settings.grad_clip))
        _refuse_non_finite(result.loss, grad_norm, state.step, batch.sample_ids, sampler)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        state.step += 1
        state.tokens += result.targets
        seconds = time.perf_counter() - started
        clock.tick()
        facts = StepFacts(state.step, not horizon.open and state.step >= horizon.steps, model)
        tokens_per_second = result.targets / seconds
        facts.metrics = {
            "step": state.step,
            "tokens": state.tokens,
            "time": round(clock.seconds(), 3),
            metrics.TRAIN_LOSS: result.loss,
            metrics.LEARNING_RATE: settings.learning_rate * multiplier,
            metrics.GRAD_NORM: grad_norm,
            metrics.TOKENS_PER_SECOND: round(tokens_per_second, 1),
            metrics.DATA_WAIT: round(waited / seconds, 4),
            metrics.RSS_GIB: round(process.memory_info().rss / 2**30, 4),
        }
        if peak_flops:
            used = model.shape.flops_per_token() * tokens_per_second
            facts.metrics[metrics.MFU] = round(used / peak_flops, 4)
        for callback in callbacks:
            callback(facts)
        if state.step % settings.log_every == 0 or facts.last:
            log.write(facts.metrics)
        if facts.last or stop.signal is not None or clock.seconds() - saved_at > settings.checkpoint_every:
            save()
            saved_at, saved_step = clock.seconds(), state.step
        if stop.signal is not None and not facts.last:
            log.close()
            raise stop.error(saved_step)
    log.close()
    return state


def _resume(
    folder: Path, model: Decoder, optimizer: torch.optim.Optimizer, settings: TrainSettings
) -> TrainState:
    checkpoint = latest_checkpoint(folder)
    if checkpoint is None:
        return TrainState(micro_batch_size=settings.micro_batch_size)
    state = TrainState(**load_state(checkpoint))
    # The smaller of what memory allowed before and what is asked for now.
    state.micro_batch_size = min(state.micro_batch_size, settings.micro_batch_size)
    load_model(checkpoint, model)
    load_optimizer(checkpoint, model, optimizer)
    return state


def _accumulate_within_memory(
    model, batch, size, precision, numerator, step, on_event
) -> tuple[StepResult, int]:
    """Run the step; when memory runs out, halve the micro-batch and run it again. The global batch stays."""
    while True:
        try:
            return accumulate(
                model, batch, micro_batch_size=size, precision=precision, numerator=numerator
            ), size
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            model.zero_grad(set_to_none=True)
            if size == 1:
                raise PreflightError(
                    "out of memory with a micro-batch of one sequence",
                    hint="use a smaller model (model.size=...) or tokens.seq_len=...",
                ) from error
            on_event(
                step + 1,
                "out_of_memory",
                f"micro-batch {size} -> {size // 2} sequences; the global batch stays",
            )
            size //= 2


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in text


def _refuse_non_finite(loss: float, grad_norm: float, step: int, sample_ids, sampler: Sampler) -> None:
    """Decide before the optimizer moves (law 5), and name the documents of the step."""
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    documents = [d for sample in sample_ids.tolist() for d in sampler.documents(sample)]
    raise DivergedError(
        f"loss {loss} and gradient norm {grad_norm} at step {step + 1}; weights are unchanged since step {step}",
        where="pretrain",
        hint="lower train.learning_rate; documents of this step: " + ", ".join(documents[:6]),
    )


class _Clock:
    """Seconds in training over all attempts, and the typical time from one step to the next."""

    def __init__(self, before: float, steps_before: int) -> None:
        self._before, self._before_a_step = before, before / max(steps_before, 1)
        self._start = time.perf_counter()
        self._first_step_end: float | None = None
        self._steps_since = 0

    def seconds(self) -> float:
        return self._before + time.perf_counter() - self._start

    def tick(self) -> None:
        """An optimizer step ended. The first is not counted: it may compile."""
        if self._first_step_end is None:
            self._first_step_end = time.perf_counter()
        else:
            self._steps_since += 1

    def step_seconds(self) -> float:
        """Mean time between steps, callbacks and checkpoints included; just resumed: that of the attempts before."""
        if self._first_step_end is None or self._steps_since == 0:
            return max(self._before_a_step or time.perf_counter() - self._start, 1e-3)
        return (time.perf_counter() - self._first_step_end) / self._steps_since
