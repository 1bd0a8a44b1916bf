"""Plan against measured: every prediction beside what the run did, and the time of each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lavra.report.bars import stacked_bars
from lavra.report.quantities import difference, number, quantity, signed_percent, words
from lavra.report.run import Run, part, sentences
from lavra.report.tables import Table
from lavra.units import format_seconds

STAGES = ("plan", "corpus", "tokenizer", "tokens", "pretrain", "evaluate", "report")
CLOSE, FAIR = 0.10, 0.30  # relative differences that count as close and as fair


@dataclass(frozen=True)
class Row:
    """One prediction beside its measurement."""

    name: str
    predicted: str
    measured: str
    difference: str
    grade: str
    basis: str


def view(run: Run) -> dict[str, Any]:
    """Context of the section "Plan against measured"."""
    plan, measured = run.facts("plan.json"), run.facts("measured.json")
    if not plan and not measured:
        return run.missing("plan.json", "plan")
    predicted, basis = part(plan, "predictions"), part(plan, "basis")
    expected, seen = stage_seconds(predicted), stage_seconds(measured)
    stages = list(stage_seconds({"stage_seconds": expected | seen}))
    return {
        "rows": rows(predicted, measured, basis),
        "measured_missing": not measured,
        "stages": stage_table(stages, expected, seen),
        "legend": [(words(stage), i % 8 + 1) for i, stage in enumerate(stages)],
        "timeline": timeline(stages, expected, seen, part(plan, "budget")),
        "stage_basis": str(basis.get("stage_seconds", "")),
        "notes": sentences(plan, "notes"),
        "decisions": decisions(plan),
    }


def rows(predicted: Mapping[str, Any], measured: Mapping[str, Any], basis: Mapping[str, Any]) -> list[Row]:
    """All numbers that either side has, the plan's order first."""
    names = [name for name in dict.fromkeys([*predicted, *measured]) if name != "stage_seconds"]
    return [
        Row(
            name=words(name),
            predicted=quantity(name, predicted.get(name)),
            measured=quantity(name, measured.get(name)),
            difference=signed_percent(share := difference(predicted.get(name), measured.get(name))),
            grade=grade(share),
            basis=str(basis.get(name, "")),
        )
        for name in names
        if number(predicted.get(name)) is not None or number(measured.get(name)) is not None
    ]


def grade(share: float | None) -> str:
    """`close`, `fair` or `off`; empty if there is nothing to compare."""
    if share is None:
        return ""
    return "close" if abs(share) <= CLOSE else "fair" if abs(share) <= FAIR else "off"


def stage_seconds(side: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of each stage in the order of the pipeline, stages it does not know last."""
    seconds = {k: n for k, v in part(side, "stage_seconds").items() if (n := number(v)) is not None}
    ordered = [*(stage for stage in STAGES if stage in seconds), *(s for s in seconds if s not in STAGES)]
    return {stage: seconds[stage] for stage in ordered}


def stage_table(
    stages: Sequence[str], expected: Mapping[str, float], seen: Mapping[str, float]
) -> Table | None:
    """Seconds of each stage, both sides."""
    body = [
        [
            words(stage),
            quantity("seconds", expected.get(stage)),
            quantity("seconds", seen.get(stage)),
            signed_percent(difference(expected.get(stage), seen.get(stage))),
        ]
        for stage in stages
    ]
    return Table(["stage", "predicted", "measured", "difference"], body) if body else None


def timeline(
    stages: Sequence[str],
    expected: Mapping[str, float],
    seen: Mapping[str, float],
    budget: Mapping[str, Any],
) -> str:
    """Both sides as bars on one scale of seconds, with the budget if it is one of time."""
    sides = [("predicted", expected), ("measured", seen)]
    seconds = number(budget.get("value")) if budget.get("kind") == "time" else None
    return stacked_bars(
        [(name, list(side.items())) for name, side in sides if side],
        stages,
        label="Seconds of each stage, predicted and measured",
        format_value=format_seconds,
        limit=("budget", seconds) if seconds else None,
    )


def budget_text(budget: Mapping[str, Any]) -> str:
    """The budget as it was written, else its value in its unit."""
    kind, value = str(budget.get("kind", "")), budget.get("value")
    return str(budget.get("text") or quantity({"time": "seconds"}.get(kind, kind), value)) + (
        f" {kind}" if kind == "tokens" else ""
    )


def decisions(plan: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """What the plan decided, as named groups of facts: the model's shape, and the run."""
    decided, budget, horizon = part(plan, "decisions"), part(plan, "budget"), part(plan, "horizon")
    run = [("budget", budget_text(budget))] if budget else []
    run += [
        ("horizon decided" if name == "decided" else f"horizon {words(name)}", quantity(name, value))
        for name, value in horizon.items()
    ]
    run += [(words(name), quantity(name, value)) for name, value in decided.items() if name != "model"]
    model = [(words(name), quantity(name, value)) for name, value in part(decided, "model").items()]
    return [(title, facts) for title, facts in (("Model", model), ("Run", run)) if facts]
