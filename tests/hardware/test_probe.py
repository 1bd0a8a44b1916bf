"""Oracles: the operating system's own answers."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from lavra.hardware import probe
from lavra.hardware.probe import find_compiler, free_disk, probe_machine, usable_cores


def test_cores_are_those_that_this_process_may_use() -> None:
    counted = "from lavra.hardware.probe import usable_cores; print(usable_cores())"
    command = ["taskset", "-c", "0", sys.executable, "-c", counted]
    if shutil.which("taskset"):
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "1\n"
    assert usable_cores() == len(psutil.Process().cpu_affinity())


def test_the_compiler_named_by_the_environment_comes_first(monkeypatch, tmp_path: Path) -> None:
    mine = tmp_path / "my-compiler"
    mine.write_text("#!/bin/sh\n")
    mine.chmod(0o755)
    monkeypatch.setenv("CXX", str(mine))
    assert find_compiler() == str(mine)
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compiler() == ""


def test_free_disk_of_a_folder_that_does_not_exist_yet_is_that_of_its_parent(tmp_path: Path) -> None:
    asked = free_disk(tmp_path / "not/yet")
    assert asked == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.05)


def test_a_container_limit_bounds_the_memory(monkeypatch) -> None:
    monkeypatch.setattr(probe, "_container_limit", lambda: 1 << 20)
    machine = probe_machine()
    assert machine.memory_bytes == machine.available_bytes == 1 << 20
    monkeypatch.setattr(probe, "_container_limit", lambda: sys.maxsize)
    assert probe_machine().memory_bytes == psutil.virtual_memory().total


FAULTS = """
import resource, sys, torch
from lavra.hardware.probe import keep_freed_memory, release_memory
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    keep_freed_memory()
def work():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.zeros(16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
work()
print(work())
import psutil
held = psutil.Process().memory_info().rss
release_memory()
print(held - psutil.Process().memory_info().rss)
"""


def is_glibc() -> bool:
    try:
        return bool(ctypes.CDLL(None).gnu_get_libc_version)
    except (OSError, AttributeError):
        return False


@pytest.mark.skipif(not is_glibc(), reason="another C library: both functions do nothing")
def test_freed_memory_is_kept_for_the_next_step_and_given_back_when_asked() -> None:
    def run(mode: str) -> tuple[int, int]:
        command = [sys.executable, "-c", FAULTS, mode]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
        output = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        faults, released = output.split()
        return int(faults), int(released)

    kept, released = run("keep")
    assert kept < 100 < run("plain")[0]
    assert released > 50 << 20


def test_names_are_those_of_the_platform() -> None:
    assert probe_machine().platform == f"{platform.system()} {platform.machine()}"
    assert probe_machine().cpu
