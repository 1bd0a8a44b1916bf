"""Facts about this machine that need no measurement. Imports torch only where it must."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil


@dataclass(frozen=True)
class Machine:
    """One machine as lavra sees it.

    Attributes:
        cores: processors this process may use.
        memory_bytes: physical memory, or the container's limit when that is lower.
        compiler: C++ compiler that torch.compile would call, or "" when none is found.
        accelerators: names of usable devices; empty on a CPU-only machine.
        accelerator_memory_bytes: memory of the first accelerator (0 without one).
    """

    cores: int
    memory_bytes: int
    available_bytes: int
    cpu: str
    platform: str
    compiler: str
    accelerators: tuple[str, ...] = ()
    accelerator_memory_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


def probe_machine() -> Machine:
    """Look at this machine (imports torch to ask for accelerators)."""
    import torch

    names: tuple[str, ...] = ()
    device_memory = 0
    if torch.cuda.is_available():
        names = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        device_memory = torch.cuda.get_device_properties(0).total_memory
    memory = psutil.virtual_memory()
    limit = _container_limit()
    return Machine(
        cores=usable_cores(),
        memory_bytes=min(memory.total, limit),
        available_bytes=min(memory.available, limit),
        cpu=_cpu_name(),
        platform=f"{platform.system()} {platform.machine()}",
        compiler=find_compiler(),
        accelerators=names,
        accelerator_memory_bytes=device_memory,
    )


def usable_cores() -> int:
    """Processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def find_compiler() -> str:
    """Path of the C++ compiler torch.compile would use (`CXX` first), or ""."""
    candidates = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    return next((found for name in candidates if name and (found := shutil.which(name))), "")


def free_disk(path: Path) -> int:
    """Free bytes on the file system that holds `path` or its nearest existing parent."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def release_memory() -> None:
    """Give freed memory back to the system (glibc and Arrow keep it otherwise), before a long stage."""
    import ctypes
    import gc

    gc.collect()
    if (arrow := sys.modules.get("pyarrow")) is not None:
        arrow.default_memory_pool().release_unused()
    with contextlib.suppress(OSError, AttributeError):  # not glibc: nothing to trim
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Let training reuse its buffers: glibc would unmap each large one and take page faults at every step.

    Measured 1.2 times the speed of a plain eager step (docs/lab-log.md). Does nothing where the C library is another.
    """
    import ctypes

    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # malloc.h
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        if not libc.mallopt(mmap_threshold, 1 << 30):
            libc.mallopt(mmap_threshold, 32 << 20)  # the most that old glibc takes
        libc.mallopt(trim_threshold, (1 << 31) - 1)
        libc.mallopt(top_pad, 64 << 20)


def _container_limit() -> int:
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(file).read_text())
        except (OSError, ValueError):
            continue
    return sys.maxsize


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
