"""One offline HTML page of a run: plan against measured, curves, corpus, samples, evaluation.

example:
  lavra report runs/quickstart
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("run_dir", metavar="RUN", help="run directory; may still be training")


def run(args: argparse.Namespace) -> None:
    """Carry the command out."""
    from pathlib import Path

    from lavra.errors import PreflightError
    from lavra.report.render import render_report

    run_dir = Path(args.run_dir)
    if not (run_dir / "recipe.resolved.yaml").exists():
        raise PreflightError(f"no run at {run_dir.resolve()}", hint="`lavra runs ls` lists them")
    print(render_report(run_dir))
