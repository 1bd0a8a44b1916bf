"""Save, find and load checkpoints.

    checkpoints/step-00001000/{model, optimizer, average}.safetensors, state.json, COMPLETE
    checkpoints/latest        (text: the newest complete step folder)

A checkpoint is built in a temporary folder, gets `COMPLETE` (sizes and hashes) as its last file and is
then renamed; a folder without the marker does not exist for any reader. No pickle anywhere.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from lavra import artifact
from lavra.errors import PreflightError

MODEL, OPTIMIZER, AVERAGE = "model.safetensors", "optimizer.safetensors", "average.safetensors"
_MARKER = artifact.COMPLETE
_REPLACED = ".replaced"  # a checkpoint whose successor of the same step is being put in its place


@dataclass(frozen=True)
class Snapshot:
    """Content of a checkpoint in memory: tensors by file, and the JSON state."""

    files: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def take_snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    *,
    average: Mapping[str, Tensor] | None = None,
    copy: bool = False,
) -> Snapshot:
    """What a checkpoint of this moment holds.

    Args:
        state: JSON-able values to resume from (step, tokens, seconds, guard ...).
        average: moving average of the weights, by parameter name.
        copy: training goes on while the snapshot is written.
    """

    def held(tensor: Tensor) -> Tensor:
        here = tensor.detach().cpu()
        return here.clone() if copy and here.data_ptr() == tensor.data_ptr() else here.contiguous()

    files = {
        MODEL: {name: held(p) for name, p in model.named_parameters()},
        OPTIMIZER: {
            f"{slot}/{name}": held(value)
            for name, parameter in model.named_parameters()
            for slot, value in optimizer.state.get(parameter, {}).items()
        },
    }
    if average is not None:
        files[AVERAGE] = {name: held(t) for name, t in average.items()}
    return Snapshot(files, state)


def save_checkpoint(folder: Path, step: int, snapshot: Snapshot) -> Path:
    """Write `step-<step>`; returns its path.

    Raises:
        OSError: the disk is full or read-only; earlier checkpoints stay as they were.
    """
    final = folder / f"step-{step:08d}"
    building = folder / f".step-{step:08d}{artifact.TEMPORARY}{os.getpid()}"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        for name, tensors in snapshot.files.items():
            artifact.write_bytes(building / name, save(tensors))
        artifact.write_json(building / "state.json", snapshot.state)
        record = {"step": step, "files": artifact.file_facts(building)}
        artifact.write_json(building / _MARKER, record)
        if final.exists():  # a folder cannot be replaced in one act
            os.replace(final, folder / f".{final.name}{_REPLACED}")
        os.replace(building, final)
        finish_replacing(folder)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        finish_replacing(folder)
        raise
    artifact.fsync_folder(folder)
    artifact.write_bytes(folder / "latest", final.name.encode())
    return final


class Saver:
    """Writes checkpoints, in a thread where training should not wait, and prunes old ones afterwards.

    Args:
        keep: newest complete checkpoints that stay.
        keep_every: those of every so many steps stay for good; 0: none.
        background: `save` returns at once; one write runs at a time, and its error is raised by the next call.
    """

    def __init__(self, folder: Path, *, keep: int, keep_every: int = 0, background: bool = False) -> None:
        self.folder, self.keep, self.keep_every = folder, keep, keep_every
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="lavra-checkpoint") if background else None
        self._writing: Future[None] | None = None

    def save(self, step: int, snapshot: Snapshot) -> None:
        """Write the snapshot (taken with `copy` when in the background)."""
        self.wait()
        if self._pool is None:
            self._write(step, snapshot)
        else:
            self._writing = self._pool.submit(self._write, step, snapshot)

    def wait(self) -> None:
        """Until the write in progress is done; raises its error."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, step: int, snapshot: Snapshot) -> None:
        save_checkpoint(self.folder, step, snapshot)
        prune(self.folder, self.keep, self.keep_every)


