"""The training loop. What is not the loop is a callback or a pure function."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from lavra import metrics
from lavra.batch import Batch
from lavra.errors import PreflightError
from lavra.model.decoder import Decoder
from lavra.objective.causal import causal_numerator
from lavra.optim.build import set_learning_rate
from lavra.optim.clipping import clip_gradients
from lavra.optim.schedules import lr_multiplier
from lavra.tokens.loader import Loader
from lavra.tokens.ramps import StepSamples, skip
from lavra.tokens.sampler import DocumentSpan, Sampler
from lavra.train.blame import Describe
from lavra.train.horizon import Horizon
from lavra.train.recovery import recover
from lavra.train.session import OnEvent, Session
from lavra.train.signals import StopRequest
from lavra.train.state import Callback, Observer, StepFacts, TrainSettings, TrainState
from lavra.train.step import Numerator, StepResult, accumulate

FAR = 1 << 62  # a last step that has not been decided


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
    on_event: OnEvent = lambda event: None,
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
    session = Session(model, settings, run_dir, on_event)
    loop = _Loop(session, sampler, horizon, observer, describe, peak_flops)
    return loop.run(stop, callbacks, on_horizon)


class _Loop:
    """One call of `train`."""

    def __init__(
        self,
        session: Session,
        sampler: Sampler,
        horizon: Horizon,
        observer: Observer | None,
        describe: Describe,
        peak_flops: float | None,
    ) -> None:
        self.session, self.sampler, self.horizon = session, sampler, horizon
        self.observer, self.describe, self.peak_flops = observer, describe, peak_flops
        self.settings, self.state = session.settings, session.state
        self.numerator = compiled_numerator(session.model, self.settings.compile)
        self.process = psutil.Process()

    def run(
        self,
        stop: StopRequest,
        callbacks: Sequence[Callback],
        on_horizon: Callable[[Horizon, int], None],
    ) -> TrainState:
        """Step until the horizon is reached."""
        session, state, horizon, settings = self.session, self.state, self.horizon, self.settings
        saved_at, saved_step = session.clock.seconds(), state.step
        with Loader(self.sampler) as loader:
            while horizon.open or state.step < horizon.steps:
                if horizon.open and horizon.decide(state.step, *self._mean_times()):
                    on_horizon(horizon, state.step)
                    loader.forget()  # the mixture may change with the decay
                started = time.perf_counter()
                facts = self._step(loader)
                session.clock.tick()
                if facts is None:
                    continue
                facts.metrics |= self._speed(time.perf_counter() - started, loader.waited)
                for callback in callbacks:
                    callback(facts)
                if facts.logged(settings.log_every):
                    session.log.write(facts.metrics)
                kept_for_good = settings.keep_every and state.step % settings.keep_every == 0
                due = session.clock.seconds() - saved_at > settings.checkpoint_every
                wishes = [facts.last or kept_for_good or due, stop.signal is not None]
                save, leave = (wish > 0 for wish in session.ranks.sum(wishes))  # any process decides for all
                if save or leave:
                    session.save()
                    saved_at, saved_step = session.clock.seconds(), state.step
                if leave and not facts.last:
                    session.close()
                    raise stop.error(saved_step)
        session.close()
        return state

    def _step(self, loader: Loader) -> StepFacts | None:
        """One attempt at an optimizer step; None: it was rejected, and the next attempt reads other samples."""
        session, state, settings, observer = self.session, self.state, self.settings, self.observer
        model, optimizer = session.model, session.optimizer
        shape = settings.steps.at(state.step)
        batch = loader.get(self._samples(shape), self._samples(settings.steps.at(state.step + 1)))
        set_learning_rate(optimizer, self._multiplier())
        result, grad_norm = self._gradients(batch, shape)
        verdict = session.guard.judge(result.loss, grad_norm)
        if verdict is not None and not recover(session, self.sampler, verdict, batch, shape, self.describe):
            return None
        if observer is not None:
            observer.before(state.step + 1, model, batch)
        optimizer.step()
        observed = observer.after(state.step + 1, model) if observer is not None else {}
        optimizer.zero_grad(set_to_none=True)
        if verdict is None:
            session.guard.accept(result.loss, grad_norm)
        session.scale.stepped()
        if session.ema is not None:
            session.ema.update(state.step)
        state.step += 1
        state.tokens += result.targets
        self._count_sources(batch)
        last = not self.horizon.open and state.step >= self.horizon.steps
        values = {
            "step": state.step,
            "tokens": state.tokens,
            "time": round(session.clock.seconds(), 3),
            metrics.TRAIN_LOSS: result.loss,
            metrics.LEARNING_RATE: optimizer.param_groups[0]["lr"],
            metrics.GRAD_NORM: grad_norm,
            **observed,
        }
        if session.scale.enabled:
            values |= {metrics.LOSS_SCALE: session.scale.scale, metrics.OVERFLOWS: session.scale.overflows}
        if len(self.sampler.sources) > 1:
            values["ledger"] = dict(state.ledger)
        return StepFacts(state.step, last, model, session.ema, values)

    def _samples(self, shape: StepSamples) -> NDArray[np.int64]:
        """This process's samples of a step, moved past what is left out."""
        everyone = np.arange(shape.first, shape.first + shape.count, dtype=np.int64)
        return self.session.ranks.share(skip(everyone, self.state.skipped))

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
        session, settings = self.session, self.settings
        while True:
            try:
                result = accumulate(
                    session.model,
                    batch,
                    micro_batch_size=self.state.micro_batch_size,
                    precision=settings.precision,
                    numerator=self.numerator,
                    seq_len=shape.seq_len,
                    loss_scale=session.scale.scale,
                    ranks=session.ranks,
                )
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                if not _is_out_of_memory(error):
                    raise
                self._halve_micro_batch(error)
                continue
            grad_norm = float(clip_gradients(session.model.parameters(), settings.clip, settings.grad_clip))
            if not math.isfinite(grad_norm) and math.isfinite(result.loss) and session.scale.overflowed():
                session.event("overflow", f"gradients overflow in fp16; loss scale {session.scale.scale:g}")
                session.optimizer.zero_grad(set_to_none=True)
                continue
            return result, grad_norm

    def _halve_micro_batch(self, error: BaseException) -> None:
        self.session.model.zero_grad(set_to_none=True)
        size = self.state.micro_batch_size
        if size == 1:
            raise PreflightError(
                "out of memory with a micro-batch of one sequence",
                hint="use a smaller model (model.size=...) or tokens.seq_len=...",
            ) from error
        self.session.event(
            "out_of_memory", f"micro-batch {size} -> {size // 2} sequences; the global batch stays"
        )
        self.state.micro_batch_size = size // 2

    def _count_sources(self, batch: Batch) -> None:
        owners = self.sampler.source_of(batch.sample_ids.numpy())
        counts = batch.loss_mask.sum(1).tolist()
        mine = [0] * len(self.sampler.sources)
        for owner, count in zip(owners.tolist(), counts, strict=True):
            mine[owner] += count
        for name, tokens in zip(self.sampler.sources, self.session.ranks.sum(mine), strict=True):
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
            used = self.session.model.shape.flops_per_token(shape.seq_len) * rate
            values[metrics.MFU] = round(used / self.peak_flops, 4)
        return values

    def _mean_times(self) -> list[float]:
        """Training time and seconds a step, means over the processes, so that they decide alike."""
        clock, ranks = self.session.clock, self.session.ranks
        return [total / ranks.size for total in ranks.sum([clock.seconds(), clock.step_seconds()])]


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


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in text
