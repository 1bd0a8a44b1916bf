"""When training ends: given in steps, or by time and then fixed once."""

from __future__ import annotations

import time
from dataclasses import dataclass


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


class Clock:
    """Seconds in training over all attempts, and the typical time from one step to the next."""

    def __init__(self, before: float, steps_before: int) -> None:
        self._before, self._before_a_step = before, before / max(steps_before, 1)
        self._start = time.perf_counter()
        self._first_step_end: float | None = None
        self._steps_since = 0

    def seconds(self) -> float:
        """Training time so far."""
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
