"""The training loop. What is not the loop is a callback or a pure function."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from lavra import metrics
from lavra.batch import Batch
from lavra.checkpoint.store import (
    AVERAGE,
    Saver,
    checkpoint_step,
    complete_checkpoints,
    latest_checkpoint,
    load_by_name,
    load_model,
    load_optimizer,
    load_state,
    take_snapshot,
)
from lavra.errors import DivergedError, PreflightError
from lavra.metrics import MetricsLog
from lavra.model.decoder import Decoder
from lavra.objective.causal import causal_numerator
from lavra.optim.build import build_optimizer, set_learning_rate
from lavra.optim.clipping import clip_gradients
from lavra.optim.schedules import lr_multiplier
from lavra.parallel.ranks import Ranks
from lavra.tokens.loader import Loader
from lavra.tokens.ramps import StepSamples, leave_out, skip
from lavra.tokens.sampler import DocumentSpan, Sampler
from lavra.train.blame import Describe, blame, event_text
from lavra.train.ema import Ema
from lavra.train.guard import Guard, Verdict
from lavra.train.horizon import Clock, Horizon
from lavra.train.precision import LossScale
from lavra.train.signals import StopRequest
from lavra.train.state import Callback, Observer, StepFacts, TrainSettings, TrainState
from lavra.train.step import Numerator, StepResult, accumulate


def train(
    model: Decoder,
    sampler: Sampler,
    settings: TrainSettings,
    horizon: Horizon,
    *,
    run_dir: Path,
    stop: StopRequest,
    callbacks: Sequence[Callback] = (),
    observer: Observer | None = None,
    on_horizon: Callable[[Horizon, int], None] = lambda horizon, step: None,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    describe: Describe = DocumentSpan._asdict,
    peak_flops: float | None = None,
) -> TrainState:
    """Train to the horizon, resuming from the newest complete checkpoint in `run_dir/checkpoints`.

    Args:
        callbacks: run in order after each step.
        observer: statistics of the layers.
        on_horizon: called once when a time-boxed run fixes its last step.
        on_event: called with `step`, `kind`, `text` and the facts of an event, for the run's event log.
        describe: a document span -> what an event says of it.
        peak_flops: measured ceiling in FLOP/s, for MFU.

    Raises:
        DivergedError: the guard stopped the run; the optimizer did not move.
        RequeueError, InterruptedByUser: a signal asked for a stop; a checkpoint was written.
        PreflightError: a micro-batch of one sequence does not fit in memory.
    """
    training = _Training(model, sampler, settings, horizon, run_dir, on_event, describe, peak_flops)
    return training.run(stop, callbacks, observer, on_horizon)


class _Training:
    """One call of `train`: the state and the acts on it."""

    def __init__(
        self,
        model: Decoder,
        sampler: Sampler,
        settings: TrainSettings,
        horizon: Horizon,
        run_dir: Path,
        on_event: Callable[[dict[str, Any]], None],
        describe: Describe,
        peak_flops: float | None,
    ) -> None:
        self.model, self.sampler, self.settings, self.horizon = model, sampler, settings, horizon
        self.folder = run_dir / "checkpoints"
        self.on_event, self.describe, self.peak_flops = on_event, describe, peak_flops
        self.ranks = Ranks.current()
        self.optimizer = build_optimizer(model, settings.optimizer)
        self.ema = Ema(model, settings.ema_decay) if settings.ema_decay else None
        self.guard = Guard(settings.guard)
        self.scale = LossScale(settings.precision == "fp16")
        self.state = TrainState(micro_batch_size=settings.micro_batch_size)
        if (checkpoint := latest_checkpoint(self.folder)) is not None:
            self._load(checkpoint)
        self.log = MetricsLog(run_dir / "metrics.jsonl", after=self.state.step, mute=self.ranks.rank > 0)
        self.saver = Saver(
            self.folder,
            keep=settings.keep_checkpoints,
            keep_every=settings.keep_every,
            background=settings.background_checkpoints,
        )
        self.numerator = compiled_numerator(model, settings.compile)
        self.clock = Clock(self.state.seconds, self.state.step)
        self.process = psutil.Process()

    def run(
        self,
        stop: StopRequest,
        callbacks: Sequence[Callback],
        observer: Observer | None,
        on_horizon: Callable[[Horizon, int], None],
    ) -> TrainState:
        """Step until the horizon is reached."""
        state, horizon, settings = self.state, self.horizon, self.settings
        saved_at, saved_step = self.clock.seconds(), state.step
        with Loader(self.sampler) as loader:
            while horizon.open or state.step < horizon.steps:
                if horizon.open and horizon.decide(state.step, *self._mean_times()):
                    on_horizon(horizon, state.step)
                    loader.forget()  # the mixture may change with the decay
                started = time.perf_counter()
                facts = self._step(loader, observer)
                self.clock.tick()
                if facts is None:
                    continue
                facts.metrics |= self._speed(time.perf_counter() - started, loader.waited)
                for callback in callbacks:
                    callback(facts)
                if state.step % settings.log_every == 0 or facts.last:
                    self.log.write(facts.metrics)
                kept_for_good = settings.keep_every and state.step % settings.keep_every == 0
                due = self.clock.seconds() - saved_at > settings.checkpoint_every
                wishes = [facts.last or kept_for_good or due, stop.signal is not None]
                save, leave = (wish > 0 for wish in self.ranks.sum(wishes))  # any process decides for all
                if save or leave:
                    self.save()
                    saved_at, saved_step = self.clock.seconds(), state.step
                if leave and not facts.last:
                    self.close()
                    raise stop.error(saved_step)
        self.close()
        return state

    def _step(self, loader: Loader, observer: Observer | None) -> StepFacts | None:
        """One attempt at an optimizer step; None: it was rejected, and the next attempt reads other samples."""
        state, settings = self.state, self.settings
        shape = settings.steps.at(state.step)
        batch = loader.get(self._samples(shape), self._samples(settings.steps.at(state.step + 1)))
        set_learning_rate(self.optimizer, self._multiplier())
        result, grad_norm = self._gradients(batch, shape)
        verdict = self.guard.judge(result.loss, grad_norm)
        if verdict is not None and not self._goes_on(verdict, batch, shape):
            return None
        if observer is not None:
            observer.before(state.step + 1, self.model, batch)
        self.optimizer.step()
        observed = observer.after(state.step + 1, self.model) if observer is not None else {}
        self.optimizer.zero_grad(set_to_none=True)
        if verdict is None:
            self.guard.accept(result.loss, grad_norm)
        self.scale.stepped()
        if self.ema is not None:
            self.ema.update(state.step)
        state.step += 1
        state.tokens += result.targets
        self._count_sources(batch)
        last = not self.horizon.open and state.step >= self.horizon.steps
        values = {
            "step": state.step,
            "tokens": state.tokens,
            "time": round(self.clock.seconds(), 3),
            metrics.TRAIN_LOSS: result.loss,
            metrics.LEARNING_RATE: self.optimizer.param_groups[0]["lr"],
            metrics.GRAD_NORM: grad_norm,
            **observed,
        }
        if self.scale.enabled:
            values |= {metrics.LOSS_SCALE: self.scale.scale, metrics.OVERFLOWS: self.scale.overflows}
        if len(self.sampler.sources) > 1:
            values["ledger"] = dict(state.ledger)
        return StepFacts(state.step, last, self.model, self.ema, values)

    def _samples(self, shape: StepSamples) -> NDArray[np.int64]:
        """This process's samples of a step, moved past what is left out."""
        everyone = np.arange(shape.first, shape.first + shape.count, dtype=np.int64)
        return self.ranks.share(skip(everyone, self.state.skipped))

    def _multiplier(self) -> float:
        horizon, settings = self.horizon, self.settings
        return lr_multiplier(
            self.state.step,
            schedule=settings.schedule,
            warmup=settings.warmup,
            horizon=FAR if horizon.open else horizon.steps,
            decay=horizon.decay,
            floor=settings.lr_floor,
            cycle=settings.cycle,
        )

    def _gradients(self, batch: Batch, shape: StepSamples) -> tuple[StepResult, float]:
        """Loss and gradients; smaller micro-batches when memory runs out, a smaller loss scale on overflow."""
        while True:
            try:
                result = accumulate(
                    self.model,
                    batch,
                    micro_batch_size=self.state.micro_batch_size,
                    precision=self.settings.precision,
                    numerator=self.numerator,
                    seq_len=shape.seq_len,
                    loss_scale=self.scale.scale,
                    ranks=self.ranks,
                )
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                if not _is_out_of_memory(error):
                    raise
                self._halve_micro_batch(error)
                continue
            grad_norm = float(
                clip_gradients(self.model.parameters(), self.settings.clip, self.settings.grad_clip)
            )
            if not math.isfinite(grad_norm) and math.isfinite(result.loss) and self.scale.overflowed():
                self._event("overflow", f"gradients overflow in fp16; loss scale {self.scale.scale:g}")
                self.optimizer.zero_grad(set_to_none=True)
                continue
            return result, grad_norm

    def _halve_micro_batch(self, error: BaseException) -> None:
        self.model.zero_grad(set_to_none=True)
        size = self.state.micro_batch_size
        if size == 1:
            raise PreflightError(
                "out of memory with a micro-batch of one sequence",
                hint="use a smaller model (model.size=...) or tokens.seq_len=...",
            ) from error
        self._event("out_of_memory", f"micro-batch {size} -> {size // 2} sequences; the global batch stays")
        self.state.micro_batch_size = size // 2

    # --- the guard's acts ---

    def _goes_on(self, verdict: Verdict, batch: Batch, shape: StepSamples) -> bool:
        """Record the verdict and act on it; True: take the step all the same."""
        policy = self.settings.guard.policy
        found = blame(
            self.model,
            batch,
            self.sampler,
            micro_batch_size=self.state.micro_batch_size,
            seq_len=shape.seq_len,
            precision=self.settings.precision,
            non_finite=verdict.kind == "non_finite",
            describe=self.describe,
            ranks=self.ranks,
        )
        first = int(self._global_first(shape))
        act = "skip" if policy == "warn" and verdict.kind == "non_finite" else policy
        text = event_text(str(verdict), found)
        self._event(verdict.kind, text, act=act, value=verdict.value, limit=verdict.limit, first_sample=first,
                    samples=shape.count, **found)  # fmt: skip
        if act == "warn":
            return True
        self.optimizer.zero_grad(set_to_none=True)
        if self.guard.reject() or act == "stop":
            step = self.state.step
            self._give_up(
                f"{text} at step {step + 1}; weights are unchanged since step {step}",
                _advice(found, self.guard.rejected),
            )
        if act == "rewind":
            self._rewind(shape)
        else:
            self.state.skipped.append([first, shape.count])
        return False

    def _rewind(self, shape: StepSamples) -> None:
        """Back to the newest checkpoint before the batches that are left out; the decision is saved with it."""
        at, rejected = self.state.step, self.guard.rejected
        rewinds = self.state.rewinds + 1 if at <= self.state.rewound_from else 1
        farthest = max(at, self.state.rewound_from)
        if rewinds > self.settings.guard.patience:
            self._give_up(
                f"{rewinds - 1} rewinds did not get past step {farthest + 1}",
                "it is not the data: lower train.learning_rate or lengthen train.warmup_fraction",
            )
        oldest = max(0, at - self.settings.guard.rewind_steps + 1)
        self.saver.wait()
        self.ranks.gather(None)  # nobody looks before rank 0 has written
        before = [c for c in complete_checkpoints(self.folder) if checkpoint_step(c) <= oldest]
        before = before or complete_checkpoints(self.folder)[:1]
        if not before:
            self._give_up(
                f"no checkpoint to rewind to at step {at + 1}",
                "lower train.learning_rate or train.checkpoint_every",
            )
        start = max(oldest, checkpoint_step(before[-1]))
        first = int(self._global_first(self.settings.steps.at(start)))
        count = int(self._global_first(shape)) + shape.count - first
        skipped = leave_out(self.state.skipped, first, count)
        self._load(before[-1])
        self.state.skipped, self.guard.rejected = skipped, rejected
        self.state.rewinds, self.state.rewound_from = rewinds, farthest
        self.log.reopen_after(self.state.step)
        self._event(
            "rewound",
            f"from step {at} to step {self.state.step}; samples {first} to {first + count - 1} left out",
        )
        self.save()

    def _give_up(self, what: str, hint: str) -> NoReturn:
        self.close()
        raise DivergedError(what, where="pretrain", hint=hint)

    def _global_first(self, shape: StepSamples) -> int:
        return skip(np.array([shape.first]), self.state.skipped)[0]

    # --- bookkeeping ---

    def _event(self, kind: str, text: str, **facts: Any) -> None:
        if self.ranks.rank == 0:
            self.on_event({"step": self.state.step + 1, "kind": kind, "text": text, **facts})

    def _count_sources(self, batch: Batch) -> None:
        owners = self.sampler.source_of(batch.sample_ids.numpy())
        counts = batch.loss_mask.sum(1).tolist()
        mine = [0] * len(self.sampler.sources)
        for owner, count in zip(owners.tolist(), counts, strict=True):
            mine[owner] += count
        for name, tokens in zip(self.sampler.sources, self.ranks.sum(mine), strict=True):
            self.state.ledger[name] = self.state.ledger.get(name, 0) + int(tokens)

    def _speed(self, seconds: float, waited: float) -> dict[str, float]:
        shape = self.settings.steps.at(self.state.step - 1)
        rate = shape.count * self.settings.steps.seq_len / seconds
        values = {
            metrics.TOKENS_PER_SECOND: round(rate, 1),
            metrics.DATA_WAIT: round(waited / seconds, 4),
            metrics.RSS_GIB: round(self.process.memory_info().rss / 2**30, 4),
        }
        if self.peak_flops:
            used = self.model.shape.flops_per_token(shape.seq_len) * rate
            values[metrics.MFU] = round(used / self.peak_flops, 4)
        return values

    def _mean_times(self) -> list[float]:
        """Training time and seconds a step, means over the processes, so that they decide alike."""
        total = self.ranks.sum([self.clock.seconds(), self.clock.step_seconds()])
        return [seconds / self.ranks.size for seconds in total]

    def save(self) -> None:
        """Write a checkpoint of this moment (rank 0; all processes hold the same)."""
        self.state.seconds = self.clock.seconds()
        self.state.guard, self.state.loss_scale = self.guard.state(), self.scale.state()
        if self.ranks.rank == 0:
            average = self.ema.tensors() if self.ema is not None else None
            copy = self.settings.background_checkpoints
            snapshot = take_snapshot(
                self.model, self.optimizer, asdict(self.state), average=average, copy=copy
            )
            self.saver.save(self.state.step, snapshot)

    def _load(self, checkpoint: Path) -> None:
        for name, value in load_state(checkpoint).items():
            setattr(self.state, name, value)
        # The smaller of what memory allowed before and what is asked for now.
        self.state.micro_batch_size = min(self.state.micro_batch_size, self.settings.micro_batch_size)
        self.guard.load(self.state.guard)
        self.scale = LossScale(**self.state.loss_scale) if self.scale.enabled else self.scale
        load_model(checkpoint, self.model)
        load_optimizer(checkpoint, self.model, self.optimizer)
        if self.ema is not None:
            load_by_name(checkpoint, AVERAGE, self.ema.tensors())

    def close(self) -> None:
        """Wait for the last write; nothing stays open."""
        self.saver.wait()
        self.log.close()


FAR = 1 << 62  # a last step that has not been decided


def compiled_numerator(model: Decoder, how: str) -> Numerator:
    """The loss as one compiled graph (`model`), with compiled blocks (`blocks`), or as it is (`off`).

    Parameter names stay what they are in every case.
    """
    if how == "model":
        return torch.compile(causal_numerator)
    if how == "blocks":
        for block in model.blocks:
            block.compile()
    return causal_numerator


def _advice(found: dict[str, Any], rejected: int) -> str:
    if found["cause"] == "data":
        return "look at these documents; train.guard.policy=skip leaves such batches out"
    again = f"{rejected} steps in a row were rejected, so it is not one batch: " if rejected > 1 else ""
    return (
        again + "lower train.learning_rate, lengthen train.warmup_fraction, or set train.guard.policy=rewind"
    )


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in text
