"""Kill -9 at any moment costs time, never data: the run ends with the bytes of an uninterrupted one."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lavra import metrics
from lavra.artifact import COMPLETE, file_hash, open_artifact, read_json
from lavra.pipeline import FOLDERS, STAGES
from lavra.recipe import load_recipe
from lavra.stages import run_recipe

# Where each kill is aimed: (stage, longest wait in seconds once it has begun).
TARGETS = (
    ("corpus", 0.5),
    ("corpus", 2.0),
    ("corpus", 3.0),
    ("tokenizer", 0.5),
    ("tokens", 1.0),
    ("pretrain", 0.5),
    ("pretrain", 1.0),
    ("pretrain", 1.5),
    ("evaluate", 1.0),
    ("report", 0.3),
)
OVERRIDES = (
    "corpus.workers=2",
    "train.checkpoint_every=0.2s",
    "budget.tokens=40k",
    "evaluate.max_bytes=60kB",
)


def start(recipe: Path, run: Path) -> subprocess.Popen:
    log = open(run.with_suffix(".log"), "ab")  # noqa: SIM115 - the child's
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LAVRA__")}
    command = [sys.executable, "-m", "lavra", "run", str(recipe), f"run_dir={run}", *OVERRIDES]
    with log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def stage_of(process: subprocess.Popen, run: Path) -> str:
    """The stage that this very process is in, or ""."""
    try:
        status = json.loads((run / "STATUS").read_bytes())
    except FileNotFoundError:
        return ""
    return status.get("stage", "") if status["pid"] == process.pid else ""


def kill_in(process: subprocess.Popen, run: Path, stage: str, wait: float) -> str | None:
    """Kill once `stage` (or a later one) has begun `wait` seconds ago -> stage hit; None: it ended before."""
    log = run / "metrics.jsonl"
    before = log.stat().st_mtime_ns if log.exists() else 0
    while process.poll() is None:
        reached = stage_of(process, run)
        training = log.exists() and log.stat().st_mtime_ns > before  # torch is imported, steps are made
        if reached == stage == "pretrain" and not training:
            pass
        elif reached and STAGES.index(reached) >= STAGES.index(stage):
            time.sleep(wait)
            break
        time.sleep(0.005)
    process.kill()
    return None if process.wait() == 0 else stage_of(process, run)


def assert_nothing_complete_is_damaged(run: Path) -> None:
    for stage in STAGES[1:-1]:
        folder = run / FOLDERS.get(stage, stage)
        if (folder / COMPLETE).exists():
            open_artifact(folder, stage)
            assert_hashes(folder)
    for marker in run.glob("checkpoints*/step-*/COMPLETE"):
        assert_hashes(marker.parent)


def assert_hashes(folder: Path) -> None:
    for name, facts in read_json(folder / COMPLETE)["files"].items():
        assert file_hash(folder / name) == facts["blake2b"], f"{folder / name}"


def results(run: Path) -> dict[str, bytes]:
    """Corpus parts, tokenizer, token shards, final weights, evaluation: by name."""
    last = max((run / "checkpoints").glob("step-*/model.safetensors"))
    paths = [*run.glob("corpus/*/*.parquet"), *run.glob("tokenizer/*.json"), *run.glob("tokens/*-*"), last]
    paths += [run / "corpus/accounting.json", run / "eval/results.json"]
    return {str(path.relative_to(run)): path.read_bytes() for path in paths}


def losses(run: Path) -> list[tuple[int, float]]:
    return [
        (record["step"], record[metrics.TRAIN_LOSS]) for record in metrics.read_jsonl(run / "metrics.jsonl")
    ]


@pytest.mark.slow
def test_ten_kills_over_all_stages_end_in_the_bytes_of_an_uninterrupted_run(
    tmp_path: Path, write_project, no_measuring
) -> None:
    recipe = write_project(tmp_path / "project", documents=2500)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_recipe(load_recipe(str(recipe), [f"run_dir={whole}", *OVERRIDES], {}), until="plan")
    killed.mkdir()
    shutil.copy(whole / "plan.json", killed)
    assert start(recipe, whole).wait() == 0, whole.with_suffix(".log").read_text()

    chosen = random.Random(20240229)
    hit: list[str] = []
    resumable = 0
    for stage, longest in TARGETS:
        landed = kill_in(start(recipe, killed), killed, stage, chosen.uniform(0, longest))
        assert_nothing_complete_is_damaged(killed)
        hit += [landed] if landed else []
        training = not (killed / "checkpoints" / COMPLETE).exists()
        resumable += training and any(killed.glob("checkpoints/step-*/COMPLETE"))
        print(f"aimed at {stage}, hit {landed or 'nothing: the run was over'}")
    while len(hit) < len(TARGETS):
        hit.append(kill_in(start(recipe, killed), killed, "plan", chosen.uniform(0, 0.2)) or "")
        assert_nothing_complete_is_damaged(killed)
    assert {"corpus", "tokens", "pretrain"} <= set(hit), hit
    assert resumable, "no kill left a checkpoint to continue from"

    assert start(recipe, killed).wait() == 0, killed.with_suffix(".log").read_text()
    assert_nothing_complete_is_damaged(killed)
    assert results(killed).keys() == results(whole).keys()
    assert [name for name, data in results(whole).items() if results(killed)[name] != data] == []
    assert losses(killed) == losses(whole)
    assert not list(killed.rglob("*.tmp-*"))
    assert not list(tmp_path.glob("killed*old*")), "a kill must not look like changed settings"
