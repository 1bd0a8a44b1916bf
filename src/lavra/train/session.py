"""What training moves, saved and restored as one: weights, moments, average, guard, loss scale, counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from lavra.checkpoint.store import (
    AVERAGE,
    Saver,
    finish_replacing,
    latest_checkpoint,
    load_by_name,
    load_model,
    load_optimizer,
    load_state,
    take_snapshot,
)
from lavra.errors import DivergedError
from lavra.metrics import MetricsLog
from lavra.model.decoder import Decoder
from lavra.optim.build import build_optimizer
from lavra.parallel.ranks import Ranks
from lavra.train.ema import Ema
from lavra.train.guard import Guard
from lavra.train.horizon import Clock
from lavra.train.precision import LossScale
from lavra.train.state import TrainSettings, TrainState

OnEvent = Callable[[dict[str, Any]], None]


class Session:
    """A model in training, from its newest complete checkpoint on.

    Attributes:
        folder: its checkpoints.
        ranks: the data-parallel processes; all hold the same session, the first one writes it.
    """

    def __init__(self, model: Decoder, settings: TrainSettings, run_dir: Path, on_event: OnEvent) -> None:
        self.model, self.settings, self.on_event = model, settings, on_event
        self.folder = run_dir / "checkpoints"
        self.ranks = Ranks.current()
        self.optimizer = build_optimizer(model, settings.optimizer)
        self.ema = Ema(model, settings.ema_decay) if settings.ema_decay else None
        self.guard = Guard(settings.guard)
        self.scale = LossScale(settings.precision == "fp16")
        self.state = TrainState(micro_batch_size=settings.micro_batch_size)
        finish_replacing(self.folder)
        if (checkpoint := latest_checkpoint(self.folder)) is not None:
            self.load(checkpoint)
        self.log = MetricsLog(run_dir / "metrics.jsonl", after=self.state.step, mute=self.ranks.rank > 0)
        self.saver = Saver(
            self.folder,
            keep=settings.keep_checkpoints,
            keep_every=settings.keep_every,
            background=settings.background_checkpoints,
        )
        self.clock = Clock(self.state.seconds, self.state.step)

    def event(self, kind: str, text: str, **facts: Any) -> None:
        """Tell what happened at the step in progress, once over all processes."""
        if self.ranks.rank == 0:
            self.on_event({"step": self.state.step + 1, "kind": kind, "text": text, **facts})

    def save(self) -> None:
        """Write a checkpoint of this moment."""
        self.state.seconds = self.clock.seconds()
        self.state.guard, self.state.loss_scale = self.guard.state(), self.scale.state()
        if self.ranks.rank == 0:
            average = self.ema.tensors() if self.ema is not None else None
            copy = self.settings.background_checkpoints
            snapshot = take_snapshot(
                self.model, self.optimizer, asdict(self.state), average=average, copy=copy
            )
            self.saver.save(self.state.step, snapshot)

    def load(self, checkpoint: Path) -> None:
        """Be what a checkpoint holds."""
        for name, value in load_state(checkpoint).items():
            setattr(self.state, name, value)
        # The smaller of what memory allowed before and what is asked for now.
        self.state.micro_batch_size = min(self.state.micro_batch_size, self.settings.micro_batch_size)
        self.guard.load(self.state.guard)
        self.scale = LossScale(**self.state.loss_scale) if self.scale.enabled else self.scale
        load_model(checkpoint, self.model)
        load_optimizer(checkpoint, self.model, self.optimizer)
        if self.ema is not None and (checkpoint / AVERAGE).exists():
            load_by_name(checkpoint, AVERAGE, self.ema.tensors())
        elif self.ema is not None:  # asked for since then
            self.ema.restart()

    def give_up(self, what: str, hint: str) -> NoReturn:
        """End the run; weights and records stay as they are.

        Raises:
            DivergedError: always.
        """
        self.close()
        raise DivergedError(what, where="pretrain", hint=hint)

    def close(self) -> None:
        """Wait for the last write; nothing stays open."""
        self.saver.wait()
        self.log.close()
