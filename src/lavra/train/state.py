"""What a training run is made of: its decisions, what resume needs, and what those who watch it see."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from lavra.batch import Batch
from lavra.metrics import VALIDATION_LOSS
from lavra.model.decoder import Decoder
from lavra.optim.build import OptimizerSettings
from lavra.optim.config import ClipKind
from lavra.optim.schedules import Schedule
from lavra.tokens.ramps import StepPlan
from lavra.train.config import GuardConfig
from lavra.train.ema import Ema


@dataclass(frozen=True)
class TrainSettings:
    """Decisions of one training run; frozen in plan.json."""

    steps: StepPlan
    micro_batch_size: int
    optimizer: OptimizerSettings
    schedule: Schedule
    warmup: int
    clip: ClipKind
    grad_clip: float
    precision: str
    compile: str  # off, blocks, model
    checkpoint_every: float  # seconds
    keep_checkpoints: int
    log_every: int
    guard: GuardConfig
    cycle: int = 0  # steps, of a cyclic schedule
    lr_floor: float = 0.0
    ema_decay: float = 0.0  # 0: no average is kept
    keep_every: int = 0
    background_checkpoints: bool = False


@dataclass
class TrainState:
    """Everything that resume needs besides weights, average and optimizer moments.

    Attributes:
        tokens: targets trained on.
        seconds: time in training, over all attempts.
        skipped: sample ranges left out, in the order of the decisions.
        rewinds: how often training went back without getting past `rewound_from` since.
        rewound_from: the farthest step that was rejected by a rewind.
        ledger: tokens trained on by source.
        guard: see `Guard.state`.
        loss_scale: see `LossScale.state`.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    micro_batch_size: int = 0
    skipped: list[list[int]] = field(default_factory=list)
    rewinds: int = 0
    rewound_from: int = 0
    ledger: dict[str, int] = field(default_factory=dict)
    guard: dict[str, Any] = field(default_factory=dict)
    loss_scale: dict[str, Any] = field(default_factory=dict)


@dataclass
class StepFacts:
    """What callbacks see after each optimizer step.

    Attributes:
        metrics: the record that metrics.jsonl gets.
        sample: text that the model wrote at this step, if a callback had it write.
    """

    step: int
    last: bool
    model: Decoder
    ema: Ema | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    sample: str = ""

    def logged(self, every: int) -> bool:
        """Whether the step is written down: every so many, the last, and those with measurements that are rare."""
        rare = VALIDATION_LOSS in self.metrics or "layers" in self.metrics
        return self.step % every == 0 or self.last or rare


class Callback(Protocol):
    """Called after every optimizer step; may add to `facts.metrics` before they are written."""

    def __call__(self, facts: StepFacts) -> None:
        """Look at a step that was just taken."""


class Observer(Protocol):
    """Looks at gradients and weights around the optimizer's move, at the steps it chooses."""

    def before(self, step: int, model: Decoder, batch: Batch) -> None:
        """Gradients are there, clipped; the optimizer has not moved. `batch`: this process's part of the step."""

    def after(self, step: int, model: Decoder) -> dict[str, Any]:
        """The optimizer moved; what goes into the metrics."""
