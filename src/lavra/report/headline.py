"""The top of the page: state, one sentence, the key numbers, the success criteria."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lavra.metrics import MFU, TOKENS_PER_SECOND, VALIDATION_BPB, VALIDATION_LOSS
from lavra.report.comparison import budget_text
from lavra.report.quantities import (
    bits_per_byte,
    difference,
    flops,
    number,
    percent,
    quantity,
    signed_percent,
    words,
)
from lavra.report.run import Run, part
from lavra.units import format_bytes, format_count, format_seconds


@dataclass(frozen=True)
class Card:
    """One key number: what it is, its value and unit, a line of context."""

    label: str
    value: str
    unit: str
    context: str = ""


@dataclass(frozen=True)
class Badge:
    """One success criterion and whether it was met; `None` is not judged."""

    stage: str
    criterion: str
    value: str
    passed: bool | None


@dataclass(frozen=True)
class Facts:
    """The few numbers that cards and sentence share; None is not known."""

    parameters: float | None
    tokens: float | None
    seconds: float | None
    loss: float | None
    bpb: float | None
    xz: float | None
    speed: float | None
    mfu: float | None
    memory: float | None
    flops: float | None


def view(run: Run) -> dict[str, Any]:
    """Context of the header."""
    facts = gather(run)
    status = run.facts("STATUS")
    return {
        "name": run.folder.resolve().name,
        "state": state(status),
        "status": [(words(k), quantity(k, v)) for k, v in status.items() if k not in ("state", "pid")],
        "story": story(facts),
        "cards": cards(facts, run.facts("plan.json")),
        "badges": badges(run.json("success.json")),
        "judged": run.json("success.json") is not None,
    }


def state(status: Mapping[str, Any]) -> str:
    """State of the run; the stage that writes this page is the last one, so a page that is read is complete."""
    if status.get("state") == "running" and status.get("stage") == "report":
        return "complete"
    return str(status.get("state", "no STATUS file"))


def gather(run: Run) -> Facts:
    """Measured values, from the most final file that has them."""
    measured, plan = run.facts("measured.json"), run.facts("plan.json")
    log, results = run.records("metrics.jsonl"), run.facts("eval/results.json")

    def first(*values: Any) -> float | None:
        return next((n for n in map(number, values) if n is not None), None)

    return Facts(
        parameters=first(measured.get("parameters"), part(plan, "decisions").get("parameters")),
        tokens=first(last(log, "tokens")),
        seconds=first(measured.get("wall_seconds"), last(log, "time")),
        loss=first(measured.get("final_loss"), last(log, VALIDATION_LOSS)),
        bpb=first(results.get("bits_per_byte"), measured.get("final_bpb"), last(log, VALIDATION_BPB)),
        xz=first(part(results, "total").get("xz")),
        speed=first(measured.get("tokens_per_second"), median(log, TOKENS_PER_SECOND)),
        mfu=median(log, MFU),
        memory=first(measured.get("peak_memory_bytes")),
        flops=first(measured.get("flops")),
    )


def last(log: list[dict[str, Any]], name: str) -> float | None:
    """The last finite value of a metric."""
    return next((n for record in reversed(log) if (n := number(record.get(name))) is not None), None)


def median(log: list[dict[str, Any]], name: str) -> float | None:
    """The middle value of a metric."""
    values = sorted(n for record in log if (n := number(record.get(name))) is not None)
    return values[len(values) // 2] if values else None


def story(facts: Facts) -> str:
    """What happened, in one or two plain sentences."""
    text = ""
    if facts.tokens and facts.parameters:
        size, read = format_count(facts.parameters), format_count(facts.tokens)
        text = f"A model of {size} parameters has read {read} tokens of text"
        text += f" in {format_seconds(facts.seconds)}. " if facts.seconds else ". "
    if facts.bpb is not None:
        text += f"It needs {facts.bpb:.3f} bits for each byte of text that it has never seen"
        if facts.xz:
            ratio = facts.bpb / facts.xz - 1
            share = f"{abs(ratio):.0%} {'fewer' if ratio < 0 else 'more'}"
            text += f", {share} than the compressor xz -9e ({facts.xz:.3f})"
        text += "."
    return text


def cards(facts: Facts, plan: Mapping[str, Any]) -> list[Card]:
    """The key numbers that are known."""
    predicted, budget = part(plan, "predictions"), part(plan, "budget")

    def against(name: str, value: float | None) -> str:
        share = difference(predicted.get(name), value)
        return (
            f"plan: {quantity(name, predicted[name])} ({signed_percent(share)})" if share is not None else ""
        )

    candidates = [
        ("bits per byte", facts.bpb, bits_per_byte, f"xz -9e: {facts.xz:.3f}" if facts.xz else ""),
        ("validation loss", facts.loss, lambda v: f"{v:.3f} nats/token", against("final_loss", facts.loss)),
        ("parameters", facts.parameters, format_count, _shape(part(part(plan, "decisions"), "model"))),
        ("tokens read", facts.tokens, format_count, _per_parameter(facts)),
        ("training speed", facts.speed, lambda v: f"{format_count(v)} tokens/s", _utilisation(facts)),
        (
            "wall time",
            facts.seconds,
            format_seconds,
            f"budget: {budget_text(budget)}" if budget else "",
        ),
        ("peak memory", facts.memory, format_bytes, against("peak_memory_bytes", facts.memory)),
        ("compute", facts.flops, flops, against("flops", facts.flops)),
    ]
    found = []
    for label, value, show, context in candidates:
        if value is not None:
            digits, _, unit = show(value).partition(" ")
            found.append(Card(label, digits, unit, context))
    return found


def _shape(model: Mapping[str, Any]) -> str:
    named = [
        ("layers", model.get("n_layers")),
        ("wide", model.get("d_model")),
        ("heads", model.get("n_heads")),
    ]
    return " · ".join(f"{value} {name}" for name, value in named if number(value) is not None)


def _per_parameter(facts: Facts) -> str:
    if not facts.tokens or not facts.parameters:
        return ""
    return f"{facts.tokens / facts.parameters:.3g} per parameter"


def _utilisation(facts: Facts) -> str:
    return f"{percent(facts.mfu)} of the measured ceiling" if facts.mfu is not None else ""


def badges(criteria: Any) -> list[Badge]:
    """Success criteria as pass or fail."""
    if not isinstance(criteria, list):
        return []
    return [
        Badge(
            stage=str(item.get("stage", "")),
            criterion=str(item.get("criterion", "")),
            value=quantity(_metric_of(str(item.get("criterion", ""))), item.get("value")),
            passed=item["passed"] if isinstance(item.get("passed"), bool) else None,
        )
        for item in criteria
        if isinstance(item, Mapping)
    ]


def _metric_of(criterion: str) -> str:
    """`bits_per_byte < 2.5` -> `bits_per_byte`, so that the value gets its unit."""
    return criterion.strip().split(" ")[0].rstrip("<>=!")
