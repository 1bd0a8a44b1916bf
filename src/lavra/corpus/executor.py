"""Work in other processes, which never outlive their parent: one function over many tasks, or one call."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, TypeVar

import pyarrow as pa

from lavra.console import is_quiet, progress, set_quiet
from lavra.errors import LavraError

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")


def map_units(
    function: Callable[[TaskT], None],
    tasks: Sequence[TaskT],
    weights: Sequence[int],
    *,
    workers: int,
    label: str,
) -> None:
    """Call `function` on every task, heaviest first; a bar advances by their weights (bytes).

    Args:
        function: importable by name; leaves its result on disk.
        tasks: picklable.
        weights: bytes of each task.
        workers: processes; 1 runs everything here.
        label: of the progress bar.

    Raises:
        LavraError: a worker died. Exceptions of `function` pass through.
    """
    order = sorted(range(len(tasks)), key=lambda index: (-weights[index], index))
    with progress(label, sum(weights)) as bar:
        if min(workers, len(tasks)) <= 1:
            for index in order:
                function(tasks[index])
                bar.advance(weights[index])
            return
        hint = "if memory ran out: corpus.workers=1; the same command continues"
        with _pool(min(workers, len(tasks)), label, hint) as submit:
            futures = {submit(function, tasks[index]): weights[index] for index in order}
            for future in as_completed(futures):
                future.result()
                bar.advance(futures[future])


def run_apart(function: Callable[..., ResultT], *args: Any, **kwargs: Any) -> ResultT:
    """Call `function` in a process of its own, so that the memory it needs is gone afterwards.

    Args:
        function: importable by name; arguments and result are picklable.

    Raises:
        LavraError: the process died. Exceptions of `function` pass through.
    """
    hint = "if memory ran out: close other programs, then run the same command again"
    with _pool(1, function.__name__, hint) as submit:
        return submit(function, *args, **kwargs).result()


@contextmanager
def _pool(workers: int, label: str, hint: str) -> Iterator[Callable[..., Future]]:
    """Yields `submit`; leaving it by an exception ends the workers within their task."""
    context = multiprocessing.get_context("spawn")
    lifeline, held = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, context, _start_worker, (lifeline, is_quiet()))

    def submit(*call: Any, **kwargs: Any) -> Future:
        with _without_main():  # processes start when work is submitted
            return pool.submit(*call, **kwargs)

    try:
        yield submit
    except BrokenProcessPool as error:
        raise LavraError(f"a worker process died during `{label}`", hint=hint) from error
    except BaseException:
        held.close()  # workers stop now, not after their task
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        held.close()
        lifeline.close()


@contextmanager
def _without_main() -> Iterator[None]:
    """A new process would import the user's script, and run it again where it has no `__main__` guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _start_worker(lifeline: Connection, quiet: bool) -> None:
    """Leave Ctrl-C to the parent, and end with it however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_quiet(quiet)
    pa.set_cpu_count(1)
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()


def _end_with_parent(lifeline: Connection) -> None:
    try:
        lifeline.recv()
    except (EOFError, OSError):
        os._exit(1)
