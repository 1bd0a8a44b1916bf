"""Training: curves over the tokens read, and the events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lavra import metrics as m
from lavra.report.charts import Level, Marker, Series, line_chart, tick_text
from lavra.report.quantities import number, quantity
from lavra.report.run import Run, part
from lavra.report.samples import spread
from lavra.report.tables import Table
from lavra.train.diagnosis.history import layer_metric, look_up, mapping

Log = list[dict[str, Any]]
MAX_MARKERS = 30  # in one chart
PALETTE = 8  # colours that are told apart
_ABSENT = object()  # not recorded, where None is a value that was not finite
QUIET_EVENTS = {
    "checkpoint",
    "sample",
    "evaluate",
    "start",
    "finish",
}  # in the table, but no mark in the charts


@dataclass(frozen=True)
class Chart:
    """A figure: caption, unit, and its drawings on linear and (if it makes sense) logarithmic axes."""

    title: str
    unit: str
    linear: str
    log: str = ""
    large: bool = False


def view(run: Run) -> dict[str, Any]:
    """Context of the section "Training"."""
    log, events = run.records("metrics.jsonl"), run.records("events.jsonl")
    if not log:
        return {**run.missing("metrics.jsonl", "pretrain"), "events": event_table(events)}
    marks = markers(events, log)
    return {
        "charts": charts(run, log, marks),
        "layers": layer_charts(log, marks),
        "events": event_table(events),
    }


def charts(run: Run, log: Log, marks: list[Marker]) -> list[Chart]:
    """All figures that have data."""
    predicted, results = (
        part(run.facts("plan.json"), "predictions"),
        part(run.facts("eval/results.json"), "total"),
    )
    loss = [series(log, m.TRAIN_LOSS, "train", 1), series(log, m.VALIDATION_LOSS, "validation", 2, dots=True)]
    bpb = [series(log, m.VALIDATION_BPB, "validation", 2, dots=True)]
    loss_levels = levels([("predicted", predicted.get("final_loss"), 8)])
    bpb_levels = levels([("predicted", predicted.get("final_bpb"), 8), ("xz -9e", results.get("xz"), 3)])
    found = [
        figure("Loss", "nats per token", loss, marks, loss_levels, log=True, large=True),
        figure("Bits per byte", "validation text", bpb, marks, bpb_levels, log=True, large=True),
        figure("Learning rate", "", [series(log, m.LEARNING_RATE, "learning rate", 1)], [], zero=True),
        figure("Gradient norm", "unclipped", [series(log, m.GRAD_NORM, "norm", 4)], marks, log=True),
        figure(
            "Speed", "tokens per second", [series(log, m.TOKENS_PER_SECOND, "speed", 5)], marks, zero=True
        ),
        figure("Utilisation", "of measured ceiling", [series(log, m.MFU, "MFU", 5)], [], zero=True, y=_share),
        figure(
            "Waiting for data",
            "share of time",
            [series(log, m.DATA_WAIT, "wait", 6)],
            [],
            zero=True,
            y=_share,
        ),
        figure("Memory", "GiB resident", [series(log, m.RSS_GIB, "memory", 3)], [], zero=True),
    ]
    return [chart for chart in found if chart]


def layer_charts(log: Log, marks: list[Marker]) -> list[Chart]:
    """Statistics of the layers, those of a deep model thinned out to what the palette tells apart."""
    named = [
        ("grad_norm", "Gradient norm by layer", "after clipping"),
        ("update_ratio", "Update ratio by layer", "change / weights, one step"),
        ("activation_rms", "Activations by layer", "RMS of the residual stream"),
        ("attention_logit", "Attention logits by layer", "largest"),
    ]
    found = [
        figure(title, unit, layer_series(log, value), marks, log=True, large=True)
        for value, title, unit in named
    ]
    return [chart for chart in found if chart]


def layer_series(log: Log, value: str) -> list[Series]:
    """One curve a layer, in the order of the model."""
    seen = {name: None for r in log for name, facts in part(r, "layers").items() if value in mapping(facts)}
    return [
        series(log, layer_metric(name, value), name, colour)
        for colour, name in enumerate(spread(list(seen), PALETTE), 1)
    ]


def figure(
    title: str,
    unit: str,
    curves: list[Series],
    marks: list[Marker],
    levels: list[Level] | None = None,
    *,
    log: bool = False,
    large: bool = False,
    zero: bool = False,
    y: Callable[[float], str] = tick_text,
) -> Chart | None:
    """One figure over tokens, or None without data."""
    curves = [curve for curve in curves if any(value is not None for _, value in curve.points)]
    if not curves:
        return None

    def draw(logarithmic: bool) -> str:
        return line_chart(
            curves,
            label=f"{title} ({unit}) over tokens read" if unit else f"{title} over tokens read",
            x_label="tokens read",
            levels=levels or (),
            markers=marks[:MAX_MARKERS],
            x_log=logarithmic,
            y_log=logarithmic,
            y_zero=zero,
            format_y=y,
        )

    return Chart(title, unit, draw(False), draw(True) if log else "", large)


def series(log: Log, name: str, label: str, colour: int, *, dots: bool = False) -> Series:
    """A metric (as `History.series` reads it) over tokens; a recorded null stays a gap."""
    points = [
        (x, number(y))
        for r in log
        if (y := look_up(r, name, _ABSENT)) is not _ABSENT and (x := number(r.get("tokens"))) is not None
    ]
    return Series(label, points, colour, dots)


def levels(named: list[tuple[str, Any, int]]) -> list[Level]:
    """Dashed lines for the numbers that exist."""
    return [Level(name, y, colour) for name, value, colour in named if (y := number(value)) is not None]


def markers(events: Log, log: Log) -> list[Marker]:
    """Noteworthy events at the tokens of their step."""
    steps = sorted(
        (s, t) for r in log if (s := number(r.get("step"))) is not None and (t := number(r.get("tokens")))
    )
    if not steps:
        return []
    loud = [e for e in events if str(e.get("kind")) not in QUIET_EVENTS and number(e.get("step")) is not None]
    return [
        Marker(tokens_at(steps, float(e["step"])), f"{e.get('kind', '')}: {e.get('text', '')}"[:200])
        for e in loud
    ]


def tokens_at(steps: list[tuple[float, float]], step: float) -> float:
    """Tokens read at `step`, on the line between the recorded steps around it."""
    before = max((s for s in steps if s[0] <= step), default=(0.0, 0.0))
    after = min((s for s in steps if s[0] >= step), default=before)
    if after[0] == before[0]:
        return after[1]
    return before[1] + (step - before[0]) / (after[0] - before[0]) * (after[1] - before[1])


def event_table(events: Log) -> Table | None:
    """All events, the last first rows of a long list left out."""
    shown = events[:200]
    rows = [[quantity("step", e.get("step")), str(e.get("kind", "")), _text(e)] for e in shown]
    return (
        Table(["step", "event", "what happened"], rows, left_out=len(events) - len(shown)) if rows else None
    )


def _text(event: Mapping[str, Any]) -> str:
    if "text" in event:
        return str(event["text"])
    return quantity("", {k: v for k, v in event.items() if k not in ("step", "kind", "time", "tokens")})


def _share(value: float) -> str:
    return f"{100 * value:.3g}%"
