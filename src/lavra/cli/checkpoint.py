"""Checkpoints of a run: list them, verify their hashes, show what one holds, average several.

PATH is a run directory (its newest complete checkpoint) or one of its step folders.

examples:
  lavra checkpoint ls runs/quickstart
  lavra checkpoint verify runs/quickstart
  lavra checkpoint show runs/quickstart/checkpoints/step-00001000 --tensors
  lavra checkpoint average runs/quickstart --last 3 --out runs/averaged
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (
        ("ls", "one line a checkpoint"),
        ("verify", "compare every file with the hash recorded when it was written"),
        ("show", "step, tokens, what was left out, guard, tensors"),
        ("average", "mean of the weights of several, as a run directory of its own"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("path", metavar="PATH", type=Path)
        if name == "show":
            action.add_argument("--tensors", action="store_true", help="one line a tensor of the model")
        if name == "average":
            action.add_argument("--last", type=int, default=2, metavar="N", help="the newest N (default 2)")
            action.add_argument(
                "--out", type=Path, required=True, metavar="DIR", help="run directory to write"
            )


def run(args: argparse.Namespace) -> int | None:
    """Carry the command out."""
    return {"ls": _list, "verify": _verify, "show": _show, "average": _average}[args.action](args)


def _folders(path: Path) -> list[Path]:
    """Step folders that a path stands for, unfinished ones too, oldest first."""
    from lavra.errors import PreflightError

    if path.name.startswith("step-") and path.is_dir():
        return [path]
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = sorted(folder.glob("step-*"))
    if not found:
        raise PreflightError(
            f"no checkpoint at {path.resolve()}", hint="name a run directory or a step folder"
        )
    return found


def _complete(path: Path) -> list[Path]:
    from lavra.artifact import COMPLETE
    from lavra.errors import PreflightError

    complete = [folder for folder in _folders(path) if (folder / COMPLETE).exists()]
    if not complete:
        raise PreflightError(f"no complete checkpoint at {path.resolve()}")
    return complete


def _list(args) -> None:
    import time

    from lavra.artifact import COMPLETE, read_json
    from lavra.console import format_table
    from lavra.units import format_bytes, format_count

    rows = []
    for folder in _folders(args.path):
        files = [f for f in folder.iterdir() if f.is_file()]
        whole = (folder / COMPLETE).exists()
        state = read_json(folder / "state.json") if whole and (folder / "state.json").exists() else {}
        rows.append(
            (
                folder.name,
                format_count(state["tokens"]) if "tokens" in state else "-",
                format_bytes(sum(f.stat().st_size for f in files)),
                time.strftime("%Y-%m-%d %H:%M", time.localtime(folder.stat().st_mtime)),
                "complete" if whole else "unfinished",
            )
        )
    print(format_table(("checkpoint", "tokens", "size", "written", "state"), rows))


def _verify(args) -> int:
    from lavra.checkpoint.store import damages
    from lavra.errors import ExitCode

    damaged = 0
    for folder in _folders(args.path):
        problems = damages(folder)
        damaged += bool(problems)
        print(f"{folder.name}: {'; '.join(problems) or 'every file has the hash it was written with'}")
    if damaged:
        print(
            "a resume takes the newest complete checkpoint; delete a damaged one to fall back on the one before"
        )
    return ExitCode.PREFLIGHT if damaged else ExitCode.OK


def _show(args) -> None:
    import math

    from lavra.artifact import read_json
    from lavra.checkpoint.inspect import tensors_of
    from lavra.checkpoint.store import weights_file
    from lavra.console import format_table
    from lavra.units import format_count

    folder = _complete(args.path)[-1]
    print(folder)
    state = read_json(folder / "state.json") if (folder / "state.json").exists() else {}
    for key in (
        "step",
        "tokens",
        "seconds",
        "micro_batch_size",
        "ledger",
        "skipped",
        "rewinds",
        "loss_scale",
    ):
        if state.get(key) not in (None, [], {}):
            print(f"{key}: {state[key]}")
    if losses := state.get("guard", {}).get("losses"):
        print(f"loss of the last {len(losses)} accepted steps: {sum(losses) / len(losses):.4f}")
    facts = list(tensors_of(folder / weights_file(folder)))
    count = sum(math.prod(t.shape) for t in facts)
    bad = [t.name for t in facts if t.not_finite]
    print(f"weights: {weights_file(folder)}, {len(facts)} tensors, {format_count(count)} parameters")
    if bad:
        print(f"not finite: {', '.join(bad)}")
    if args.tensors:
        rows = [
            (t.name, "x".join(map(str, t.shape)), t.dtype, f"{t.rms:.4g}", f"{t.largest:.4g}", t.not_finite)
            for t in facts
        ]
        print(format_table(("tensor", "shape", "dtype", "rms", "largest", "not finite"), rows))


def _average(args) -> None:
    from lavra.checkpoint.inspect import write_averaged_run
    from lavra.errors import PreflightError

    complete = _complete(args.path)
    if args.last > len(complete):
        raise PreflightError(
            f"--last {args.last}: there are {len(complete)} complete checkpoints",
            hint="train.keep_every keeps one every so many steps",
        )
    folder = write_averaged_run(args.path, complete[-args.last :], args.out)
    print(f"{folder}\ntalk to it: lavra chat {args.out}")
