"""Look at checkpoints: the tensors they hold, and the average of several."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from lavra import artifact
from lavra.checkpoint.store import MODEL, Snapshot, checkpoint_step, save_checkpoint, weights_file
from lavra.errors import PreflightError


@dataclass(frozen=True)
class TensorFacts:
    """One tensor of a checkpoint's file; `rms` and `largest` over its finite entries."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    rms: float
    largest: float
    not_finite: int


def tensors_of(file: Path) -> Iterator[TensorFacts]:
    """Facts of every tensor, one in memory at a time."""
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - no mapping
            tensor = opened.get_tensor(name)
            values = tensor.double().flatten()
            finite = values[values.isfinite()]
            yield TensorFacts(
                name,
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
                float(finite.square().mean().sqrt()) if len(finite) else 0.0,
                float(finite.abs().max()) if len(finite) else 0.0,
                len(values) - len(finite),
            )


def average_weights(checkpoints: Sequence[Path]) -> dict[str, Tensor]:
    """Mean of the weights of several checkpoints (Izmailov et al. 2018), each's own average where it keeps one.

    Raises:
        PreflightError: they are of different models, or fewer than two.
    """
    if len(checkpoints) < 2:
        raise PreflightError("an average needs two checkpoints or more", hint="train.keep_every keeps more")
    total: dict[str, Tensor] = {}
    for checkpoint in checkpoints:
        weights = load_file(checkpoint / weights_file(checkpoint))
        shapes = {name: t.shape for name, t in weights.items()}
        if total and shapes != {name: t.shape for name, t in total.items()}:
            raise PreflightError(f"{checkpoint} holds another model than {checkpoints[0]}")
        for name, tensor in weights.items():
            total[name] = total[name] + tensor.double() if name in total else tensor.double()
    return {name: (t / len(checkpoints)).to(torch.float32) for name, t in total.items()}


def write_averaged_run(run_dir: Path, checkpoints: Sequence[Path], out: Path) -> Path:
    """A run directory that holds the average of a run's checkpoints: generate, evaluate and train from it.

    Raises:
        PreflightError: `out` exists, or see `average_weights`.
    """
    if out.exists():
        raise PreflightError(f"{out} exists", hint="choose another --out")
    if not (run_dir / "plan.json").exists():
        raise PreflightError(f"no run at {run_dir.resolve()}", hint="name a run directory")
    weights = average_weights(checkpoints)
    step = checkpoint_step(checkpoints[-1])
    building = out.with_name(f".{out.name}{artifact.TEMPORARY}")
    shutil.rmtree(building, ignore_errors=True)
    state = {"step": step, "averaged": [str(c) for c in checkpoints]}
    saved = save_checkpoint(building / "checkpoints", step, Snapshot({MODEL: weights}, state))
    for name in ("plan.json", "recipe.resolved.yaml", "tokenizer"):
        source = run_dir / name
        if source.is_dir():
            shutil.copytree(source, building / name)
        elif source.exists():
            shutil.copy(source, building / name)
    building.rename(out)
    return out / "checkpoints" / saved.name
