"""Line charts: places by closed form, ticks, gaps, downsampling."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lavra.report import charts
from lavra.report.charts import (
    Level,
    Marker,
    Point,
    Scale,
    Series,
    downsample,
    line_chart,
    log_ticks,
    nice_ticks,
)

LEFT, RIGHT = charts.LEFT, charts.WIDTH - charts.RIGHT
BASE = charts.HEIGHT - charts.BOTTOM


def draw(*series: Series, **options: object) -> ET.Element:
    """The chart as a parsed tree, so every test also proves that it is well-formed."""
    return ET.fromstring(line_chart(series, label="a chart", x_label="tokens", **options))  # type: ignore[arg-type]


def curve(svg: ET.Element, number: int = 0) -> list[tuple[float, float]]:
    """Coordinates of a curve's path."""
    path = [p for p in svg.iter("path") if "curve" in p.get("class", "")][number].get("d", "")
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([-0-9.]+),([-0-9.]+)", path)]


def test_a_linear_scale_is_the_line_through_both_ends() -> None:
    scale = Scale(2, 6, 100, 300)
    assert [scale(2), scale(3), scale(6)] == [100, 150, 300]


def test_a_log_scale_puts_the_geometric_mean_in_the_middle() -> None:
    assert Scale(1, 100, 0, 80, log=True)(10) == pytest.approx(40)


def test_known_points_have_the_places_of_the_closed_form() -> None:
    points = curve(draw(Series("loss", [(0, 0), (50, 5), (100, 10)])))
    # y has a margin of 5 % of the range on both sides: [-0.5, 10.5] from the base to the top.
    height = BASE - charts.TOP
    expected = [
        (x, BASE - height * share)
        for x, share in ((LEFT, 0.5 / 11), ((LEFT + RIGHT) / 2, 0.5), (RIGHT, 10.5 / 11))
    ]
    assert points == [(pytest.approx(x, abs=0.06), pytest.approx(y, abs=0.06)) for x, y in expected]


def test_known_points_on_logarithmic_axes() -> None:
    points = curve(draw(Series("loss", [(1, 1), (10, 10), (100, 100)]), x_log=True, y_log=True))
    xs, ys = zip(*points, strict=True)
    assert xs == pytest.approx((LEFT, (LEFT + RIGHT) / 2, RIGHT), abs=0.06)
    assert ys[1] == pytest.approx((ys[0] + ys[2]) / 2, abs=0.06)
    assert ys[1] == pytest.approx((BASE + charts.TOP) / 2, abs=0.06)


def test_y_zero_puts_zero_on_the_base_line() -> None:
    assert curve(draw(Series("speed", [(0, 0), (1, 8)]), y_zero=True))[0] == (LEFT, BASE)


def test_the_horizontal_axis_counts_from_zero() -> None:
    assert curve(draw(Series("loss", [(50, 1), (100, 2)])))[0][0] == pytest.approx((LEFT + RIGHT) / 2)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0.1, 0.52, [0.1, 0.2, 0.3, 0.4, 0.5]),
        (3, 3, [3]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_nice_ticks(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high) == pytest.approx(ticks)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e12))
def test_nice_ticks_are_few_inside_and_equally_spaced(low: float, length: float) -> None:
    high = low + length
    ticks = nice_ticks(low, high)
    assert len(ticks) <= 10
    assert all(low - 1e-6 * length <= tick <= high + 1e-6 * length for tick in ticks)
    assert len({round((b - a) / length, 6) for a, b in pairwise(ticks)}) <= 1


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(1, 1000, [1, 10, 100, 1000]), (0.9, 11, [1, 2, 5, 10]), (1.9, 6.1, [2, 3, 4, 5, 6])],
)
def test_log_ticks(low: float, high: float, ticks: list[float]) -> None:
    assert log_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize("y", [None, math.nan, math.inf])
def test_a_value_that_is_not_finite_is_a_gap(y: float | None) -> None:
    svg = line_chart([Series("a", [(0, 1), (1, y), (2, 3), (3, 3)])], label="", x_label="")
    assert len(re.findall("M", re.findall(r'curve s1" d="([^"]+)', svg)[0])) == 2
    assert "nan" not in svg.lower() and "inf" not in svg.lower()


@pytest.mark.parametrize("points", [[], [(0, None)], [(0, 0.0)], [(5, 2.0)], [(1, -3.0), (2, -3.0)]])
@pytest.mark.parametrize("log", [False, True])
def test_degenerate_data_still_make_a_chart(points: list[tuple[float, float | None]], log: bool) -> None:
    svg = line_chart(
        [Series("a", points)], label="", x_label="", x_log=log, y_log=log, levels=[Level("b", 0)]
    )
    ET.fromstring(svg)
    assert "nan" not in svg.lower() and "inf" not in svg.lower()


def test_names_are_escaped() -> None:
    svg = line_chart(
        [Series("<b>", [(0, 1), (1, 2)])],
        label='"<i>',
        x_label="<u>",
        levels=[Level("<s>", 1)],
        markers=[Marker(0.5, "<q>")],
    )
    ET.fromstring(svg)
    assert not re.search(r"<(b|i|u|s|q)>", svg)


def test_a_marker_stands_at_its_x_and_one_outside_is_left_out() -> None:
    svg = draw(Series("a", [(0, 1), (10, 2)]), markers=[Marker(5, "here"), Marker(11, "outside")])
    (marker,) = (g for g in svg.iter("g") if g.get("class") == "marker")
    assert float(marker[0].get("x1", "")) == pytest.approx((LEFT + RIGHT) / 2, abs=0.06)
    assert [title.text for title in marker.iter("title")] == ["here"]


def test_several_curves_and_levels_are_named_in_the_legend() -> None:
    series = [Series("train", [(0, 1), (1, 2)], 1), Series("validation", [(0, 1), (1, 3)], 2)]
    svg = draw(*series, levels=[Level("predicted", 1.5)])
    assert [t.text for t in svg.iter("text") if t.get("class") == "key"] == [
        "train",
        "validation",
        "predicted",
    ]


def test_a_long_series_is_drawn_with_at_most_400_points_and_keeps_its_spikes() -> None:
    points = [(float(x), 1.0) for x in range(10_000)]
    points[4321], points[7777] = (4321.0, 9.0), (7777.0, -9.0)
    drawn = curve(draw(Series("a", points)))
    assert len(drawn) <= charts.MAX_POINTS
    heights = [y for _, y in drawn]
    assert (min(heights), max(heights)) == (
        pytest.approx(charts.TOP + 8.5, abs=0.5),
        pytest.approx(BASE - 8.5, abs=0.5),
    )


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(6, 40))
def test_downsampling_keeps_ends_and_extremes(values: list[float], limit: int) -> None:
    points = [Point(float(i), y, i, y) for i, y in enumerate(values)]
    kept = downsample(points, limit)
    assert len(kept) <= max(limit, 2)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert (min(p.py for p in kept), max(p.py for p in kept)) == (min(values), max(values))
    assert [p.px for p in kept] == sorted(p.px for p in kept)
