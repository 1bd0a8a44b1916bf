"""Arguments that several verbs share, and running stages up to one of them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lavra.pipeline import Run
    from lavra.recipe import LoadedRecipe


def add_recipe(parser: argparse.ArgumentParser, *, default: str = "") -> None:
    """RECIPE and overrides."""
    parser.add_argument(
        "recipe",
        nargs="?",
        default=default,
        help="recipe file or preset name; default: the built-in defaults",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="e.g. model.size=10M budget.time=10m run_dir=runs/a"
    )


def add_pipeline(parser: argparse.ArgumentParser) -> None:
    """Options of every verb that runs stages."""
    parser.add_argument("--fresh", action="store_true", help="set the old run directory aside and start anew")
    parser.add_argument(
        "--force", action="store_true", help="resume training even if changed settings break its data order"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress, only results and errors")


def load(args: argparse.Namespace, overrides: Sequence[str] | None = None) -> LoadedRecipe:
    """The recipe named by `args`; a first argument with `=` is an override, not a recipe.

    Args:
        overrides: instead of those of `args`.
    """
    from lavra.console import set_quiet
    from lavra.recipe import load_recipe

    set_quiet(getattr(args, "quiet", False))
    name, settings = args.recipe, list(args.overrides if overrides is None else overrides)
    if "=" in name:
        name, settings = "", [name, *settings]
    return load_recipe(name, settings)


def run_until(args: argparse.Namespace, stage: str, *, from_stage: str = "") -> Run:
    """Run the recipe's stages up to `stage`; a wall-time budget counts from the start of the command."""
    import psutil

    from lavra.stages import run_recipe

    started = psutil.Process().create_time()
    return run_recipe(
        load(args), until=stage, from_stage=from_stage, fresh=args.fresh, force=args.force, started=started
    )


def print_json(value: Any) -> None:
    """Machine-readable result on standard output."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False)
    print()
