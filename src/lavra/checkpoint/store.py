"""Save, find and load checkpoints.

    checkpoints/step-00001000/{model.safetensors, optimizer.safetensors, state.json, COMPLETE}
    checkpoints/latest        (text: the newest complete step folder)

A checkpoint is built in a temporary folder, gets `COMPLETE` (sizes and hashes) as its last file and is
then renamed; a folder without the marker does not exist for any reader. No pickle anywhere.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from lavra import artifact
from lavra.errors import PreflightError

_MARKER = artifact.COMPLETE


def save_checkpoint(
    folder: Path, *, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> Path:
    """Write `step-<step>`; returns its path.

    Args:
        state: JSON-able values to resume from (step, tokens, seconds, micro-batch size ...).

    Raises:
        OSError: the disk is full or read-only; earlier checkpoints stay as they were.
    """
    final = folder / f"step-{step:08d}"
    building = folder / f".step-{step:08d}{artifact.TEMPORARY}{os.getpid()}"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        artifact.write_bytes(building / "model.safetensors", save(_model_tensors(model)))
        artifact.write_bytes(building / "optimizer.safetensors", save(_optimizer_tensors(model, optimizer)))
        artifact.write_json(building / "state.json", state)
        files = {
            p.name: {"bytes": p.stat().st_size, "blake2b": artifact.file_hash(p)}
            for p in sorted(building.iterdir())
        }
        artifact.write_json(building / _MARKER, {"step": step, "files": files})
        if final.exists():
            _remove(final)
        os.replace(building, final)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    artifact.fsync_folder(folder)
    artifact.write_bytes(folder / "latest", final.name.encode())
    return final


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p.parent for p in folder.glob(f"step-*/{_MARKER}"))


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = complete_checkpoints(folder)
    return found[-1] if found else None


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` complete checkpoints, and what an interrupted save or deletion left."""
    complete = complete_checkpoints(folder)
    for old in complete[:-keep]:
        _remove(old)
    for leftover in [*folder.glob(f".step-*{artifact.TEMPORARY}*"), *folder.glob("step-*")]:
        if leftover not in complete:
            shutil.rmtree(leftover, ignore_errors=True)


def _remove(checkpoint: Path) -> None:
    (checkpoint / _MARKER).unlink(missing_ok=True)  # first: a half-deleted checkpoint must not look complete
    shutil.rmtree(checkpoint)


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The JSON state of a checkpoint, after checking that every file has its recorded hash.

    Raises:
        PreflightError: a file is missing or damaged.
    """
    for name, facts in artifact.read_json(checkpoint / _MARKER)["files"].items():
        file = checkpoint / name
        if not file.exists() or artifact.file_hash(file) != facts["blake2b"]:
            raise PreflightError(
                f"checkpoint file {file} is damaged or missing",
                hint=f"delete {checkpoint} to fall back on the one before",
            )
    return artifact.read_json(checkpoint / "state.json")


def load_model(checkpoint: Path, model: nn.Module) -> None:
    """Load weights by name.

    Raises:
        PreflightError: names or shapes differ from the model's.
    """
    tensors = load_file(checkpoint / "model.safetensors")
    own = dict(model.named_parameters())
    if (missing := own.keys() ^ tensors.keys()) or any(own[n].shape != t.shape for n, t in tensors.items()):
        wrong = sorted(missing) or [n for n, t in tensors.items() if own[n].shape != t.shape]
        raise PreflightError(f"{checkpoint} does not fit this model: {', '.join(wrong[:4])}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def load_optimizer(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load optimizer state by parameter name into `optimizer`."""
    tensors = load_file(checkpoint / "optimizer.safetensors")
    by_name = {name: parameter for name, parameter in model.named_parameters()}
    for key, tensor in tensors.items():
        slot, _, name = key.partition("/")
        parameter = by_name[name]
        optimizer.state[parameter][slot] = tensor.to(
            parameter.device
        )  # a fused step counts on the device too


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{slot}/{name}": value.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        for slot, value in optimizer.state.get(parameter, {}).items()
    }
