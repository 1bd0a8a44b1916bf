"""Horizontal bars as plain SVG: grouped (who needs fewer bits?), stacked (where did the time go?). Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TypeGuard

from lavra.report.charts import Formatter, nice_ticks, tick_text

WIDTH, MARGIN = 400.0, 2.0
BAR, GAP, HEADING = 12.0, 3.0, 19.0
VALUE_SPACE = 46.0  # right of the longest bar
LONGEST_NAME = 44  # characters of a heading


def grouped_bars(
    groups: Sequence[tuple[str, Sequence[float | None]]],
    names: Sequence[str],
    *,
    label: str,
    format_value: Formatter = tick_text,
) -> str:
    """One bar a name in each group, all on one scale from zero; a value that is not there has no bar.

    Args:
        groups: heading and one value a name.
        names: of the bars, in the order of the values; bar `i` has palette entry `i + 1`.
        label: what the chart shows, for readers that cannot see it.
        format_value: text of a value.
    """
    longest = max((v for _, values in groups for v in values if _drawable(v)), default=1.0) or 1.0
    parts, y = _keys(names), HEADING
    for heading, values in groups:
        parts.append(f'<text class="heading" x="{MARGIN:g}" y="{y + 13:g}">{escape(_cut(heading))}</text>')
        y += HEADING
        for i, (name, value) in enumerate(zip(names, values, strict=True)):
            if _drawable(value):
                parts.append(_bar(i + 1, y, value / longest, f"{heading}, {name}", format_value(value)))
                y += BAR + GAP
        y += 5
    return _svg(parts, y, label)


def stacked_bars(
    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]],
    colours: Sequence[str],
    *,
    label: str,
    format_value: Formatter,
    limit: tuple[str, float] | None = None,
) -> str:
    """One bar a row, its parts end to end on a shared scale from zero.

    Args:
        rows: heading and (part name, value) in order.
        colours: part names in palette order.
        label: what the chart shows, for readers that cannot see it.
        format_value: text of a value.
        limit: name and value of a vertical line, such as the budget.
    """
    totals = [sum(v for _, v in parts if _drawable(v)) for _, parts in rows]
    longest = max([*totals, limit[1] if limit else 0.0, 1e-9])
    scale = (WIDTH - 2 * MARGIN) / longest
    parts, y = [], 0.0
    for (heading, values), total in zip(rows, totals, strict=True):
        parts.append(
            f'<text class="heading" x="{MARGIN:g}" y="{y + 13:g}">{escape(_cut(heading))}'
            f'<tspan class="value" dx="6">{escape(format_value(total))}</tspan></text>'
        )
        y += HEADING
        parts += _segments(values, colours, y, scale, format_value)
        y += 2 * BAR + 6
    bottom = y
    if limit:
        x = min(MARGIN + limit[1] * scale, WIDTH - 1)
        text = f"{limit[0]}: {format_value(limit[1])}"
        parts.append(
            f'<g class="marker"><line x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{bottom:g}"/>'
            f"<title>{escape(text)}</title></g>"
        )
    for tick in nice_ticks(0, longest, 5):
        anchor = "start" if tick == 0 else "middle" if MARGIN + tick * scale < WIDTH - 20 else "end"
        parts.append(
            f'<text class="tick" x="{MARGIN + tick * scale:.1f}" y="{bottom + 10:g}" text-anchor="{anchor}">'
            f"{escape(format_value(tick) if tick else '0')}</text>"
        )
    return _svg(parts, bottom + 16, label)


def _drawable(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value) and value >= 0


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_NAME else text[: LONGEST_NAME - 1] + "…"


def _keys(names: Sequence[str]) -> list[str]:
    parts, x = [], MARGIN
    for i, name in enumerate(names):
        parts.append(
            f'<rect class="bar s{i + 1}" x="{x:.1f}" y="3" width="10" height="10" rx="2"/>'
            f'<text class="key" x="{x + 15:.1f}" y="12">{escape(name)}</text>'
        )
        x += 15 + 6.3 * len(name) + 16
    return parts


def _bar(colour: int, y: float, share: float, name: str, value: str) -> str:
    width = max(share * (WIDTH - MARGIN - VALUE_SPACE), 1.0)
    return (
        f'<rect class="bar s{colour}" x="{MARGIN:g}" y="{y:g}" width="{width:.1f}" height="{BAR:g}" rx="2">'
        f"<title>{escape(f'{name}: {value}')}</title></rect>"
        f'<text class="value" x="{MARGIN + width + 5:.1f}" y="{y + 10:g}">{escape(value)}</text>'
    )


def _segments(
    values: Sequence[tuple[str, float]],
    colours: Sequence[str],
    y: float,
    scale: float,
    format_value: Formatter,
) -> list[str]:
    parts, x = [], MARGIN
    for name, value in values:
        if not _drawable(value):
            continue
        colour = colours.index(name) % 8 + 1
        width = value * scale
        parts.append(
            f'<rect class="bar s{colour}" x="{x:.1f}" y="{y:g}" width="{max(width - 0.8, 0.6):.1f}" '
            f'height="{2 * BAR - 4:g}"><title>{escape(f"{name}: {format_value(value)}")}</title></rect>'
        )
        x += width
    return parts


def _svg(parts: Sequence[str], height: float, label: str) -> str:
    body = "".join(parts)
    name = escape(label)
    return f'<svg class="bars" viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{name}">{body}</svg>'
