"""What a cause answers, and what several causes measure by. No torch.

A false alarm is worse than silence. Thresholds are the published ones where there are any; where it says "lavra's
own", they lie well outside of what healthy runs showed (docs/lab-log.md).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lavra.train.diagnosis.history import History, Point

Severity = Literal["stopped the run", "harmful", "worth trying"]
SEVERITIES: tuple[Severity, ...] = ("stopped the run", "harmful", "worth trying")


@dataclass(frozen=True)
class Finding:
    """Something that went wrong or could go better.

    Attributes:
        kind: stable name of the cause, for programs.
        title: the cause in a few words.
        evidence: the numbers and steps that show it.
        advice: what to do.
        overrides: the same as settings of the recipe, e.g. `train.learning_rate=3e-4`.
        metrics: series that show it, as `History.series` reads them.
    """

    kind: str
    severity: Severity
    title: str
    evidence: str
    advice: str
    overrides: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotRecorded:
    """The records cannot tell."""

    why: str


Answer = Finding | NotRecorded | None
NO_LAYERS = NotRecorded("no statistics of the layers were recorded (train.layers_every)")
MOST_LOGIT = 100.0  # Kimi K2 clips queries and keys there (Kimi Team 2025, arXiv:2507.20534)
DIVERGING_LOGIT = 1e4  # about where runs of Wortsman et al. 2023 (arXiv:2309.14322) diverged
MOST_ACTIVATION = 100.0  # RMS of the residual stream; healthy runs stayed below 13 (lavra's own)


# --- shared ---


def lower_rate(h: History) -> str:
    """A third of the peak."""
    return f"train.learning_rate={(h.peak or 1e-3) / 3:.2g}"


def median_over_blocks(h: History, value: str) -> list[Point]:
    """Median over the blocks at each step that was looked at."""
    by_step: dict[int, list[float]] = {}
    for points in h.blocks(value).values():
        for step, v in points:
            by_step.setdefault(step, []).append(v)
    return [(step, statistics.median(values)) for step, values in sorted(by_step.items())]


def lately(points: Sequence[Point]) -> float:
    """Median of the last three; 0 of none."""
    return statistics.median([v for _, v in points][-3:]) if points else 0.0


def largest_lately(h: History, value: str) -> tuple[str, float]:
    """The block with the largest recent value; ("", 0) where nothing was recorded."""
    found = [(lately(points), name) for name, points in h.blocks(value).items()]
    level, name = max(found, key=lambda pair: pair[0], default=(0.0, ""))
    return name, level


def steps(count: int) -> str:
    """`1 step`, `3 steps`."""
    return f"{count} step{'' if count == 1 else 's'}"
