"""A training run as its own records tell it: series by name, losses that rose, steps that were rejected. No torch.

Records and events may be incomplete or odd in form: what cannot be read is left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lavra import metrics as m
from lavra.metrics import number
from lavra.train.guard import robust_deviation

Point = tuple[int, float]  # step, value
REJECTIONS = ("non_finite", "loss_spike", "grad_spike")  # kinds of events
_RISE_SIGMAS = 6.0  # as the guard's loss_sigmas
_SMALLEST_RISE = 0.1  # nats; lavra's own


@dataclass(frozen=True)
class Rise:
    """The smoothed loss went up.

    Attributes:
        start: step of the best loss before.
        top: step of the highest loss after.
        height: nats from the one to the other.
        recovered: step at which the loss was as low again; None: it never was.
    """

    start: int
    top: int
    height: float
    recovered: int | None


@dataclass(frozen=True)
class History:
    """What a run left behind.

    Attributes:
        records: of metrics.jsonl, by step.
        events: of events.jsonl, in the order they were written.
        plan: content of plan.json.
        recipe: content of recipe.resolved.yaml.
        source_tokens: training tokens of each source, once through.
        diverged: whether the guard ended the run.
    """

    records: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]] = ()
    plan: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    source_tokens: Mapping[str, int] = field(default_factory=dict)
    diverged: bool = False

    @cached_property
    def _ordered(self) -> list[tuple[int, Mapping[str, Any]]]:
        found = [(int(step), r) for r in self.records if (step := number(r.get("step"))) is not None]
        return sorted(found, key=lambda pair: pair[0])

    # --- series ---

    def series(self, name: str) -> list[Point]:
        """A metric by step; `layers/blocks.3/grad_norm` is one of a layer. Only finite values."""
        if name not in self._series:
            found = ((step, number(look_up(record, name))) for step, record in self._ordered)
            self._series[name] = [(step, value) for step, value in found if value is not None]
        return self._series[name]

    @cached_property
    def _series(self) -> dict[str, list[Point]]:
        """Those read so far: causes ask for the same ones."""
        return {}

    def blocks(self, value: str) -> dict[str, list[Point]]:
        """A statistic of every block by name, `blocks.0` first; empty where none was recorded."""
        names = {n for _, r in self._ordered for n in mapping(r.get("layers")) if n.startswith("blocks.")}
        ordered = sorted(names, key=lambda n: (len(n), n))
        found = {name: self.series(layer_metric(name, value)) for name in ordered}
        return {name: points for name, points in found.items() if points}

    @property
    def last_step(self) -> int:
        """Newest recorded step; 0 without records."""
        return self._ordered[-1][0] if self._ordered else 0

    # --- decisions ---

    def decided(self, name: str) -> float | None:
        """A number among the plan's decisions."""
        return number(mapping(self.plan.get("decisions")).get(name))

    def setting(self, path: str) -> Any:
        """A setting of the recipe, e.g. `train.guard.policy`; None where the recipe is not known."""
        value: Any = self.recipe
        for key in path.split("."):
            value = mapping(value).get(key)
        return value

    @property
    def horizon(self) -> int | None:
        """The last step of the plan."""
        steps = number(mapping(self.plan.get("horizon")).get("steps"))
        return int(steps) if steps else None

    @property
    def warmup(self) -> int:
        """Steps of warm-up."""
        return int(self.decided("warmup_steps") or 0)

    @cached_property
    def peak(self) -> float | None:
        """The largest learning rate that was or will be."""
        seen = [rate for _, rate in self.series(m.LEARNING_RATE)]
        planned = self.decided("learning_rate")
        return max([*seen, *([planned] if planned else [])], default=None)

    def rate_at(self, step: int) -> float | None:
        """Learning rate recorded at `step` or last before it; the first one for what is earlier."""
        rates = self.series(m.LEARNING_RATE)
        before = [rate for at, rate in rates if at <= step]
        return before[-1] if before else rates[0][1] if rates else None

    def at_full_rate(self, points: Iterable[Point]) -> list[Point]:
        """Those after the warm-up whose learning rate was at least half the peak."""
        rates, peak = dict(self.series(m.LEARNING_RATE)), self.peak or 0.0
        return [(s, v) for s, v in points if s > self.warmup and rates.get(s, 0.0) >= peak / 2]

    # --- what happened ---

    @property
    def rejections(self) -> list[Mapping[str, Any]]:
        """Events of the guard with a step."""
        return [e for e in self.events if e.get("kind") in REJECTIONS and number(e.get("step")) is not None]

    @cached_property
    def rises(self) -> list[Rise]:
        """Every rise of the smoothed training loss that is larger than its noise, in order."""
        return rises(self.series(m.TRAIN_LOSS))


def rises(points: Sequence[Point]) -> list[Rise]:
    """Rises of a series smoothed by a running median; at least six standard deviations of that median."""
    width = min(31, max(9, len(points) // 15)) | 1
    smooth = _running_median([value for _, value in points], width)
    if len(points) < 2 * width:
        return []
    rest = [value - level for (_, value), level in zip(points, smooth, strict=True)]
    quarter = -(-len(rest) // 4)  # losses scatter more the further a model is; the noisiest quarter counts
    parts = [rest[i : i + quarter] for i in range(0, len(rest), quarter)]
    noise = max(robust_deviation([v - statistics.median(part) for v in part]) for part in parts)
    # A median of n normal values scatters 1.2533 / sqrt(n) times as much as they do.
    least = max(_SMALLEST_RISE, _RISE_SIGMAS * 1.2533 * noise / math.sqrt(width))
    found: list[Rise] = []
    best, top, up = 0, 0, False
    for place, level in enumerate(smooth):
        if level <= smooth[best]:
            if up:
                found.append(_rise(points, smooth, best, top, place))
            best, top, up = place, place, False
        elif level > smooth[top]:
            top = place
            up = level - smooth[best] > least
    return [*found, _rise(points, smooth, best, top, None)] if up else found


def _rise(points: Sequence[Point], smooth: Sequence[float], best: int, top: int, end: int | None) -> Rise:
    recovered = None if end is None else points[end][0]
    return Rise(points[best][0], points[top][0], smooth[top] - smooth[best], recovered)


def _running_median(values: Sequence[float], width: int) -> list[float]:
    """Centred; at the ends over what is there."""
    half = width // 2
    return [statistics.median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def layer_metric(layer: str, value: str) -> str:
    """Name of a layer's statistic, as `History.series` reads it."""
    return f"layers/{layer}/{value}"


def look_up(record: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """A value of one record by the name of its series."""
    if not name.startswith("layers/"):
        return record.get(name, default)
    _, layer, value = name.split("/")
    return mapping(mapping(record.get("layers")).get(layer)).get(value, default)


def mapping(value: Any) -> Mapping[str, Any]:
    """`value` if it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}
