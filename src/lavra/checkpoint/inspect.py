"""Look at checkpoints: whole or damaged, what they hold, and their average."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from lavra import artifact
from lavra.checkpoint.store import MODEL, checkpoint_step, weights_file
from lavra.errors import PreflightError


def damages(checkpoint: Path) -> list[str]:
    """What is wrong with a checkpoint, file by file, against the sizes and hashes recorded when it was written."""
    marker = checkpoint / artifact.COMPLETE
    if not marker.exists():
        return ["never finished: no COMPLETE marker"]
    try:
        files = artifact.read_json(marker)["files"]
    except (PreflightError, KeyError) as error:
        return [f"its COMPLETE marker cannot be read: {error}"]
    found = []
    for name, facts in files.items():
        file = checkpoint / name
        if not file.exists():
            found.append(f"{name} is missing")
        elif file.stat().st_size != facts["bytes"]:
            found.append(f"{name} has {file.stat().st_size} bytes, {facts['bytes']} were written")
        elif artifact.file_hash(file) != facts["blake2b"]:
            found.append(f"{name} has other content than was written")
    return found


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
        with safe_open(checkpoint / weights_file(checkpoint), framework="pt") as opened:
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
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
    newest = checkpoints[-1]
    building = out.with_name(f".{out.name}{artifact.TEMPORARY}")
    shutil.rmtree(building, ignore_errors=True)
    folder = building / "checkpoints" / newest.name
    folder.mkdir(parents=True)
    artifact.write_bytes(folder / MODEL, save(weights))
    artifact.write_json(folder / "averaged.json", {"checkpoints": [str(c) for c in checkpoints]})
    for name in ("plan.json", "recipe.resolved.yaml", "tokenizer"):
        source = run_dir / name
        if source.is_dir():
            shutil.copytree(source, building / name)
        elif source.exists():
            shutil.copy(source, building / name)
    files = {
        p.name: {"bytes": p.stat().st_size, "blake2b": artifact.file_hash(p)}
        for p in sorted(folder.iterdir())
    }
    artifact.write_json(folder / artifact.COMPLETE, {"step": checkpoint_step(newest), "files": files})
    building.rename(out)
    return out / "checkpoints" / newest.name