def finish_replacing(folder: Path) -> None:
    """Undo or finish the replacement of a checkpoint that a killed process had begun."""
    for old in folder.glob(f".step-*{_REPLACED}"):
        final = folder / old.name.removeprefix(".").removesuffix(_REPLACED)
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(old, final)


def remove_after(folder: Path, step: int) -> None:
    """Delete the checkpoints past `step`, the newest first: training goes back."""
    for checkpoint in reversed(complete_checkpoints(folder)):
        if checkpoint_step(checkpoint) > step:
            _remove(checkpoint)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p.parent for p in folder.glob(f"step-*/{_MARKER}"))


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = complete_checkpoints(folder)
    return found[-1] if found else None


def prune(folder: Path, keep: int, keep_every: int = 0) -> None:
    """Delete all but the newest `keep` complete checkpoints, and what an interrupted save or deletion left.

    Args:
        keep_every: checkpoints whose step is a multiple of it stay too; 0: none.
    """
    complete = complete_checkpoints(folder)
    for old in complete[:-keep]:
        if not keep_every or checkpoint_step(old) % keep_every:
            _remove(old)
    for leftover in [*folder.glob(f".step-*{artifact.TEMPORARY}*"), *folder.glob("step-*")]:
        if leftover not in complete:
            shutil.rmtree(leftover, ignore_errors=True)


def checkpoint_step(checkpoint: Path) -> int:
    """Optimizer steps taken before a checkpoint, from its name."""
    return int(checkpoint.name.removeprefix("step-"))


def _remove(checkpoint: Path) -> None:
    (checkpoint / _MARKER).unlink(missing_ok=True)  # first: a half-deleted checkpoint must not look complete
    shutil.rmtree(checkpoint)


def damages(checkpoint: Path) -> list[str]:
    """What is wrong with a checkpoint, file by file, against the sizes and hashes recorded when it was written."""
    marker = checkpoint / _MARKER
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


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The JSON state of a checkpoint, after checking that every file has its recorded hash.

    Raises:
        PreflightError: a file is missing or damaged.
    """
    if problems := damages(checkpoint):
        raise PreflightError(
            f"files of {checkpoint} are damaged or missing: {problems[0]}",
            hint=f"delete {checkpoint} to fall back on the one before",
        )
    return artifact.read_json(checkpoint / "state.json")


def load_model(checkpoint: Path, model: nn.Module, *, file: str = MODEL) -> None:
    """Load weights by name, those of the last step or (`file=AVERAGE`) their average.

    Raises:
        PreflightError: names or shapes differ from the model's.
    """
    load_by_name(checkpoint, file, dict(model.named_parameters()))


def load_by_name(checkpoint: Path, file: str, own: Mapping[str, Tensor]) -> None:
    """Load the tensors of a checkpoint's file into `own`, which has the same names and shapes.

    Raises:
        PreflightError: it has not.
    """
    tensors = load_file(checkpoint / file)
    if (missing := own.keys() ^ tensors.keys()) or any(own[n].shape != t.shape for n, t in tensors.items()):
        wrong = sorted(missing) or [n for n, t in tensors.items() if own[n].shape != t.shape]
        raise PreflightError(f"{checkpoint} does not fit this model: {', '.join(wrong[:4])}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def weights_file(checkpoint: Path) -> str:
    """Which weights to use after training: the average where one was kept."""
    return AVERAGE if (checkpoint / AVERAGE).exists() else MODEL


def load_optimizer(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load optimizer state by parameter name into `optimizer`; what it held is forgotten."""
    by_name = dict(model.named_parameters())
    optimizer.state.clear()
    for key, tensor in load_file(checkpoint / OPTIMIZER).items():
        slot, _, name = key.partition("/")
        parameter = by_name[name]
        # A fused step counts on the device too.
        optimizer.state[parameter][slot] = tensor.to(parameter.device)
