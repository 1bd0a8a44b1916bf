"""The stage DAG over one run directory: reuse, rebuild, continue, and say why.

    plan -> corpus -> tokenizer -> tokens -> pretrain -> evaluate -> report

Every stage is a function `(Run) -> Artifact | None` in `stages.py`. A complete artifact of the same
fingerprint is reused; anything else is built, continuing what an interrupted attempt finished.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lavra import artifact, console
from lavra.artifact import Artifact
from lavra.errors import DivergedError, LavraError, PreflightError, UsageError
from lavra.hardware.probe import free_disk
from lavra.recipe import LoadedRecipe, Recipe, parse_criterion
from lavra.units import format_bytes, format_seconds

STAGES = ("plan", "corpus", "tokenizer", "tokens", "pretrain", "evaluate", "report")
FOLDERS = {"pretrain": "checkpoints", "evaluate": "eval"}
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


@dataclass
class Run:
    """One run in progress: the recipe, its directory, and what is known so far.

    Attributes:
        started: when this attempt began, Unix time; the wall-time budget counts from here.
        force: go on training although changed settings break the data order.
        plan: content of plan.json once the plan stage is done.
        artifacts: complete artifacts by stage.
        built: stages that this process built (not reused).
    """

    loaded: LoadedRecipe
    started: float
    force: bool = False
    plan: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    built: list[str] = field(default_factory=list)

    @property
    def recipe(self) -> Recipe:
        """The settings."""
        return self.loaded.recipe

    @property
    def dir(self) -> Path:
        """The run directory."""
        return self.loaded.run_dir

    def folder(self, stage: str) -> Path:
        """Where a stage's artifact lives."""
        return self.dir / FOLDERS.get(stage, stage)

    def measured(self) -> dict[str, Any]:
        """Content of measured.json (what the run measured, against the plan's predictions)."""
        path = self.dir / "measured.json"
        return artifact.read_json(path) if path.exists() else {"stage_seconds": {}}

    def record(self, **facts: Any) -> None:
        """Merge facts into measured.json."""
        artifact.write_json(self.dir / "measured.json", self.measured() | facts)

    def seconds(self) -> float:
        """Seconds since this attempt began."""
        return time.time() - self.started

    def elapsed(self) -> float:
        """Seconds of this run so far: this attempt, plus stages that earlier attempts finished."""
        earlier = self.measured()["stage_seconds"]
        done_before = sum(
            s for stage, s in earlier.items() if stage not in self.built and stage != "pretrain"
        )
        return self.seconds() + done_before

    def status(self, state: str, **facts: Any) -> None:
        """Write STATUS: state, stage, process, time."""
        record = {
            "state": state,
            "pid": os.getpid(),
            "updated": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        artifact.write_json(self.dir / "STATUS", record | facts)


StageFunction = Callable[[Run], Artifact | None]


def run_pipeline(
    loaded: LoadedRecipe,
    functions: Mapping[str, StageFunction],
    *,
    from_stage: str = "",
    until: str = "report",
    fresh: bool = False,
    force: bool = False,
    started: float | None = None,
) -> Run:
    """Bring a run up to `until`, under the run directory's lock.

    Args:
        functions: what each stage does.
        from_stage: rebuild this stage and everything after it.
        fresh: set the old run directory aside and start anew.
        force: see `Run`.
        started: Unix time that the wall-time budget counts from; None: now.

    Raises:
        LavraError: what a stage reports; the run directory stays resumable.
    """
    for name in (from_stage, until):
        if name and name not in STAGES:
            raise UsageError(f"no stage `{name}`", hint=f"stages: {', '.join(STAGES)}")
    run = Run(loaded, time.time() if started is None else started, force)
    if fresh and run.dir.exists():
        with artifact.run_lock(run.dir):  # never set aside what another process is using
            pass
        kept = artifact.set_aside(run.dir)
        console.say(f"the old run is kept at {kept}; `lavra runs gc` deletes it")
    with artifact.run_lock(run.dir):
        _write_recipe(run)
        if from_stage:
            _invalidate(run, from_stage)
        for stage in STAGES[: STAGES.index(until) + 1]:
            _run_stage(run, stage, functions[stage])
        run.status("complete", stage=until)
    return run


def _run_stage(run: Run, stage: str, function: StageFunction) -> None:
    run.status("running", stage=stage)
    _preflight_disk(run, stage)
    before = run.seconds() if run.built or run.artifacts else 0.0
    try:
        result = function(run)
    except LavraError as error:
        run.status("diverged" if isinstance(error, DivergedError) else "stopped", stage=stage)
        raise
    except BaseException as error:
        run.status("failed", stage=stage, error=f"{type(error).__name__}: {error}")
        raise
    if result is not None:
        run.artifacts[stage] = result
    if stage in run.built:
        seconds = run.measured()["stage_seconds"] | {stage: round(run.seconds() - before, 2)}
        run.record(stage_seconds=seconds)


def build_or_reuse(
    run: Run, stage: str, inputs: dict[str, Any], build: Callable[[Path, dict[str, Any]], Artifact]
) -> Artifact:
    """Reuse the artifact of a stage, or of a part of one, when its inputs are the same, else build it; say why."""
    folder = run.folder(stage)
    decision = artifact.decide(folder, stage, inputs)
    console.say(f"[{format_seconds(run.seconds())}] {stage}: {decision.reason}")
    if decision.reuse is not None:
        return decision.reuse
    if stage in STAGES:
        run.built.append(stage)
    return build(folder, inputs)


def success_results(run: Run) -> list[dict[str, Any]]:
    """Each success criterion of the recipe with its value and whether it holds (None: stage not run)."""
    results = []
    for stage, criteria in run.recipe.success.items():
        summary = run.artifacts[stage].summary if stage in run.artifacts else {}
        for text in criteria:
            metric, comparison, limit = parse_criterion(text)
            value = summary.get(metric)
            passed = None if value is None else _COMPARISONS[comparison](value, limit)
            results.append({"stage": stage, "criterion": text, "value": value, "passed": passed})
    return results


def _write_recipe(run: Run) -> None:
    artifact.remove_leftovers(run.dir)
    artifact.write_bytes(run.dir / "recipe.yaml", run.loaded.text.encode())
    artifact.write_bytes(run.dir / "recipe.resolved.yaml", run.loaded.resolved_yaml().encode())


def _invalidate(run: Run, from_stage: str) -> None:
    for stage in STAGES[STAGES.index(from_stage) :]:
        (run.folder(stage) / artifact.COMPLETE).unlink(missing_ok=True)
        (run.folder(stage) / artifact.IN_PROGRESS).unlink(missing_ok=True)
    if from_stage == "plan":
        (run.dir / "plan.json").unlink(missing_ok=True)


def _preflight_disk(run: Run, stage: str) -> None:
    """The plan's disk estimate must still fit, less what the run directory already holds."""
    if not run.plan or stage == "report":
        return
    used = sum(f.stat().st_size for f in run.dir.rglob("*") if f.is_file())
    need = run.plan["predictions"]["disk_bytes"] - used
    free = free_disk(run.dir)
    if need > free:
        raise PreflightError(
            f"about {format_bytes(need)} more disk needed, {format_bytes(free)} free at {run.dir}",
            where=stage,
            hint="free space, lower corpus.max_bytes, or choose another run_dir=PATH",
        )
