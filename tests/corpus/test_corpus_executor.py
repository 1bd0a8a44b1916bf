"""Workers: their death is an error with advice, Ctrl-C ends them."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from lavra.corpus.executor import map_units, run_apart
from lavra.errors import LavraError, PreflightError
from lavra.tokenizer.bpe import load_tokenizer


@pytest.mark.parametrize("workers", [1, 2])
def test_every_task_runs_once(tmp_path, workers):
    for i in range(5):
        (tmp_path / str(i)).mkdir()
    folders = [str(tmp_path / str(i)) for i in range(5)]
    map_units(os.rmdir, folders, [1] * 5, workers=workers, label="test")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("workers", [1, 2])
def test_an_exception_of_a_task_reaches_the_caller(tmp_path, workers):
    with pytest.raises(FileNotFoundError):
        map_units(os.rmdir, [str(tmp_path / "a"), str(tmp_path / "b")], [1, 1], workers=workers, label="test")


def test_a_worker_that_dies_is_an_error_with_advice():
    with pytest.raises(LavraError, match="a worker process died during `test`") as error:
        map_units(os._exit, [3, 3], [1, 1], workers=2, label="test")
    assert "workers=1" in error.value.hint


def test_ctrl_c_ends_the_workers_within_their_task():
    before = set(psutil.Process().children(recursive=True))
    # A shell starts background jobs with Ctrl-C ignored; then Python raises no KeyboardInterrupt by itself.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            map_units(time.sleep, [600, 600], [1, 1], workers=2, label="test")
    finally:
        signal.signal(signal.SIGINT, previous)
    workers = [
        child
        for child in set(psutil.Process().children(recursive=True)) - before
        if "spawn_main" in " ".join(child.cmdline())
    ]
    assert psutil.wait_procs(workers, timeout=30)[1] == []


def test_a_call_apart_returns_its_result_or_its_exception_from_another_process(tmp_path):
    assert run_apart(os.getpid) != os.getpid()
    with pytest.raises(FileNotFoundError):
        run_apart(os.rmdir, str(tmp_path / "gone"))
    with pytest.raises(PreflightError) as error:
        run_apart(load_tokenizer, tmp_path / "gone.json")
    assert str(tmp_path / "gone.json") in error.value.what and error.value.hint
    with pytest.raises(LavraError, match="a worker process died during `_exit`"):
        run_apart(os._exit, 3)


SCRIPT = """
import os
from lavra.corpus.executor import map_units, run_apart
print("script runs")
assert run_apart(os.getpid) != os.getpid()
map_units(os.rmdir, ["a", "b"], [1, 1], workers=2, label="test")
"""


def test_a_script_without_a_main_guard_is_not_run_again_by_the_workers(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "script runs\n"), done.stderr
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_heavy_tasks_start_first(tmp_path):
    order = []
    map_units(order.append, ["light", "heavy", "middle"], [1, 9, 5], workers=1, label="test")
    assert order == ["heavy", "middle", "light"]
    shutil.rmtree(tmp_path)
