"""Run one function over many tasks in worker processes that never outlive their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import TypeVar

import pyarrow as pa

from lavra.console import progress
from lavra.errors import LavraError

TaskT = TypeVar("TaskT")


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
        context = multiprocessing.get_context("spawn")
        lifeline, held = context.Pipe(duplex=False)
        pool = ProcessPoolExecutor(min(workers, len(tasks)), context, _start_worker, (lifeline,))
        try:
            futures = {pool.submit(function, tasks[index]): weights[index] for index in order}
            for future in as_completed(futures):
                future.result()
                bar.advance(futures[future])
        except BrokenProcessPool as error:
            raise LavraError(
                f"a worker process died during `{label}`",
                hint="if memory ran out: corpus.workers=1; the same command continues",
            ) from error
        except BaseException:
            held.close()  # workers stop now, not after their unit
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            held.close()
            lifeline.close()


def _start_worker(lifeline: Connection) -> None:
    """Leave Ctrl-C to the parent, and end with it however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pa.set_cpu_count(1)
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()


def _end_with_parent(lifeline: Connection) -> None:
    try:
        lifeline.recv()
    except (EOFError, OSError):
        os._exit(1)
