"""What went wrong in a training run, or could go better: evidence from its own records, and what to change.

The run may be finished, still training, or stopped by the guard.

examples:
  lavra diagnose runs/quickstart
  lavra diagnose runs/quickstart --json
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lavra.train.diagnosis.findings import Finding
    from lavra.train.diagnosis.history import History
    from lavra.train.diagnosis.judge import Diagnosis

INDENT = "   "
PLOTS = 3  # series shown for a finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("run_dir", metavar="RUN", help="run directory; may still be training")
    parser.add_argument("--json", action="store_true", help="findings as JSON")


def run(args: argparse.Namespace) -> None:
    """Carry the command out."""
    from dataclasses import asdict
    from pathlib import Path

    from lavra.cli.shared import print_json
    from lavra.console import warn
    from lavra.errors import PreflightError
    from lavra.report.diagnosis import history
    from lavra.report.run import Run
    from lavra.train.diagnosis.judge import judge

    folder = Path(args.run_dir)
    if not (folder / "recipe.resolved.yaml").exists() and not (folder / "metrics.jsonl").exists():
        raise PreflightError(f"no run at {folder.resolve()}", hint="`lavra runs ls` lists them")
    reader = Run(folder)
    records = history(reader)
    for problem in reader.problems:
        warn(problem)
    if not records.last_step and not records.rejections:
        raise PreflightError(
            f"no step of training is recorded in {(folder / 'metrics.jsonl').resolve()}",
            hint="train first: `lavra pretrain RECIPE`; while it trains this command can be run at any time",
        )
    found = judge(records)
    if args.json:
        print_json({"run": str(folder), "step": records.last_step, **asdict(found)})
    else:
        print(_text(args.run_dir, records, found))


def _text(name: str, history: History, found: Diagnosis) -> str:
    planned = f" of {history.horizon:,}" if history.horizon else ""
    lines = [
        f"{name}: {history.last_step:,}{planned} steps" + (", ended by the guard" if history.diverged else "")
    ]
    if not found.findings:
        lines.append("nothing found")
    for place, finding in enumerate(found.findings, 1):
        lines += ["", *_finding(place, finding, history)]
    lines.append("")
    if found.clear:
        lines.append(_wrapped("looked for and not found: " + ", ".join(found.clear), ""))
    lines += [_wrapped(f"cannot be judged: {cause}: {why}", "") for cause, why in found.unknown]
    return "\n".join(lines)


def _finding(place: int, finding: Finding, history: History) -> list[str]:
    lines = [f"{place}. {finding.title} ({finding.severity})", _wrapped(finding.evidence, INDENT)]
    lines.append(_wrapped(f"-> {finding.advice}: {' '.join(finding.overrides)}".removesuffix(": "), INDENT))
    return lines + [
        _plot(metric, history.series(metric)) for metric in finding.metrics[:PLOTS] if history.series(metric)
    ]


def _plot(name: str, points: list[tuple[int, float]]) -> str:
    from lavra.console import sparkline

    values: Any = [value for _, value in points]
    return (
        f"{INDENT}{sparkline(values)}\n{INDENT}{name.removeprefix('layers/')}, steps {points[0][0]} to {points[-1][0]}: "
        f"{min(values):.3g} to {max(values):.3g}"
    )


def _wrapped(text: str, indent: str) -> str:
    import textwrap

    return textwrap.fill(text, 100, initial_indent=indent, subsequent_indent=indent, break_long_words=False)
