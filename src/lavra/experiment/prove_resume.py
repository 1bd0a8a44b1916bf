"""Whether training that is killed and resumed equals training that is not, bit for bit (law 3).

Two copies of one run directory train to the same last step, each attempt in a process of its own: one without a break,
the other killed with SIGKILL between checkpoints, several times. Then everything they left is compared.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from lavra import artifact, metrics
from lavra.checkpoint.store import complete_checkpoints
from lavra.errors import LavraError
from lavra.metrics import MetricsLog

# What a clock or a process decides, not the training.
_MEASURED = ("time", "seconds", metrics.TOKENS_PER_SECOND, metrics.MFU, metrics.DATA_WAIT, metrics.RSS_GIB)


@dataclass(frozen=True)
class Proof:
    """Outcome of a comparison.

    Attributes:
        steps: optimizer steps of both trainings.
        kills: steps after which the second one was killed.
        events: events that both recorded.
        tensors: tensors compared, over all checkpoints that both kept.
        differences: what is not equal, the earliest first; empty: bitwise equal.
    """

    steps: int
    kills: list[int]
    events: int
    tensors: int
    differences: list[str]


def prove(
    whole: Path, resumed: Path, arguments: Mapping[Path, Sequence[str]], *, steps: int, kills: list[int]
) -> Proof:
    """Train in both run directories and compare.

    Args:
        arguments: by run directory, the command line of its `lavra pretrain`.
        kills: steps whose metrics are the last thing that an attempt in `resumed` writes.

    Raises:
        LavraError: an attempt failed, or was not killed.
    """
    _attempt(arguments[whole], whole / "attempt-1.log", 0, expect=0)
    for number, step in enumerate(kills, 1):
        _attempt(arguments[resumed], resumed / f"attempt-{number}.log", step, expect=-signal.SIGKILL)
    _attempt(arguments[resumed], resumed / f"attempt-{len(kills) + 1}.log", 0, expect=0)
    events = list(metrics.read_jsonl(whole / "events.jsonl"))
    tensors, differences = compare_runs(whole, resumed)
    return Proof(steps, kills, len(events), tensors, differences)


def _attempt(arguments: Sequence[str], log: Path, kill_at: int, *, expect: int) -> None:
    call = f"from {__name__} import attempt; attempt({list(arguments)!r}, {kill_at})"
    with open(log, "wb") as file:
        code = subprocess.run([sys.executable, "-c", call], stdout=file, stderr=file, check=False).returncode
    if code != expect:
        tail = "\n  ".join(log.read_text(errors="replace").splitlines()[-6:])
        raise LavraError(f"an attempt ended with code {code}, not {expect}:\n  {tail}", hint=f"see {log}")


def attempt(arguments: list[str], kill_at: int) -> None:
    """The command line in this process, which dies by SIGKILL right after it wrote the metrics of `kill_at` (0: never)."""
    write = MetricsLog.write

    def write_and_die(self: MetricsLog, record: Mapping[str, Any]) -> None:
        write(self, record)
        if record["step"] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    if kill_at:
        MetricsLog.write = write_and_die  # type: ignore[method-assign]
    sys.argv = ["lavra", *arguments]
    runpy.run_module("lavra", run_name="__main__")


def compare_runs(one: Path, other: Path) -> tuple[int, list[str]]:
    """Metrics, events and checkpoints of two runs: how many tensors were compared, and what differs."""
    differences = list(_log_differences(one, other, "metrics.jsonl"))[:3]
    differences += list(_log_differences(one, other, "events.jsonl"))[:3]
    tensors = 0
    pairs = [{p.name: p for p in complete_checkpoints(d / "checkpoints")} for d in (one, other)]
    if pairs[0].keys() != pairs[1].keys():
        differences.append(f"checkpoints: {sorted(pairs[0])} and {sorted(pairs[1])}")
    for name in sorted(pairs[0].keys() & pairs[1].keys()):
        compared, found = _compare_checkpoints(pairs[0][name], pairs[1][name])
        tensors += compared
        differences += found
    return tensors, differences


def _log_differences(one: Path, other: Path, name: str) -> Iterator[str]:
    logs = [list(metrics.read_jsonl(folder / name)) for folder in (one, other)]
    for first, second in zip(*logs, strict=False):
        for key in {**first, **second}:
            a, b = first.get(key), second.get(key)
            if key not in _MEASURED and a != b:
                yield f"{name}: step {first.get('step')}: {key} is {a!r:.60} and {b!r:.60}"
    if len(logs[0]) != len(logs[1]):
        yield f"{name}: {len(logs[0])} and {len(logs[1])} records"


def _compare_checkpoints(one: Path, other: Path) -> tuple[int, list[str]]:
    count, differences = 0, []
    states = [artifact.read_json(folder / "state.json") for folder in (one, other)]
    for key in {**states[0], **states[1]}:
        a, b = states[0].get(key), states[1].get(key)
        if key not in _MEASURED and a != b:
            differences.append(f"{one.name}/state.json: {key} is {a!r:.60} and {b!r:.60}")
    files = [{p.name: p for p in folder.glob("*.safetensors")} for folder in (one, other)]
    for name in sorted({**files[0], **files[1]}):
        if name not in files[0] or name not in files[1]:
            differences.append(f"{one.name}/{name} is in one of them only")
            continue
        first, second = load_file(files[0][name]), load_file(files[1][name])
        count += len(first)
        differences += [f"{one.name}/{name}: {text}" for text in _tensor_differences(first, second)][:3]
    return count, differences


def _tensor_differences(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> Iterator[str]:
    for name in {**one, **other}:
        if name not in one or name not in other:
            yield f"{name} is in one of them only"
        elif (a := one[name]).shape != (b := other[name]).shape or a.dtype != b.dtype:
            yield f"{name} is {list(a.shape)} {a.dtype} and {list(b.shape)} {b.dtype}"
        elif not torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
            gap = (a.double() - b.double()).abs()
            yield f"{name} differs in {int((gap > 0).sum())} of {gap.numel()} entries, by up to {float(gap.max()):.3g}"
