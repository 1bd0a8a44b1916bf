"""Prove that a killed and resumed training of this recipe equals one that was never killed, bit for bit.

The recipe's text, tokenizer and tokens are made once, then a short training runs twice: whole, and killed with SIGKILL
between checkpoints and resumed. Weights, moments, average, metrics and events are compared; where they differ is said.
Its folder (beside the run: NAME.proof) is deleted when all is equal. The exit code is 1 when something differs.

examples:
  lavra prove-resume recipe.yaml
  lavra prove-resume recipe.yaml --steps 60 --kills 3 train.precision=bf16 train.compile=blocks
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lavra.experiment.prove_resume import Proof
    from lavra.recipe import LoadedRecipe

MARKER = "proof.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    from lavra.cli.shared import add_recipe

    add_recipe(parser)
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="optimizer steps (default 30)")
    parser.add_argument("--kills", type=int, default=2, metavar="N", help="SIGKILLs on the way (default 2)")
    parser.add_argument("--keep", action="store_true", help="keep the folder of the proof")
    parser.add_argument("--quiet", action="store_true", help="no progress, only the result")


def run(args: argparse.Namespace) -> int:
    """Carry the command out."""
    import shutil
    from dataclasses import asdict

    from lavra import artifact
    from lavra.cli.shared import load
    from lavra.errors import ExitCode, UsageError
    from lavra.experiment.prove_resume import prove

    every = args.steps // (args.kills + 1)
    if args.kills < 1 or every < 3:
        raise UsageError(
            f"{args.steps} steps are too few for {args.kills} kills", hint="at least 3 for each part"
        )
    run_dir = load(args).run_dir
    folder = run_dir.with_name(run_dir.name + ".proof")
    whole, resumed = folder / "whole", folder / "resumed"
    overrides = {d: [*args.overrides, *_overrides(d, every)] for d in (whole, resumed)}
    _prepare(folder, load(args, overrides[whole]), args.steps)
    shutil.copytree(whole, resumed)
    recipe = [args.recipe] if args.recipe else []
    arguments = {d: ["pretrain", *recipe, *overrides[d]] for d in (whole, resumed)}
    # Past the checkpoint, so that steps are done twice.
    kills = [every * n + 1 + n % 2 for n in range(1, args.kills + 1)]
    proof = prove(whole, resumed, arguments, steps=args.steps, kills=kills)
    artifact.write_json(folder / MARKER, asdict(proof))
    print(_verdict(proof, folder))
    if proof.differences:
        return ExitCode.FAILURE
    if not args.keep:
        shutil.rmtree(folder)
    return ExitCode.OK


def _overrides(run_dir: Path, every: int) -> list[str]:
    """Checkpoints at known steps and at no others."""
    import json

    where = f"run_dir={json.dumps(str(run_dir))}"
    return [where, f"train.keep_every={every}", "train.checkpoint_every=1000h"]


def _prepare(folder: Path, loaded: LoadedRecipe, steps: int) -> None:
    """Everything before training, and a plan that ends after `steps`."""
    import shutil

    from lavra import artifact
    from lavra.errors import PreflightError
    from lavra.plan.solve import horizon_of, share_of_steps
    from lavra.stages import run_recipe

    if folder.exists():
        if not (folder / MARKER).exists():
            raise PreflightError(f"{folder} exists and is no proof of ours", hint="move it away")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    artifact.write_json(folder / MARKER, {"unfinished": True})
    run = run_recipe(loaded, until="tokens")
    decisions, train = run.plan["decisions"], run.recipe.train
    decisions["warmup_steps"] = share_of_steps(train.warmup_fraction, steps)
    run.plan["horizon"] = horizon_of(steps, decisions["batch_tokens"], train.decay_fraction)
    artifact.write_json(run.dir / "plan.json", run.plan)


def _verdict(proof: Proof, folder: Path) -> str:
    done = (
        f"{proof.steps} steps against {proof.steps} steps killed after "
        f"{', '.join(map(str, proof.kills))} and resumed"
    )
    if proof.differences:
        return "\n  ".join([f"NOT equal: {done}", *proof.differences, f"see {folder}"])
    return f"bitwise equal: {done} ({proof.tensors} tensors, {proof.events} events, all metrics)"
