"""Oracle: exact decimal arithmetic; what is printed can be typed again."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lavra.units import format_bytes, format_count, format_seconds, parse_bytes, parse_count, parse_seconds


@given(thousandths=st.integers(0, 10**6), unit=st.sampled_from(["k", "M", "B", "T"]))
def test_decimal_counts_mean_exactly_what_they_say(thousandths: int, unit: str) -> None:
    scale = {"k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}[unit]
    text = f"{thousandths // 1000}.{thousandths % 1000:03d}{unit}"
    assert parse_count(text) == Fraction(thousandths, 1000) * scale


@given(st.integers(0, 10**15))
def test_a_count_as_printed_can_be_typed_and_is_within_half_a_percent(count: int) -> None:
    assert parse_count(format_count(count)) == pytest.approx(count, rel=0.0051)


@pytest.mark.parametrize("text", ["1.5", "0.0001k", "-1", "3 apples", "", "1e400", True, None])
def test_what_is_no_whole_count_is_refused(text: object) -> None:
    with pytest.raises(ValueError):
        parse_count(text)


def test_durations_and_sizes_follow_their_units() -> None:
    seconds = {"5m": 300, "1h30m": 5400, "2d": 172_800, "90": 90, "0.5h": 1800, "10s": 10}
    assert {text: parse_seconds(text) for text in seconds} == seconds
    assert parse_bytes("40GB") == 40 * 10**9  # not GiB
    sizes = {"40GiB": 40 << 30, "1.5kB": 1500, "2 MB": 2_000_000, "3": 3, "1k": 1000}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    assert (format_seconds(3725), format_seconds(75), format_seconds(0.0123)) == ("1h02m", "1m15s", "12ms")
    assert (format_bytes(1536), format_bytes(12)) == ("1.5 KiB", "12 B")


@given(st.floats(0, 1e7))
def test_a_duration_as_printed_can_be_typed_and_is_within_six_percent(seconds: float) -> None:
    text = format_seconds(seconds)
    if not text.endswith("ms"):
        assert parse_seconds(text) == pytest.approx(seconds, rel=0.06)


@given(st.integers(0, 1 << 50))
def test_a_size_as_printed_can_be_typed_and_is_within_five_percent(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.051)


@given(st.integers(0, 99), st.integers(0, 59), st.integers(0, 59))
def test_a_sum_of_durations_is_the_sum_of_its_parts(hours: int, minutes: int, seconds: int) -> None:
    assert parse_seconds(f"{hours}h{minutes}m{seconds}s") == 3600 * hours + 60 * minutes + seconds


@pytest.mark.parametrize("text", ["1h 30", "h", "1h-30m", "1x", "-5m", "1e999h", "1.2.3s", False, [1], ""])
def test_what_is_no_duration_is_refused_with_an_example(text: object) -> None:
    with pytest.raises(ValueError, match=r"5m|1h30m|finite"):
        parse_seconds(text)


@pytest.mark.parametrize("text", ["40 GiBs", "1Zb", "-1", True, None, "GiB", float("nan")])
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError):
        parse_bytes(text)


def test_published_forms_of_counts() -> None:
    forms = {"10M": 10**7, "1.3B": 1_300_000_000, "2G": 2 * 10**9, "1e9": 10**9, "10_000": 10**4, "3 k": 3000}
    assert {text: parse_count(text) for text in forms} == forms
    assert (parse_count(7), parse_count(7.0)) == (7, 7)
    assert [format_count(n) for n in (999, 1_234_567, 999_600, 10**12)] == ["999", "1.23M", "1M", "1T"]
