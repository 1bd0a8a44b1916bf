"""Line charts as plain SVG: data series in, one SVG string out. Pure; colours come from the style sheet.

Coordinates are SVG user units; `x` and `y` alone are data values, `px` and `py` are positions on the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from lavra.units import format_count

WIDTH, HEIGHT = 400.0, 230.0
LEFT, RIGHT, TOP, BOTTOM = 48.0, 12.0, 10.0, 34.0
LEGEND_ROW = 17.0
MAX_POINTS = 400  # drawn in one series
MAX_DOTS = 60  # more would be a smear
CHARACTER_WIDTH = 6.3  # of the 11-unit system font, for the legend's layout

Formatter = Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """One named curve; a `None` or non-finite y is a gap. `colour` picks the palette entry (1 to 8)."""

    name: str
    points: Sequence[tuple[float, float | None]]
    colour: int = 1
    dots: bool = False


@dataclass(frozen=True)
class Level:
    """A dashed horizontal line: a prediction or a baseline."""

    name: str
    y: float
    colour: int = 8


@dataclass(frozen=True)
class Marker:
    """A vertical line at an event."""

    x: float
    text: str


@dataclass(frozen=True)
class Scale:
    """Data values to positions along one axis."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Position of `value`; `low` maps to `start` and `high` to `end`."""
        value, low, high = (
            map(math.log, (value, self.low, self.high)) if self.log else (value, self.low, self.high)
        )
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def accepts(self, value: float | None) -> bool:
        """Whether `value` has a position at all."""
        return value is not None and math.isfinite(value) and (value > 0 or not self.log)


@dataclass(frozen=True)
class Point:
    """A data point in its place; `part` counts the gaps before it."""

    px: float
    py: float
    x: float
    y: float
    part: int = 0


