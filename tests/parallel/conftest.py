"""One helper that runs a function on several gloo processes."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

SECONDS = 60  # a fault must fail, not hang


def _process(
    rank: int, size: int, store: str, results: Any, function: Callable[..., Any], args: tuple
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=size,
            timeout=datetime.timedelta(seconds=SECONDS),
        )  # fmt: skip
        results.put((rank, function(rank, *args), ""))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    finally:
        results.close()
        results.join_thread()
        os._exit(0)  # no cleanup of the parent's objects in a forked child


@pytest.fixture
def ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """`ranks(size, function, *args)` -> each rank's `function(rank, *args)`; fails with the first traceback."""

    def run(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        fork = multiprocessing.get_context("fork")  # no import of torch in every process
        results = fork.Queue()
        store = tmp_path / f"store-{os.urandom(4).hex()}"
        processes = [
            fork.Process(target=_process, args=(rank, size, str(store), results, function, args))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        answers = sorted((results.get(timeout=2 * SECONDS) for _ in processes), key=lambda a: a[0])
        for process in processes:
            process.join()
        for rank, _, error in answers:
            assert not error, f"rank {rank}:\n{error}"
        return [answer for _, answer, _ in answers]

    return run
