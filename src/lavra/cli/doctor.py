"""What this machine can do: cores, memory, disk, accelerators, compiler, measured speed; and each fix.

Exit code 3 when something that training needs is missing.
"""

from __future__ import annotations

import argparse

SMALL_MEMORY = 4 << 30
SMALL_DISK = 2 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")


def run(args: argparse.Namespace) -> int:
    """Carry the command out."""
    from pathlib import Path

    from lavra.cli.shared import print_json
    from lavra.console import say
    from lavra.experiment.calibrate import training_device
    from lavra.hardware.measure import copy_gigabytes_per_second, measure_gemm
    from lavra.hardware.probe import free_disk, probe_machine
    from lavra.units import format_bytes

    machine = probe_machine()
    disk = free_disk(Path.cwd())
    device = training_device()
    if not args.json:
        print(f"system       {machine.platform}, {machine.cpu}")
        print(f"cores        {machine.cores}")
        print(
            f"memory       {format_bytes(machine.memory_bytes)}, {format_bytes(machine.available_bytes)} available"
        )
        print(f"disk         {format_bytes(disk)} free here")
        print(f"accelerators {', '.join(machine.accelerators) or 'none: training runs on the CPU'}")
        print(f"compiler     {machine.compiler or 'none'}")
        say("measuring ...")
    gemm, bandwidth = measure_gemm(device), copy_gigabytes_per_second(device)
    fixes = _fixes(machine, disk)
    if args.json:
        facts = machine.as_dict() | {"free_disk_bytes": disk, "device": device.type, "gemm_gflops": gemm}
        print_json(facts | {"copy_gb_per_s": round(bandwidth, 1), "fixes": fixes})
    else:
        for dtype, value in gemm.items():
            print(f"GEMM {dtype}    {value:,.0f} GFLOP/s on {device.type}")
        print(f"copy         {bandwidth:.1f} GB/s")
        faster = "bf16" if gemm["bf16"] > 1.2 * gemm["fp32"] else "fp32"
        print(f"precision    {faster} trains faster here (train.precision=auto chooses it)")
        for fix in fixes:
            print(f"fix          {fix}")
        print("ready: lavra quickstart" if not any(f.startswith("needed") for f in fixes) else "not ready")
    return 3 if any(f.startswith("needed") for f in fixes) else 0


def _fixes(machine, disk: int) -> list[str]:
    from lavra.units import format_bytes

    fixes = []
    if not machine.compiler:
        fixes.append("no C++ compiler: torch.compile stays off; install g++ or clang++ to train faster")
    if machine.memory_bytes < SMALL_MEMORY:
        fixes.append(
            f"{format_bytes(machine.memory_bytes)} memory: keep model.size small; plan refuses what cannot fit"
        )
    if disk < SMALL_DISK:
        fixes.append(
            f"needed: free disk here ({format_bytes(disk)}); quickstart uses up to {format_bytes(SMALL_DISK)}"
        )
    return fixes
