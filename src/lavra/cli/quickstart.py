"""Raw text to a measured model in one command: plan, corpus, tokenizer, training, evaluation, report.

Without --data it uses text that every Python installation has: the standard library's documentation
and source. The same command again reuses everything; after an interruption it continues.

examples:
  lavra quickstart
  lavra quickstart --data ~/notes --budget 10m
  lavra quickstart --data books.jsonl.zst model.size=5M
"""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    from lavra.cli.shared import add_pipeline

    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="any recipe setting, e.g. model.size=5M"
    )
    parser.add_argument("--data", metavar="PATH", help="file, folder or glob of your own text")
    parser.add_argument(
        "--budget", metavar="TIME", help="wall time from command start to report (default 5m)"
    )
    parser.add_argument(
        "--run-dir", metavar="DIR", help="where the run lives (default runs/quickstart, or runs/<data>)"
    )
    add_pipeline(parser)


def run(args: argparse.Namespace) -> int:
    """Carry the command out."""
    from lavra.cli.run import finish
    from lavra.cli.shared import run_until

    overrides = list(args.overrides)
    if args.data:
        overrides.insert(0, f"corpus.sources={json.dumps([{'path': args.data}])}")
        overrides.insert(0, f"name={_run_name(args.data)}")
    if args.budget:
        overrides.append(f"budget.time={args.budget}")
    if args.run_dir:
        overrides.append(f"run_dir={json.dumps(args.run_dir)}")
    args.recipe, args.overrides = "quickstart", overrides
    return finish(run_until(args, "report"))


def _run_name(data: str) -> str:
    import re
    from pathlib import Path

    stem = Path(data).name.split(".")[0] or Path(data).resolve().name
    return "quickstart-" + (re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-") or "data")
