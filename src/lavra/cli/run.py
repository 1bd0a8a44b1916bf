"""All stages of a recipe: plan, corpus, tokenizer, tokens, pretrain, evaluate, report.

Complete stages whose inputs did not change are reused, interrupted ones continue. The exit code is 1
when a success criterion of the recipe is not met.

examples:
  lavra run recipe.yaml
  lavra run recipe.yaml train.learning_rate=2e-3 --from pretrain
  lavra run recipe.yaml --until tokens
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from lavra.errors import ExitCode

if TYPE_CHECKING:
    from lavra.pipeline import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    from lavra.cli.shared import add_pipeline, add_recipe

    add_recipe(parser)
    add_pipeline(parser)
    parser.add_argument(
        "--from", dest="from_stage", default="", metavar="STAGE", help="rebuild this stage and all after it"
    )
    parser.add_argument("--until", default="report", metavar="STAGE", help="stop after this stage")


def run(args: argparse.Namespace) -> int:
    """Carry the command out."""
    from lavra.cli.shared import run_until

    return finish(run_until(args, args.until, from_stage=args.from_stage))


def finish(run: Run) -> int:
    """Judge the success criteria and say what to do next."""
    from lavra.console import say
    from lavra.pipeline import success_results

    failed = False
    for result in success_results(run):
        verdict = {True: "pass", False: "FAIL", None: "not judged"}[result["passed"]]
        failed |= result["passed"] is False
        say(f"  {verdict}: {result['stage']}: {result['criterion']} (measured {result['value']})")
    if "evaluate" in run.artifacts:
        say(f"talk to it: lavra chat {run.dir}\nlook at it: {run.dir / 'report.html'}")
    return ExitCode.FAILURE if failed else ExitCode.OK
