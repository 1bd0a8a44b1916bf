"""What the model wrote on the way: noise turning to words."""

from __future__ import annotations

import re
from typing import Any

from lavra.report.run import Run, TextFile

MAX_SHOWN = 40  # files in the fold-out list
_STEP = re.compile(r"step-0*(\d+)\.md")


def view(run: Run) -> dict[str, Any]:
    """Context of the section "Samples"."""
    names = sample_names(run)
    if not names:
        return run.missing("samples/", "pretrain")
    shown = names if len(names) <= MAX_SHOWN else spread(names, MAX_SHOWN)
    files = {name: file for name in shown if (file := run.text(f"samples/{name}"))}
    return {
        "picked": [labelled(files[name]) for name in spread(list(files), 3)],
        "all": [labelled(file) for file in files.values()] if len(files) > 3 else [],
        "left_out": len(names) - len(shown),
    }


def sample_names(run: Run) -> list[str]:
    """File names in training order; those without a step (such as `final.md`) come last."""
    folder = run.folder / "samples"
    names = [file.name for file in folder.glob("*.md") if file.is_file()] if folder.is_dir() else []
    return sorted(names, key=lambda name: (step_of(name) is None, step_of(name) or 0, name))


def step_of(name: str) -> int | None:
    """`step-00000100.md` -> 100."""
    match = _STEP.fullmatch(name)
    return int(match[1] or "0") if match else None


def spread(names: list[str], count: int) -> list[str]:
    """`count` of them at equal distances, first and last included."""
    if len(names) <= count:
        return names
    return [names[round(i * (len(names) - 1) / (count - 1))] for i in range(count)]


def labelled(file: TextFile) -> dict[str, Any]:
    """A sample with its caption."""
    name = file.name.rpartition("/")[2]
    step = step_of(name)
    return {"caption": f"step {step:,}" if step is not None else name.removesuffix(".md"), "file": file}
