"""Runs below a folder: list them, show one, delete what was set aside.

examples:
  lavra runs ls
  lavra runs show runs/quickstart
  lavra runs gc --yes
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (("ls", "one line a run"), ("gc", "delete *.old-N folders and unfinished leftovers")):
        action = actions.add_parser(name, help=text)
        action.add_argument("folder", nargs="?", default="runs", help="folder of runs (default: runs)")
        if name == "gc":
            action.add_argument(
                "--yes", action="store_true", help="delete; without it, only say what would go"
            )
    show = actions.add_parser("show", help="state, plan and measurements of one run")
    show.add_argument("folder", metavar="RUN")


def run(args: argparse.Namespace) -> None:
    """Carry the command out."""
    from pathlib import Path

    from lavra.errors import PreflightError

    folder = Path(args.folder)
    if not folder.is_dir():
        raise PreflightError(f"no folder at {folder.resolve()}")
    {"ls": _list, "show": _show, "gc": _collect}[args.action](folder, args)


def _list(folder, args) -> None:
    from lavra.artifact import read_json
    from lavra.console import format_table
    from lavra.units import format_count

    rows = []
    for status in sorted(folder.glob("*/STATUS")):
        state, measured = read_json(status), status.with_name("measured.json")
        facts = read_json(measured) if measured.exists() else {}
        bits = facts.get("final_bpb")
        rows.append(
            (
                status.parent.name,
                state["state"],
                state.get("stage", ""),
                format_count(facts.get("parameters", 0)),
                f"{bits:.3f}" if bits else "-",
                state["updated"],
            )
        )
    print(format_table(("run", "state", "stage", "parameters", "val bits/byte", "updated"), rows))


def _show(folder, args) -> None:
    from lavra.artifact import read_json
    from lavra.errors import PreflightError

    if not (folder / "STATUS").exists():
        raise PreflightError(f"no run at {folder.resolve()}", hint="`lavra runs ls` lists them")
    for key, value in read_json(folder / "STATUS").items():
        print(f"{key}: {value}")
    if (folder / "plan.json").exists():
        from lavra.stages import plan_summary

        print("plan\n" + plan_summary(read_json(folder / "plan.json")))
    if (folder / "measured.json").exists():
        print("measured")
        for key, value in read_json(folder / "measured.json").items():
            print(f"  {key}: {value}")


def _collect(folder, args) -> None:
    import shutil

    from lavra.units import format_bytes

    found = sorted([*folder.glob("*.old-*"), *folder.glob("*/checkpoints.old-*")])
    for path in found:
        size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
        print(f"{'deleted' if args.yes else 'would delete'} {path} ({format_bytes(size)})")
        if args.yes:
            shutil.rmtree(path)
    if not found:
        print("nothing to delete")
    elif not args.yes:
        print("add --yes to delete")
