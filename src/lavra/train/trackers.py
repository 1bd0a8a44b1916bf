"""Optional sinks of the metrics: TensorBoard and Weights & Biases.

    training --offer--> bounded queue --thread of its own--> sink

`metrics.jsonl` stays the truth. Training only puts records on a queue: a sink that is slow loses records, which are
counted; one that fails is left out; one that hangs is left behind. None of them stops or holds up a step.
"""

from __future__ import annotations

import html
import importlib.util
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread, main_thread
from typing import TYPE_CHECKING, Any, Protocol

import psutil

from lavra.errors import PreflightError
from lavra.metrics import JsonlWriter, read_jsonl

if TYPE_CHECKING:
    from lavra.train.state import StepFacts

CAPACITY = 4096  # records that wait for one sink
PATIENCE_SECONDS = 5.0  # that closing waits, for all sinks together


class Sink(Protocol):
    """One tracker. `open`, `write` and `close` run in a thread of its own: they may raise, and may block."""

    def open(self) -> None:
        """Import the package, make files, connect."""

    def write(self, step: int, values: Mapping[str, float], sample: str) -> None:
        """Add a record; a step that is not after the one before is a rewind.

        Args:
            sample: text that the model wrote at this step, or nothing.
        """

    def close(self) -> None:
        """Everything written is on disk, or sent."""

    def abandon(self) -> None:
        """Called by the training thread when the sink failed or hangs: leave nothing that Python's exit waits for."""


def check_installed(names: Iterable[str]) -> None:
    """Look for the packages of the trackers, without importing them.

    Raises:
        PreflightError: one is missing.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise PreflightError(
                f"the tracker {name} is not installed",
                where="train.trackers",
                hint='pip install "lavra[trackers]", or leave it out of train.trackers',
            )


def sinks(
    names: Iterable[str], run_dir: Path, *, fingerprint: str, settings: dict[str, Any]
) -> dict[str, Sink]:
    """The trackers that the recipe names.

    Args:
        fingerprint: of what is trained; another one begins another W&B run.
        settings: what W&B shows beside the run.
    """
    known: dict[str, Sink] = {
        "tensorboard": TensorBoard(run_dir / "tensorboard"),
        "wandb": WandB(run_dir, fingerprint, settings),
    }
    return {name: known[name] for name in names}


class Trackers:
    """A callback of the loop, after those that measure, that hands each record of metrics.jsonl to every sink.

    Args:
        log_every: optimizer steps between records, as in metrics.jsonl.
        on_event: called, in the training thread, with the event of a sink that fails or loses records.
        capacity: records that wait for one sink; those that find no room are lost to it.
        patience: seconds that closing waits, for all sinks together.
    """

    def __init__(
        self,
        sinks: Mapping[str, Sink],
        *,
        log_every: int,
        on_event: Callable[[dict[str, Any]], None],
        capacity: int = CAPACITY,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self.log_every, self.on_event, self.patience = log_every, on_event, patience
        self._step = 0
        self._feeds = [_Feed(name, sink, capacity) for name, sink in sinks.items()]

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __call__(self, facts: StepFacts) -> None:
        """Offer the step's record, if it is one that metrics.jsonl gets."""
        self._step = facts.step
        if not facts.logged(self.log_every):
            return
        for feed in self._feeds:
            feed.offer(facts.step, dict(facts.metrics), facts.sample)
        self._leave_out_failures()

    def close(self) -> None:
        """Let the sinks finish, `patience` seconds at most, and say what they did not get."""
        deadline = time.monotonic() + self.patience
        for feed in self._feeds:
            feed.end()
        for feed in self._feeds:
            feed.wait(deadline)
        self._leave_out_failures()
        for feed in self._feeds:
            if feed.lost:
                self._say(f"{feed.name} is slower than training and missed {feed.lost} records")
        self._feeds = []

    def _leave_out_failures(self) -> None:
        for feed in [f for f in self._feeds if f.failure]:
            self._feeds.remove(feed)
            self._say(f"{feed.name} is left out from here on: {feed.failure}")
            feed.sink.abandon()

    def _say(self, text: str) -> None:
        self.on_event(
            {"step": self._step, "kind": "tracker", "text": f"{text}; metrics.jsonl has everything"}
        )


