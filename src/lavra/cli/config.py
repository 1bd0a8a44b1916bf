"""Settings: every value with its origin, the JSON schema for editors, the presets.

examples:
  lavra config show recipe.yaml model.size=10M
  lavra config schema > recipe.schema.json
  lavra config presets
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    from lavra.cli.shared import add_recipe

    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add_recipe(actions.add_parser("show", help="each value and where it comes from"))
    actions.add_parser("schema", help="JSON schema on standard output")
    actions.add_parser("presets", help="recipes that ship with lavra")


def run(args: argparse.Namespace) -> None:
    """Carry the command out."""
    from lavra.cli.shared import load, print_json

    if args.action == "schema":
        from lavra.recipe import Recipe

        print_json(Recipe.model_json_schema())
    elif args.action == "presets":
        from lavra.recipe import PRESETS, preset_names

        for name in preset_names():
            first = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
            print(f"{name}: {first.lstrip('# ')}")
    else:
        from lavra.console import format_table

        print(format_table(("setting", "value", "origin"), load(args).rows()))