# --- arithmetic ---------------------------------------------------------------------------------


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` multiples of 1, 2 or 5 times a power of ten inside `[low, high]`."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    # The borders are the geometric means of neighbours, so the count is as near as it can be.
    step = power * next(
        m for m, border in ((1, 2), (2, 10), (5, 50), (10, math.inf)) if (raw / power) ** 2 <= border
    )
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.15g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten inside `[low, high]`; with few of them also 2 and 5; in a short range nice ones."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 2, 5)):
        ticks = [
            m * 10.0**d for d in decades for m in steps if low <= m * 10.0**d * 1.0000001 <= high * 1.000001
        ]
        if len(ticks) >= 3:
            return ticks[:: math.ceil(len(ticks) / 7)]
    return nice_ticks(low, high, 4)


def tick_text(value: float) -> str:
    """Short text of an axis value: `2M`, `0.25`, `3e-5`."""
    if abs(value) >= 1000:
        return format_count(value)
    return f"{value:.4g}".replace("e-0", "e-").replace("e+0", "e")


def fit_scale(
    values: Iterable[float | None], start: float, end: float, *, log: bool, pad: float = 0.0
) -> Scale:
    """A scale over all usable `values`, widened by `pad` of its length on both sides, never empty."""
    usable = [v for v in values if v is not None and math.isfinite(v) and (v > 0 or not log)]
    low, high = (min(usable), max(usable)) if usable else (1.0, 10.0)
    if log:
        if low == high:
            low, high = low / 2, high * 2
        margin = (high / low) ** pad
        return Scale(low / margin, high * margin, start, end, log=True)
    if low == high:
        low, high = low - (abs(low) / 2 or 1.0), high + (abs(high) / 2 or 1.0)
    margin = (high - low) * pad
    return Scale(low - margin, high + margin, start, end)


def place(points: Iterable[tuple[float, float | None]], x_scale: Scale, y_scale: Scale) -> list[Point]:
    """Points in their places, sorted by x; what cannot be drawn starts a new part."""
    placed, part = [], 0
    for x, y in sorted(points, key=lambda point: point[0]):
        if y is None or not y_scale.accepts(y) or not x_scale.accepts(x):
            part += 1
        else:
            placed.append(Point(x_scale(x), y_scale(y), x, y, part))
    return placed


def downsample(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` points: both ends, and the lowest and highest of each of equally wide columns."""
    if len(points) <= limit:
        return list(points)
    first, *inner, last = points
    columns = (limit - 2) // 2
    width = (last.px - first.px) / columns or 1.0
    extremes: dict[int, tuple[int, int]] = {}
    for i, point in enumerate(inner):
        column = min(int((point.px - first.px) / width), columns - 1)
        low, high = extremes.get(column, (i, i))
        extremes[column] = (i if point.py > inner[low].py else low, i if point.py < inner[high].py else high)
    kept = sorted({i for pair in extremes.values() for i in pair})
    return [first, *(inner[i] for i in kept), last]


# --- drawing ------------------------------------------------------------------------------------


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    x_label: str,
    levels: Sequence[Level] = (),
    markers: Sequence[Marker] = (),
    x_log: bool = False,
    y_log: bool = False,
    y_zero: bool = False,
    format_y: Formatter = tick_text,
) -> str:
    """An SVG element with axes, legend, curves, dashed levels and event markers.

    Args:
        series: the curves, drawn in order, over a quantity that counts from zero.
        label: what the chart shows, for readers that cannot see it.
        x_label: name of the horizontal axis.
        levels: dashed horizontal lines.
        markers: vertical lines; those outside the data are left out.
        x_log: logarithmic horizontal axis; points at or below zero are left out.
        y_log: logarithmic vertical axis; likewise.
        y_zero: start the linear vertical axis at zero.
        format_y: text of a y value.
    """
    legend, top = _legend(series, levels)
    start = () if x_log else (0.0,)
    x_scale = fit_scale([*start, *(x for s in series for x, _ in s.points)], LEFT, WIDTH - RIGHT, log=x_log)
    heights = [y for s in series for _, y in s.points] + [level.y for level in levels]
    y_scale = fit_scale(heights, HEIGHT - BOTTOM, top, log=y_log, pad=0.05)
    if y_zero and not y_log:
        y_scale = Scale(0.0, y_scale.high if y_scale.high > 0 else 1.0, y_scale.start, y_scale.end)
    parts = [
        *_y_axis(y_scale, format_y),
        *_x_axis(x_scale, x_label),
        *(_marker(marker, x_scale, top) for marker in markers if _inside(marker.x, x_scale)),
        *(_level(level, y_scale, format_y) for level in levels if y_scale.accepts(level.y)),
        *(_curve(s, x_scale, y_scale, format_y) for s in series),
        *legend,
    ]
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(label)}" '
        f'data-top="{top:g}" data-bottom="{HEIGHT - BOTTOM:g}">{"".join(parts)}</svg>'
    )


def _inside(x: float, scale: Scale) -> bool:
    return scale.accepts(x) and scale.low <= x <= scale.high


def _tick(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _y_axis(scale: Scale, format_y: Formatter) -> list[str]:
    ticks = log_ticks(scale.low, scale.high) if scale.log else nice_ticks(scale.low, scale.high)
    return [
        f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{scale(t):.1f}" y2="{scale(t):.1f}"/>'
        + _tick(LEFT - 6, scale(t) + 3.5, "end", format_y(t))
        for t in ticks
    ]


def _x_axis(scale: Scale, label: str) -> list[str]:
    ticks = log_ticks(scale.low, scale.high) if scale.log else nice_ticks(scale.low, scale.high, 4)
    base = HEIGHT - BOTTOM
    texts = [
        f'<line class="axis" x1="{scale(t):.1f}" x2="{scale(t):.1f}" y1="{base:g}" y2="{base + 4:g}"/>'
        + _tick(scale(t), base + 16, "middle", tick_text(t))
        for t in ticks
    ]
    return [
        f'<line class="axis" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{base:g}" y2="{base:g}"/>',
        *texts,
        _tick(WIDTH - RIGHT, HEIGHT - 4, "end", label),
    ]


def _legend(series: Sequence[Series], levels: Sequence[Level]) -> tuple[list[str], float]:
    """Legend rows and the top of the plot below them; one lonely curve needs none."""
    entries = [(s.name, s.colour, "") for s in series] + [(lv.name, lv.colour, " dashed") for lv in levels]
    if len(entries) < 2:
        return [], TOP
    parts, x, y = [], LEFT, TOP + 4
    for name, colour, style in entries:
        width = 18 + CHARACTER_WIDTH * len(name) + 14
        if x > LEFT and x + width > WIDTH:
            x, y = LEFT, y + LEGEND_ROW
        parts.append(
            f'<line class="curve s{colour}{style}" x1="{x:.1f}" x2="{x + 13:.1f}" y1="{y:g}" y2="{y:g}"/>'
            f'<text class="key" x="{x + 18:.1f}" y="{y + 3.5:g}">{escape(name)}</text>'
        )
        x += width
    return parts, y + 14


def _curve(series: Series, x_scale: Scale, y_scale: Scale, format_y: Formatter) -> str:
    placed = place(series.points, x_scale, y_scale)
    if not placed:
        return ""
    drawn = downsample(placed)
    path = "".join(
        f"{'L' if i and drawn[i - 1].part == p.part else 'M'}{p.px:.1f},{p.py:.1f}"
        for i, p in enumerate(drawn)
    )
    hover = ";".join(f"{p.px:.1f}|{tick_text(p.x)}|{p.py:.1f}|{format_y(p.y)}" for p in drawn)
    last = f"{series.name}: {format_y(placed[-1].y)} at {tick_text(placed[-1].x)}"
    dots = "".join(
        f'<circle class="dot s{series.colour}" cx="{p.px:.1f}" cy="{p.py:.1f}" r="2.4">'
        f"<title>{escape(f'{series.name}: {format_y(p.y)} at {tick_text(p.x)}')}</title></circle>"
        for p in drawn
        if len(drawn) == 1 or (series.dots and len(drawn) <= MAX_DOTS)
    )
    return (
        f'<g data-name="{escape(series.name)}" data-points="{escape(hover)}">'
        f'<path class="curve s{series.colour}" d="{path}"><title>{escape(last)}</title></path>{dots}</g>'
    )


def _level(level: Level, scale: Scale, format_y: Formatter) -> str:
    y = f"{scale(level.y):.1f}"
    return (
        f'<line class="curve s{level.colour} dashed" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y}" y2="{y}">'
        f"<title>{escape(f'{level.name}: {format_y(level.y)}')}</title></line>"
    )


def _marker(marker: Marker, scale: Scale, top: float) -> str:
    x = scale(marker.x)
    return (
        f'<g class="marker"><line x1="{x:.1f}" x2="{x:.1f}" y1="{top:g}" y2="{HEIGHT - BOTTOM:g}"/>'
        f'<path d="M{x - 4:.1f},{top - 4:g}h8l-4,6z"/><title>{escape(marker.text)}</title></g>'
    )
