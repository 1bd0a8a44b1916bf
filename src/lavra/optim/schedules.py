"""Learning-rate multipliers as pure functions of the step; nothing to save, nothing to resume."""

from __future__ import annotations

import math
from typing import Literal, assert_never

Schedule = Literal["constant", "linear", "cosine", "wsd", "wsd_sqrt", "cyclic", "inverse_sqrt"]


def lr_multiplier(
    step: int,
    *,
    schedule: Schedule,
    warmup: int,
    horizon: int,
    decay: int,
    floor: float = 0.0,
    cycle: int = 0,
) -> float:
    """Multiplier of the peak learning rate at optimizer step `step` = 0 .. horizon-1, in (0, 1].

    Warm-up is linear and starts at 1/warmup, so the first step is not wasted. Then the multiplier is
    `floor + (1 - floor) * shape`:

    - `constant`: shape 1.
    - `linear`, `cosine`: a line, half a cosine (Hoffmann et al. 2022, B), from the end of warm-up.
    - `wsd`: 1, then a line over the last `decay` steps (Hu et al. 2024).
    - `wsd_sqrt`: 1, then 1 - sqrt(elapsed part of the decay) (Haegele et al. 2024).
    - `cyclic`: a triangle of `cycle` steps, down and up again, for ever (Smith 2017); odd: lowest twice.
    - `inverse_sqrt`: sqrt(warmup / (step + 1)), a warm-up of 0 counting as 1 (Vaswani et al. 2017, eq. 3).

    A decay has its smallest value at the last step, once: `floor` itself, or, where `floor` is 0, one
    notch above 0, as a step with learning rate 0 would learn nothing. At steps of `horizon` and beyond
    it stays at `floor`, never below.

    Raises:
        ValueError: `cyclic` with a `cycle` below 2.
    """
    if step < warmup:
        return (step + 1) / warmup
    notch = 1 if floor == 0 else 0
    match schedule:
        case "constant":
            shape = 1.0
        case "linear" | "cosine":
            left = _left(horizon - step - 1, horizon - warmup, notch)
            shape = left if schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))
        case "wsd":
            shape = _left(horizon - step - 1, decay, notch)
        case "wsd_sqrt":
            shape = 1 - math.sqrt(1 - _left(horizon - step - 1, decay, notch))
        case "cyclic":
            if cycle < 2:
                raise ValueError(f"a cycle of {cycle} steps; the cyclic schedule needs 2 or more")
            into = (step - warmup + 1) % cycle
            shape = 1 - min(into, cycle - into) / (cycle // 2 + notch)
        case "inverse_sqrt":
            shape = math.sqrt(max(warmup, 1) / (step + 1))
        case _:
            assert_never(schedule)
    return floor + (1 - floor) * shape


def horizon_free(schedule: Schedule) -> bool:
    """Whether the multiplier before the decay does not depend on the horizon, so that it may be fixed later."""
    return schedule not in ("linear", "cosine")


def _left(steps_after: int, length: int, notch: int) -> float:
    """The part of a decay of `length` steps that is left, 0 to 1, with `steps_after` steps after this one."""
    left = steps_after + notch
    if left >= length + notch:
        return 1.0
    return max(left, 0) / max(length + notch, 1)
