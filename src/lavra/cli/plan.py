"""What a budget buys on this machine: model, batch, horizon, memory, disk, time, final loss.

examples:
  lavra plan recipe.yaml
  lavra plan budget.time=2h corpus.max_bytes=200MB
  lavra plan recipe.yaml model.size=124M budget.tokens=2.5B --json
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    from lavra.cli.shared import add_pipeline, add_recipe

    add_recipe(parser)
    add_pipeline(parser)
    parser.add_argument("--json", action="store_true", help="print plan.json")


def run(args: argparse.Namespace) -> None:
    """Carry the command out."""
    from lavra.cli.shared import print_json, run_until
    from lavra.stages import plan_summary

    run = run_until(args, "plan")
    if args.json:
        print_json(run.plan)
        return
    print(plan_summary(run.plan).replace("\n  ", "\n").strip())
    print("because:")
    for name, basis in run.plan["basis"].items():
        print(f"  {name}: {basis}")
