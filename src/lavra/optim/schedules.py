"""Learning-rate multipliers as pure functions of the step; nothing to save, nothing to resume."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["wsd", "cosine"]


def lr_multiplier(
    step: int, *, schedule: Schedule, warmup: int, horizon: int, decay: int, floor: float = 0.0
) -> float:
    """Multiplier in (0, 1] for optimizer step `step` = 0 .. horizon-1.

    Warm-up is linear and starts at 1/warmup, so the first step is not wasted; the last step gets the
    smallest value exactly once. `wsd`: constant, then linear decay to `floor` over the last `decay`
    steps (Hu et al. 2024), so the horizon may still be chosen while the constant part runs.
    `cosine`: half a cosine from the end of warm-up to `floor` (Hoffmann et al. 2022, B).
    With `floor` 0 the decay ends one step's worth above 0, as a step with learning rate 0 would learn nothing.
    """
    if step < warmup:
        return (step + 1) / warmup
    length = decay if schedule == "wsd" else horizon - warmup
    remaining = (horizon - step) / (length + 1)  # 1/(length+1) at the last step
    if remaining >= 1:
        return 1.0
    shape = remaining if schedule == "wsd" else 0.5 * (1 - math.cos(math.pi * remaining))
    return floor + (1 - floor) * max(shape, 0.0)
