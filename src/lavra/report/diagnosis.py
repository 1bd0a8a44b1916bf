"""Diagnosis: what the run's records say went wrong, with a chart for each finding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from lavra.report.charts import Series
from lavra.report.run import Run, part
from lavra.report.training import Chart, figure, series
from lavra.tokens.store import tokens_by_source
from lavra.train.diagnosis.findings import Finding
from lavra.train.diagnosis.history import History
from lavra.train.diagnosis.judge import judge


@dataclass(frozen=True)
class Shown:
    """A finding and its charts."""

    finding: Finding
    charts: list[Chart]


def view(run: Run) -> dict[str, Any]:
    """Context of the section "Diagnosis"."""
    log, records = run.records("metrics.jsonl"), history(run)
    if not log and not records.rejections:
        return run.missing("metrics.jsonl", "pretrain")
    found = judge(records)
    return {
        "findings": [Shown(f, _charts(f, log)) for f in found.findings],
        "not_found": ", ".join(found.clear),
        "unknown": [f"{name}: {why}" for name, why in found.unknown],
    }


def history(run: Run) -> History:
    """The training run as its directory holds it; what is missing or damaged is left out."""
    return History(
        run.records("metrics.jsonl"),
        run.records("events.jsonl"),
        run.facts("plan.json"),
        _recipe(run),
        _source_tokens(run),
        diverged=run.facts("STATUS").get("state") == "diverged",
    )


def _charts(finding: Finding, log: list[dict[str, Any]]) -> list[Chart]:
    curves = [(name, _curve(log, name)) for name in finding.metrics]
    found = [figure(_title(name), "", [curve], [], log=True) for name, curve in curves]
    return [chart for chart in found if chart]


def _curve(log: list[dict[str, Any]], name: str) -> Series:
    return series(log, name, _title(name), 2 if name.startswith("layers/") else 1)


def _title(name: str) -> str:
    """`layers/blocks.3/grad_norm` -> `blocks.3 grad norm`; `train/loss` stays."""
    return name.removeprefix("layers/").replace("/", " ").replace("_", " ") if "layers/" in name else name


def _recipe(run: Run) -> dict[str, Any]:
    file = run.text("recipe.resolved.yaml")
    if file is None or file.cut:
        return {}
    try:
        value = yaml.safe_load(file.text)
    except yaml.YAMLError as error:
        run.problems.append(f"recipe.resolved.yaml cannot be read: {error}")
        return {}
    return value if isinstance(value, dict) else {}


def _source_tokens(run: Run) -> dict[str, int]:
    dtype = part(run.facts("tokens/COMPLETE"), "summary").get("dtype")
    if not isinstance(dtype, str):
        return {}
    try:
        return tokens_by_source(run.folder / "tokens", "train", np.dtype(dtype))
    except (OSError, ValueError, KeyError, TypeError) as error:
        run.problems.append(f"the sizes of the sources cannot be read: {error}")
        return {}
