"""Write a starter recipe: every section, commented, ready for `lavra run`.

example:
  lavra init my-model.yaml
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("path", nargs="?", default="recipe.yaml", help="file to write (default recipe.yaml)")
    parser.add_argument("--force", action="store_true", help="replace an existing file")


def run(args: argparse.Namespace) -> None:
    """Carry the command out."""
    from pathlib import Path

    from lavra.artifact import write_bytes
    from lavra.errors import UsageError
    from lavra.recipe import PRESETS

    path = Path(args.path)
    if path.exists() and not args.force:
        raise UsageError(f"{path} exists", hint="choose another name, or --force")
    write_bytes(path, (PRESETS / "starter.yaml").read_bytes())
    print(f"wrote {path}; next: edit corpus.sources, then\n  lavra plan {path}\n  lavra run {path}")
