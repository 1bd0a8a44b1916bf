"""Numbers with their units, chosen by the name of the quantity: `peak_memory_bytes` -> `1.2 GiB`. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from lavra.metrics import number
from lavra.units import format_bytes, format_count, format_seconds

ABSENT = "–"
_WORDS = {"flops": "compute", "final_bpb": "final bits per byte"}
MAX_CELL = 400  # characters


def bits_per_byte(value: float) -> str:
    """1.8642 -> `1.864 bits/byte`."""
    return f"{value:.3f} bits/byte"


def percent(value: float) -> str:
    """0.382 -> `38.2 %`."""
    return f"{100 * value:.1f} %"


def flops(value: float) -> str:
    """1.2e15 -> `1.20 PFLOP`."""
    for prefix, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {prefix}FLOP"
    return f"{value:.0f} FLOP"


# The first rule whose test accepts the name decides; the order matters (`bytes_per_token` before `bytes`).
_RULES: tuple[tuple[Callable[[str], bool], Callable[[float], str]], ...] = (
    (lambda n: n.endswith(("bytes_per_token", "bytes_per_tok")), lambda v: f"{v:.2f} bytes/token"),
    (lambda n: n.endswith(("tokens_per_second", "tok_per_s")), lambda v: f"{format_count(v)} tokens/s"),
    (lambda n: n.endswith(("bpb", "bits_per_byte")), bits_per_byte),
    (lambda n: n.endswith("loss"), lambda v: f"{v:.3f} nats/token"),
    (lambda n: "gflops" in n, lambda v: f"{v:,.0f} GFLOP/s"),
    (lambda n: n.endswith("flops"), flops),
    (lambda n: n.endswith("gib"), lambda v: f"{v:.2f} GiB"),
    (lambda n: n.endswith("bytes"), format_bytes),
    (lambda n: n.endswith(("seconds", "duration")), format_seconds),
    (lambda n: n.endswith(("fraction", "mfu", "share", "frac")), percent),
    (
        lambda n: n.endswith(("parameters", "tokens")),
        lambda v: format_count(v) if v >= 10_000 else f"{v:,.0f}",
    ),
)


def quantity(name: str, value: Any) -> str:
    """Text of any JSON value; numbers get the unit that `name` says."""
    if value is None or value == "":
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return _cut(value)
    if isinstance(value, Mapping):
        return _cut(_parts(name, value)) or ABSENT
    if isinstance(value, (list, tuple)):
        return _cut(", ".join(quantity(name, v) for v in value)) or ABSENT
    finite = number(value)
    if finite is None:
        return "not finite" if isinstance(value, (int, float)) else _cut(json.dumps(value, default=str))
    rule = _rule(name)
    return rule(finite) if rule else plain(finite)


def _rule(name: str) -> Callable[[float], str] | None:
    name = name.lower().removesuffix("_by_kind")
    return next((show for accepts, show in _RULES if accepts(name)), None)


def _parts(name: str, value: Mapping[str, Any]) -> str:
    """`{"documents": 3, "bytes": 2048}` -> `3 · 2.0 KiB`; any other object as `name: value, ...`."""
    if set(value) == {"documents", "bytes"}:
        return f"{quantity('documents', value['documents'])} · {quantity('bytes', value['bytes'])}"
    return ", ".join(f"{words(k)}: {quantity(k if _rule(str(k)) else name, v)}" for k, v in value.items())


def plain(value: float) -> str:
    """1234567.0 -> `1,234,567`; 0.00012 -> `0.00012`."""
    return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.4g}"


def difference(predicted: Any, measured: Any) -> float | None:
    """(measured - predicted) / predicted, or None."""
    expected, seen = number(predicted), number(measured)
    return None if not expected or seen is None else (seen - expected) / abs(expected)


def signed_percent(share: float | None) -> str:
    """0.123 -> `+12.3 %`."""
    return ABSENT if share is None else f"{100 * share:+.1f} %".replace("-", "−")


def words(name: str) -> str:
    """`sampled_out` -> `sampled out`; a unit that the value shows anyway is left out."""
    text = _WORDS.get(str(name), str(name))
    for unit, instead in (("_bytes", ""), ("_seconds", "_time")):
        if text.endswith(unit):
            text = text.removesuffix(unit) + instead
    return text.replace("gemm_gflops", "measured_ceiling").replace("_", " ")


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CELL else text[: MAX_CELL - 1] + "…"
