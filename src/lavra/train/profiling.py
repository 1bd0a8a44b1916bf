"""A few optimizer steps under torch's profiler: where time and memory go.

    RUN/profile/steps-6-10.trace.json.gz   every operator on a time line; ui.perfetto.dev opens it
    RUN/profile/steps-6-10.operators.txt   the operators that take longest, and the memory that they allocate
    RUN/profile/steps-6-10.memory.pickle   CUDA only: every allocation with its stack; pytorch.org/memory_viz opens it

A step reaches from the end of one step's callbacks to the end of the next one's: data, forward, backward and optimizer,
and where they are due validation and checkpoint.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from lavra import artifact
from lavra.train.state import StepFacts
from lavra.units import format_bytes

ROWS = 40  # operators in the table
ALLOCATIONS = 200_000  # that a memory snapshot holds, the newest


class StepProfiler:
    """A callback of the loop, the last of them. Whatever goes wrong here is an event, and training goes on.

    Args:
        steps: the steps to record. The profiler begins one step earlier and drops that one, slowed by its start.
        folder: where the files go.
        on_event: called when they are there, or with the reason why not.
    """

    def __init__(self, steps: range, folder: Path, on_event: Callable[[dict[str, Any]], None]) -> None:
        self.steps, self.folder, self.on_event = steps, folder, on_event
        self._profiler: profile | None = None
        self._device = torch.device("cpu")
        self._step, self._said = 0, False

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, *error: object) -> None:
        """Training ended; what was recorded until then is written."""
        if self._profiler is not None:
            self._try(self._stop)
        if not self._said and not self._path("trace.json.gz").exists():
            self._say("none: the steps asked for were not among those taken now")

    def __call__(self, facts: StepFacts) -> None:
        """A step was taken: begin, count it, or end."""
        self._step = facts.step
        if self._profiler is None:
            if facts.step == self.steps.start - 2:
                self._device = next(facts.model.parameters()).device
                self._try(self._start)
        elif facts.last or self._profiler.step_num >= self.steps[-1]:
            self._try(self._stop)
        else:
            self._try(self._profiler.step)

    def _start(self) -> None:
        cuda = self._device.type == "cuda"
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's recorder talks on standard error
        self._profiler = profile(
            activities=[ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else []),
            schedule=lambda step: ProfilerAction.RECORD if step in self.steps else ProfilerAction.WARMUP,
            on_trace_ready=self._write,
            record_shapes=True,
            profile_memory=True,
        )
        self._profiler.step_num = self.steps.start - 1  # the trace numbers the steps as the run does
        self._profiler.start()
        if cuda:
            torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS)

    def _stop(self) -> None:
        """End the recording, which writes the files."""
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        try:
            profiler.stop()
        finally:
            if self._device.type == "cuda":
                torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, profiler: Any) -> None:
        cuda = self._device.type == "cuda"
        with _whole(self._path("trace.json.gz")) as path:
            profiler.export_chrome_trace(str(path))
        order = "self_device_time_total" if cuda else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=ROWS, max_name_column_width=60)
        artifact.write_bytes(self._path("operators.txt"), f"{self._heading()}\n\n{table}\n".encode())
        if cuda:
            with _whole(self._path("memory.pickle")) as path:
                torch.cuda.memory._dump_snapshot(str(path))
        self._say(f"steps {self.steps.start} to {self._step} are in {self.folder.name}/")

    def _heading(self) -> str:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        lines = [
            f"Steps {self.steps.start} to {self._step} on {self._device.type}, summed; step N is ProfilerStep#N in the trace.",
            f"Peak memory of the process since it began: {format_bytes(peak)} resident.",
        ]
        if self._device.type == "cuda":
            lines.append(
                f"Peak memory of the device: {format_bytes(torch.cuda.max_memory_allocated())} allocated."
            )
        else:
            lines.append(
                "What each operator allocates and frees is in the table and the trace; who holds it is recorded on CUDA only."
            )
        return "\n".join(lines)

    def _path(self, kind: str) -> Path:
        return self.folder / f"steps-{self.steps.start}-{self.steps[-1]}.{kind}"

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._say(f"given up: {type(error).__name__}: {error}")
            if self._profiler is not None:
                with suppress(Exception):
                    self._stop()

    def _say(self, text: str) -> None:
        self._said = True
        self.on_event({"step": self._step, "kind": "profile", "text": text})


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Where to write; under `path` when it is whole. Its name ends as `path` does: torch looks at that."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{artifact.TEMPORARY}{path.name}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