class _Feed:
    """The queue and the thread of one sink.

    Attributes:
        failure: why the sink gets nothing any more.
        lost: records that found the queue full.
    """

    def __init__(self, name: str, sink: Sink, capacity: int) -> None:
        self.name, self.sink, self.capacity = name, sink, capacity
        self.failure, self.lost = "", 0
        self._queue: SimpleQueue[tuple[int, dict[str, Any], str] | None] = SimpleQueue()
        self._left_behind = False
        self._thread = Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def offer(self, step: int, record: dict[str, Any], sample: str) -> None:
        """Queue a record; never waits."""
        if self._queue.qsize() < self.capacity:
            self._queue.put((step, record, sample))
        else:
            self.lost += 1

    def end(self) -> None:
        """No record follows."""
        self._queue.put(None)

    def wait(self, deadline: float) -> None:
        """Until the sink has everything and is closed, or until `deadline` (`time.monotonic`)."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._left_behind = True
            missing = self.lost + max(0, self._queue.qsize() - 1)
            self.failure = f"it did not finish in time, {missing} records are not written"

    def _work(self) -> None:
        try:
            self.sink.open()
            for step, record, sample in iter(self._queue.get, None):
                if self._left_behind:
                    return
                self.sink.write(step, dict(scalars(record)), sample)
            self.sink.close()
        except BaseException as error:  # whatever a tracker raises, SystemExit too, ends here
            self.failure = f"{type(error).__name__}: {error}"


def scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers of a record by name; `{"layers": {"norm": {"grad_norm": 1}}}` is `layers/norm/grad_norm`."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and math.isfinite(value) and prefix + key != "step":
            yield prefix + key, value


class TensorBoard:
    """Event files in `folder`; values are float32 there.

    What an earlier attempt or a rewind left past the current step is hidden by TensorBoard's own mark of a restart.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._last = math.inf  # the first record is a restart, too

    def open(self) -> None:
        """Begin a file."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(self.folder), flush_secs=5)

    def write(self, step: int, values: Mapping[str, float], sample: str) -> None:
        """Add one event with all values; a sample is a text of the same step."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb

        if step <= self._last:
            self._add(step, session_log=SessionLog(status=SessionLog.START))
        self._last = step
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step, summary=Summary(value=scalars))
        if sample:
            self._add(step, summary=text_pb("sample", sample))

    def _add(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, **content))

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()

    def abandon(self) -> None:
        """Nothing waits for it."""


class WandB:
    """One W&B run for all attempts at a training, in `run_dir/wandb/`; offline unless the environment asks for more.

    `wandb/steps.jsonl` holds the run's id and the steps that it has. W&B never goes back: those are not logged again,
    neither after a resume (they are the same) nor after a rewind (W&B keeps the rejected ones).
    """

    def __init__(self, run_dir: Path, fingerprint: str, settings: dict[str, Any]) -> None:
        self.run_dir, self.fingerprint, self.settings = run_dir, fingerprint, settings
        self._helpers_before = _helper_processes()

    def open(self) -> None:
        """Begin the run, or go on with it."""
        file = self.run_dir / "wandb/steps.jsonl"
        known = list(read_jsonl(file))
        if not known or known[0]["fingerprint"] != self.fingerprint:
            file.unlink(missing_ok=True)
            id = self.fingerprint[:8] + secrets.token_hex(4)
            known = [{"fingerprint": self.fingerprint, "id": id, "step": 0}]
        self._steps = JsonlWriter(file)
        if len(known) == 1:
            self._steps.write(known[0])
        self._last = known[-1]["step"]
        self._run = _begin_wandb_run(known[0]["id"], self.run_dir, self.settings)

    def write(self, step: int, values: Mapping[str, float], sample: str) -> None:
        """Log the record under its own step, once."""
        import wandb

        if step <= self._last:
            return
        texts = {"sample": wandb.Html(f"<pre>{html.escape(sample)}</pre>")} if sample else {}
        self._run.log({**values, **texts}, step=step)
        self._last = step
        self._steps.write({"step": step})

    def close(self) -> None:
        """Finish the run; what is not sent stays in the folder for `wandb sync`."""
        self._steps.close()
        self._run.finish()

    def abandon(self) -> None:
        """When Python exits, W&B would wait for its helper process for as long as the network is away."""
        helpers = _helper_processes() - self._helpers_before
        Thread(target=_end_after_main_thread, args=(helpers,), daemon=True).start()


def _helper_processes() -> set[psutil.Process]:
    """Processes that W&B started from this one."""
    found = set()
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if child.name() == "wandb-core":
                found.add(child)
    return found


def _end_after_main_thread(helpers: set[psutil.Process]) -> None:
    main_thread().join()
    time.sleep(1.0)  # W&B says good-bye first, or it prints a traceback
    for helper in helpers:
        with suppress(psutil.Error):
            helper.kill()


def _begin_wandb_run(id: str, run_dir: Path, settings: dict[str, Any]) -> Any:
    # W&B reports its own errors over the network even from an offline run: not unless the user says so.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    quiet = wandb.Settings(
        console="off", silent=True, finish_timeout=PATIENCE_SECONDS - 1, finish_timeout_raises=True
    )
    return wandb.init(
        id=id,
        dir=str(run_dir),
        mode=_wandb_mode(),
        resume="allow",
        reinit="create_new",
        project=os.environ.get("WANDB_PROJECT", "lavra"),
        name=os.environ.get("WANDB_NAME", run_dir.name),
        config=settings,
        settings=quiet,
    )


def _wandb_mode() -> Any:
    """None: W&B's own choice, for an environment that holds a mode or a key; else `offline`. Never asks for a login."""
    import wandb

    if "WANDB_API_KEY" in os.environ:
        return None
    mode = os.environ.get("WANDB_MODE", "offline")
    return "offline" if mode in ("online", "shared", "run") and not wandb.login(prompt=False) else mode
