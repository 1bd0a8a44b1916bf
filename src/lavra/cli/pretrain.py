"""Train to the plan's horizon; the same command resumes. SIGTERM or Ctrl-C: checkpoint, then stop.

Earlier stages run first when they are missing or out of date.
"""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    from lavra.cli.shared import add_pipeline, add_recipe

    add_recipe(parser)
    add_pipeline(parser)
    parser.add_argument("--json", action="store_true", help="print the stage's summary as JSON")
    parser.add_argument(
        "--init-from",
        metavar="RUN",
        help="start from this run's weights and tokenizer, on this recipe's data",
    )


def run(args: argparse.Namespace) -> None:
    """Carry the command out."""
    from lavra.cli.shared import print_json, run_until

    if args.init_from:
        args.overrides.append(f"train.init_from={json.dumps(args.init_from)}")
    result = run_until(args, "pretrain").artifacts["pretrain"]
    if args.json:
        print_json(dict(result.summary))
