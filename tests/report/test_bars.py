"""Bars: lengths by closed form, absent values, escaping."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from lavra.report.bars import MARGIN, VALUE_SPACE, WIDTH, grouped_bars, stacked_bars


def rectangles(svg: str, colour: int) -> list[ET.Element]:
    """The bars of one palette entry that carry a value (keys have none)."""
    found = ET.fromstring(svg).iter("rect")
    return [r for r in found if r.get("class") == f"bar s{colour}" and r.find("title") is not None]


def width(bar: ET.Element) -> float:
    return float(bar.get("width", ""))


def test_grouped_bars_are_as_long_as_their_share_of_the_longest() -> None:
    svg = grouped_bars([("code", [1.0, 2.0]), ("prose", [0.5, None])], ["a", "b"], label="bits")
    full = WIDTH - MARGIN - VALUE_SPACE
    assert [width(bar) for bar in rectangles(svg, 1)] == pytest.approx([full / 2, full / 4], abs=0.06)
    assert [width(bar) for bar in rectangles(svg, 2)] == pytest.approx([full], abs=0.06)


def test_stacked_bars_share_one_scale_with_the_limit() -> None:
    rows = [("predicted", [("a", 10.0), ("b", 30.0)]), ("measured", [("a", 20.0)])]
    svg = stacked_bars(rows, ["a", "b"], label="", format_value=str, limit=("budget", 80.0))
    scale = (WIDTH - 2 * MARGIN) / 80
    assert [width(bar) for bar in rectangles(svg, 1)] == pytest.approx(
        [10 * scale - 0.8, 20 * scale - 0.8], abs=0.06
    )
    (second,) = rectangles(svg, 2)
    assert float(second.get("x", "")) == pytest.approx(MARGIN + 10 * scale, abs=0.06)
    assert "budget: 80.0" in svg


def test_names_are_escaped_and_values_that_are_not_finite_left_out() -> None:
    svg = grouped_bars([("<b>", [float("nan"), 1.0])], ["<i>", "x"], label='"<u>')
    ET.fromstring(svg)
    assert "nan" not in svg and "<b>" not in svg and "<i>" not in svg


def test_all_zero_or_nothing_is_still_a_drawing() -> None:
    ET.fromstring(grouped_bars([("a", [0.0])], ["b"], label=""))
    ET.fromstring(grouped_bars([], ["b"], label=""))
    ET.fromstring(stacked_bars([("a", [("b", 0.0)])], ["b"], label="", format_value=str))
