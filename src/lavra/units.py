"""Human units in both directions: counts (10M), durations (5m, 2h), bytes (40GiB)."""

from __future__ import annotations

import math
import re
from decimal import Decimal

_COUNT = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_SECONDS = {"": 1.0, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("", 1000), ("b", 1000), ("ib", 1024))
}
_NUMBER_UNIT = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_count(value: object) -> int:
    """`"10M"` -> 10_000_000; k, M, B (or G), T; plain numbers and `1e9` pass.

    Raises:
        ValueError: not a whole number, negative, or the unit is unknown.
    """
    number = _parse(value, _COUNT, kind="count", example="10M")
    if not number.is_integer():
        raise ValueError(f"{value!r} is not a whole number")
    return int(number)


def parse_seconds(value: object) -> float:
    """`"5m"` -> 300.0 seconds; s, m (or min), h, d, and sums such as `1h30m`.

    Raises:
        ValueError: negative, empty, or the unit is unknown.
    """
    if isinstance(value, str) and (parts := re.findall(r"[0-9.]+[A-Za-z]+", value)) and len(parts) > 1:
        if "".join(parts) != value.strip():
            raise ValueError(f"{value!r} is not a duration; write for example 1h30m")
        return sum(parse_seconds(part) for part in parts)
    return _parse(value, _SECONDS, kind="duration", example="5m or 2h")


def parse_bytes(value: object) -> int:
    """`"40GiB"` -> bytes; kB, MB, GB, TB are powers of 1000; KiB, MiB, GiB, TiB powers of 1024.

    Raises:
        ValueError: negative or the unit is unknown.
    """
    return int(_parse(value, _BYTES, kind="size", example="40GiB"))


def _parse(value: object, units: dict[str, float] | dict[str, int], *, kind: str, example: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{value!r} is not a {kind}; write for example {example}")
    if isinstance(value, (int, float)):
        number = float(value)
    else:
        match = _NUMBER_UNIT.fullmatch(value)
        if not match or match[2].lower() not in units:
            raise ValueError(f"{value!r} is not a {kind}; write for example {example}")
        number = float(
            Decimal(match[1].replace("_", "")) * Decimal(units[match[2].lower()])
        )  # 64.9M is whole
    if number < 0 or not math.isfinite(number):
        raise ValueError(f"{value!r} is not a {kind}: it must be finite and not negative")
    return round(number, 9)


def format_count(number: float) -> str:
    """1234567 -> `1.23M`; below 1000 the plain number."""
    for suffix, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= 0.9995 * scale:  # 999,600 rounds to 1M, not to 1000k
            return f"{number / scale:.3g}{suffix}"
    return f"{number:.3g}"


def format_seconds(seconds: float) -> str:
    """3725 -> `1h02m`; 75 -> `1m15s`; 0.0123 -> `12ms`."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f}ms"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 48 * 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole / 86400:.1f}d"


def format_bytes(count: float) -> str:
    """1536 -> `1.5 KiB` (powers of 1024)."""
    for suffix in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or suffix == "TiB":
            return f"{count:.0f} B" if suffix == "B" else f"{count:.1f} {suffix}"
        count /= 1024
    raise AssertionError("unreachable")
