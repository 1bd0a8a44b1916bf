"""Judge every step before the optimizer moves (law 5).

Loss and gradient norm are those of the global step, already summed over all processes, so every process reaches the
same verdict. The window holds what was accepted and nothing else: a spike that was caught cannot widen the limits for
the next one. Its state is part of the checkpoint, so a resumed run judges as the uninterrupted one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lavra.train.config import GuardConfig

Kind = Literal["non_finite", "loss_spike", "grad_spike"]

CHUNK = 32  # accepted steps whose trend does not matter
_NORMAL = 1.4826  # MAD x this = standard deviation of a normal distribution


@dataclass(frozen=True)
class Verdict:
    """Why a step should not be taken.

    Attributes:
        kind: what is wrong.
        value: loss in nats per target, or gradient norm.
        limit: what was allowed.
    """

    kind: Kind
    value: float
    limit: float

    def __str__(self) -> str:
        name = {"non_finite": "not finite", "loss_spike": "loss", "grad_spike": "gradient norm"}[self.kind]
        return f"{name}: {self.value:.4g}, limit {self.limit:.4g}"


@dataclass
class Guard:
    """Robust window over accepted steps.

    Attributes:
        losses: nats per target of the newest accepted steps.
        log_norms: natural logarithms of their gradient norms.
        rejected: steps rejected since the last accepted one.
    """

    config: GuardConfig
    losses: list[float] = field(default_factory=list)
    log_norms: list[float] = field(default_factory=list)
    rejected: int = 0

    def judge(self, loss: float, grad_norm: float) -> Verdict | None:
        """None: the step may be taken. Only non-finite values are judged until 16 steps were accepted."""
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            return Verdict("non_finite", loss if not math.isfinite(loss) else grad_norm, math.inf)
        if len(self.losses) < 16:
            return None
        limit = trend_limit(self.losses, self.config.loss_sigmas, floor=0.02)
        if loss > limit:
            return Verdict("loss_spike", loss, limit)
        limit = math.exp(robust_limit(self.log_norms, self.config.grad_sigmas, floor=0.1))
        if grad_norm > limit:
            return Verdict("grad_spike", grad_norm, limit)
        return None

    def usual_loss(self) -> float | None:
        """Nats per target of a step as they are now; None before any was accepted."""
        return statistics.median(self.losses[-CHUNK:]) if self.losses else None

    def accept(self, loss: float, grad_norm: float) -> None:
        """The step was taken, and not under a warning."""
        self.rejected = 0
        self.losses = [*self.losses, loss][-self.config.window :]
        self.log_norms = [*self.log_norms, math.log(max(grad_norm, 1e-30))][-self.config.window :]

    def reject(self) -> bool:
        """A step was not taken; True when that was once too often."""
        self.rejected += 1
        return self.rejected >= self.config.patience

    def state(self) -> dict[str, Any]:
        """JSON-able state for the checkpoint."""
        return {"losses": self.losses, "log_norms": self.log_norms, "rejected": self.rejected}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.losses, self.log_norms = list(state["losses"]), list(state["log_norms"])
        self.rejected = int(state["rejected"])


def trend_limit(values: Sequence[float], sigmas: float, *, floor: float) -> float:
    """The limit for the value that follows: `robust_limit` of a series that falls.

    The middle is that of the newest `CHUNK` values, and the spread that of all around the middle of their own chunk:
    early in training a loss falls by more in the window than its noise, which must not pass for noise.
    """
    ends = range(len(values), CHUNK // 2 - 1, -CHUNK)  # a chunk of less than half its length is left out
    chunks = [values[max(0, end - CHUNK) : end] for end in ends] or [values]
    residuals = [x - middle for chunk in chunks for middle in [statistics.median(chunk)] for x in chunk]
    return statistics.median(chunks[0]) + sigmas * max(robust_deviation(residuals), floor)


def robust_limit(values: Sequence[float], sigmas: float, *, floor: float) -> float:
    """Median + sigmas x robust standard deviation, the latter at least `floor` (flat values forbid nothing)."""
    middle = statistics.median(values)
    return middle + sigmas * max(robust_deviation([x - middle for x in values]), floor)


def robust_deviation(residuals: Sequence[float]) -> float:
    """Standard deviation of normal residuals, from their median size: few large ones do not move it."""
    return _NORMAL * statistics.median(abs(x) for x in residuals)
