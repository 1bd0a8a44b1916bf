"""Sources to clean documents: read, judge, deduplicate, split; every record is accounted for.

Earlier stages run first when they are missing or out of date.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    from lavra.cli.shared import add_pipeline, add_recipe

    add_recipe(parser)
    add_pipeline(parser)
    parser.add_argument("--json", action="store_true", help="print the stage's summary as JSON")


def run(args: argparse.Namespace) -> None:
    """Carry the command out."""
    from lavra.cli.shared import print_json, run_until

    result = run_until(args, "corpus").artifacts["corpus"]
    if args.json:
        print_json(dict(result.summary))
