"""`metrics.jsonl` is the run's truth: names, writer, reader. `events.jsonl` uses the same form."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lavra.artifact import write_bytes

# Names used in metrics.jsonl; every line also has `step`, `tokens` (so far) and `time` (seconds in training).
TRAIN_LOSS = "train/loss"  # nats per token, mean over the global step
LEARNING_RATE = "train/lr"
GRAD_NORM = "train/grad_norm"  # before clipping
LOSS_SCALE = "train/loss_scale"  # fp16 only
OVERFLOWS = "train/overflows"  # times the loss scale was halved so far
TOKENS_PER_SECOND = "perf/tok_per_s"
MFU = "perf/mfu"  # model FLOPs / (measured GEMM ceiling of this machine)
DATA_WAIT = "perf/data_wait_frac"
RSS_GIB = "mem/rss_gib"
VALIDATION_LOSS = "val/loss"  # nats per token
VALIDATION_BPB = "val/bpb"  # bits per UTF-8 byte


def number(value: Any) -> float | None:
    """`value` if it is a finite number (no bool), else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


class JsonlWriter:
    """Append one JSON object a line; each line reaches the system before `write` returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append `record`; numbers that are not finite become null (JSON has no NaN)."""
        self._file.write((json.dumps(_finite(record), ensure_ascii=False, allow_nan=False) + "\n").encode())

    def close(self) -> None:
        """Flush to disk and close."""
        os.fsync(self._file.fileno())
        self._file.close()


def _finite(value: Any) -> Any:
    """The value with null for every number in it that is not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsLog:
    """metrics.jsonl of a training run that may go back to an earlier step.

    Args:
        after: records past this step are dropped: they belong to work that is done again.
        mute: write nothing (a process that is not the first).
    """

    def __init__(self, path: Path, *, after: int, mute: bool = False) -> None:
        self.path, self.mute = path, mute
        self._writer: JsonlWriter | None = None
        self.reopen_after(after)

    def reopen_after(self, step: int) -> None:
        """Drop the records past `step` and go on from there."""
        self.close()
        if not self.mute:
            truncate_after(self.path, step)
            self._writer = JsonlWriter(self.path)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record."""
        if self._writer is not None:
            self._writer.write(record)

    def close(self) -> None:
        """Flush and close; closing twice does nothing."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _cut_torn_line(path: Path) -> None:
    """Drop what a killed writer left after the last newline, so that the next record starts a line."""
    if path.exists():
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a JSONL log; a torn last line (killed writer) is left out."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def truncate_after(path: Path, step: int) -> None:
    """Drop records past `step`: they belong to work that a resume does again."""
    if path.exists():
        kept = [record for record in read_jsonl(path) if record.get("step", 0) <= step]
        write_bytes(path, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in kept).encode())
