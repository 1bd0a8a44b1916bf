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
    parser.add_argument(
        "--rulesets", action="store_true", help="print the rules that come with lavra, and stop"
    )
    parser.add_argument("--json", action="store_true", help="print the stage's summary as JSON")


def run(args: argparse.Namespace) -> None:
    """Carry the command out."""
    from lavra.cli.shared import print_json, run_until

    if args.rulesets:
        print_rulesets()
        return
    result = run_until(args, "corpus").artifacts["corpus"]
    if args.json:
        print_json(dict(result.summary))


def print_rulesets() -> None:
    """Every built-in ruleset: where it comes from, its thresholds, and what each rule drops."""
    from lavra.corpus.rulesets.ruleset import built_in, load_ruleset

    for name in built_in():
        ruleset = load_ruleset(name)
        print(f"{name}\n  {ruleset.source}")
        for threshold, value in ruleset.thresholds.items():
            print(f"  {threshold} = {value:g}")
        for reason, rule in ruleset.rules.items():
            print(f"  {reason}: {rule.text}")
