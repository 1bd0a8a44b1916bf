"""Runs from raw text to report: what is reused, rebuilt, set aside and continued."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lavra import metrics
from lavra.artifact import open_artifact, read_json
from lavra.cli.main import main
from lavra.pipeline import FOLDERS, STAGES, Run
from lavra.recipe import load_recipe
from lavra.stages import run_recipe

BUILT = ["plan", "corpus", "tokenizer", "tokens", "pretrain", "evaluate", "report"]


def recipe_of(trained: Run) -> Path:
    return trained.dir.parent.parent / "tiny.yaml"


@pytest.fixture
def bring_up(trained: Run, tmp_path: Path) -> Callable[..., Run]:
    """`bring_up(*overrides, **options)`: the tiny recipe in a run directory of its own."""

    def run(*overrides: str, **options: Any) -> Run:
        arguments = [f"run_dir={tmp_path}/run", *overrides]
        return run_recipe(load_recipe(str(recipe_of(trained)), arguments, {}), **options)

    return run


@pytest.fixture
def copied(trained: Run, tmp_path: Path) -> Path:
    """A copy of the finished run, where `bring_up` looks."""
    shutil.copytree(trained.dir, tmp_path / "run")
    return tmp_path / "run"


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def weights(run_dir: Path) -> bytes:
    """The final weights."""
    return max((run_dir / "checkpoints").glob("step-*/model.safetensors")).read_bytes()


def exit_code(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


# --- end to end ---------------------------------------------------------------------------------


def test_raw_text_becomes_a_measured_model_and_a_report(trained: Run) -> None:
    assert trained.built == BUILT
    for stage in ("corpus", "tokenizer", "tokens", "pretrain", "evaluate"):
        opened = open_artifact(trained.dir / FOLDERS.get(stage, stage), stage)
        assert opened.fingerprint == trained.artifacts[stage].fingerprint
    log = list(metrics.read_jsonl(trained.dir / "metrics.jsonl"))
    steps = trained.plan["horizon"]["steps"]
    assert [record["step"] for record in log] == list(range(1, steps + 1))
    assert log[-1][metrics.TRAIN_LOSS] < log[0][metrics.TRAIN_LOSS] - 0.5
    assert read_json(trained.dir / "STATUS")["state"] == "complete"
    assert "<html" in (trained.dir / "report.html").read_text()
    assert (trained.dir / "recipe.yaml").read_bytes() == recipe_of(trained).read_bytes()


def test_every_stage_is_timed_and_every_prediction_has_its_measurement(trained: Run) -> None:
    measured = trained.measured()
    assert set(measured["stage_seconds"]) == set(BUILT)
    assert all(seconds >= 0 for seconds in measured["stage_seconds"].values())
    assert set(trained.plan["predictions"]) <= set(measured)
    assert measured["parameters"] == trained.plan["predictions"]["parameters"]


def test_the_resolved_recipe_reproduces_the_decisions(trained: Run, tmp_path: Path) -> None:
    resolved = load_recipe(str(trained.dir / "recipe.resolved.yaml"), [f"run_dir={tmp_path}/again"], {})
    again = run_recipe(resolved, until="corpus")
    assert again.plan["decisions"] == trained.plan["decisions"]
    assert again.plan["fingerprint"] == trained.plan["fingerprint"]
    assert again.artifacts["corpus"].fingerprint == trained.artifacts["corpus"].fingerprint


# --- reuse and rebuild --------------------------------------------------------------------------


def test_the_same_command_again_builds_nothing_and_changes_no_artifact(copied: Path, bring_up) -> None:
    before = {stage: files(copied / FOLDERS.get(stage, stage)) for stage in BUILT[1:-1]}
    again = bring_up()
    assert again.built == []
    assert {stage: files(copied / FOLDERS.get(stage, stage)) for stage in before} == before


def test_another_learning_rate_trains_again_and_keeps_text_tokens_and_old_weights(
    copied: Path, bring_up
) -> None:
    old = files(copied / "checkpoints")
    tokens = files(copied / "tokens")
    again = bring_up("train.learning_rate=1e-3")
    assert again.built == ["plan", "pretrain", "evaluate", "report"]
    assert files(copied / "checkpoints.old-1") == old
    assert files(copied / "tokens") == tokens
    assert read_json(copied / "plan.json")["decisions"]["learning_rate"] == 1e-3


@pytest.mark.parametrize(
    ("override", "built"),
    [
        ("success.evaluate=[bits_per_byte < 99]", []),
        ("name=other", []),
        ("train.log_every=2", []),
        ("train.profile=3", []),
        ("corpus.validation_fraction=0.1", BUILT[:-1]),
    ],
)
def test_a_setting_rebuilds_only_what_depends_on_it(
    copied: Path, bring_up, override: str, built: list[str]
) -> None:
    again = bring_up(override)
    assert [stage for stage in again.built if stage != "report"] == built


def test_new_text_is_seen_by_the_next_run_of_the_same_process(
    write_project, tmp_path: Path, no_measuring
) -> None:
    recipe = write_project(tmp_path, documents=6)
    first = run_recipe(load_recipe(str(recipe), environment={}), until="corpus")
    (tmp_path / "text/new.txt").write_text((tmp_path / "text/00000.txt").read_text() + "\nAnd one line more.")
    second = run_recipe(load_recipe(str(recipe), environment={}), until="corpus")
    assert second.built == ["plan", "corpus"]
    counts = [run.artifacts["corpus"].summary["documents_in"] for run in (first, second)]
    assert counts == [6, 7]


def test_trackers_and_a_profile_watch_a_run_and_change_nothing(copied: Path, bring_up, trained: Run) -> None:
    """Oracle: the run that nobody watched."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    watched = ("train.trackers=[tensorboard]", "train.profile=7-7")
    assert bring_up(*watched).built == []
    again = bring_up(*watched, from_stage="pretrain")
    assert again.built == ["pretrain", "evaluate", "report"]
    assert weights(copied) == weights(trained.dir)
    board = accumulator.EventAccumulator(str(copied / "tensorboard")).Reload()
    for name in (metrics.TRAIN_LOSS, metrics.VALIDATION_LOSS):
        recorded = [(r["step"], r[name]) for r in metrics.read_jsonl(copied / "metrics.jsonl") if name in r]
        shown = [(e.step, e.value) for e in board.Scalars(name)]
        assert shown == [(step, pytest.approx(value, rel=1e-6)) for step, value in recorded]
    samples = {int(p.stem.split("-")[1]): p.read_text() for p in (copied / "samples").iterdir()}
    texts = {e.step: e.tensor_proto.string_val[0].decode() for e in board.Tensors("sample")}
    assert texts.keys() == samples.keys() and all(texts[step] in samples[step] for step in texts)
    assert (copied / "profile/steps-7-7.trace.json.gz").exists()


def test_from_a_stage_rebuilds_it_and_all_after_it_to_the_same_bytes(copied: Path, bring_up) -> None:
    before = {name: files(copied / name) for name in ("corpus", "tokens")}
    old, old_checkpoints = weights(copied), files(copied / "checkpoints")
    again = bring_up(from_stage="tokens")
    assert again.built == ["tokens", "pretrain", "evaluate", "report"]
    assert {name: files(copied / name) for name in before} == before
    assert weights(copied) == old
    kept = files(copied / "checkpoints.old-1")
    assert kept.items() <= old_checkpoints.items() and any("model.safetensors" in name for name in kept)


def test_until_a_stage_stops_there_and_the_next_call_goes_on(bring_up, tmp_path: Path) -> None:
    assert bring_up(until="tokenizer").built == ["plan", "corpus", "tokenizer"]
    assert not (tmp_path / "run/tokens").exists()
    assert bring_up(until="tokens").built == ["tokens"]
    assert not (tmp_path / "run/checkpoints").exists()


def test_fresh_sets_the_old_run_aside_whole_and_starts_anew(copied: Path, bring_up) -> None:
    old = files(copied)
    again = bring_up(fresh=True, until="corpus")
    assert again.built == ["plan", "corpus"]
    kept = files(copied.with_name("run.old-1"))
    del old[".lock"], kept[".lock"]
    assert kept == old
    bring_up(fresh=True, until="plan")
    assert copied.with_name("run.old-2").is_dir()


def test_fresh_without_an_old_run_sets_nothing_aside(bring_up, tmp_path: Path) -> None:
    bring_up(fresh=True, until="plan")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_damaged_artifact_is_rebuilt_to_the_same_bytes_and_what_follows_is_reused(
    copied: Path, bring_up
) -> None:
    before = files(copied / "tokens")
    (copied / "tokens/train-00000-000.tokens").write_bytes(b"")
    assert bring_up(until="evaluate").built == ["tokens"]
    assert files(copied / "tokens") == before


def test_the_wall_time_of_a_library_call_counts_from_the_call_not_from_the_session(
    bring_up, monkeypatch
) -> None:
    monkeypatch.setattr("psutil.Process.create_time", lambda self: 0.0)
    assert bring_up(until="plan").plan["predictions"]["stage_seconds"]["plan"] < 100
    begun = bring_up("seed=1", until="plan", started=time.time() - 1000)
    assert 1000 <= begun.plan["predictions"]["stage_seconds"]["plan"] < 1100


# --- success criteria ---------------------------------------------------------------------------


def test_a_criterion_that_fails_sets_the_exit_code_and_is_written_down(copied: Path, trained: Run) -> None:
    criteria = "success.evaluate=[bits_per_byte < 0.1, bits_per_byte > 0.1]"
    assert exit_code("run", recipe_of(trained), f"run_dir={copied}", criteria) == 1
    bits = trained.artifacts["evaluate"].summary["bits_per_byte"]
    assert read_json(copied / "success.json") == [
        {"stage": "evaluate", "criterion": "bits_per_byte < 0.1", "value": bits, "passed": False},
        {"stage": "evaluate", "criterion": "bits_per_byte > 0.1", "value": bits, "passed": True},
    ]
    assert (
        exit_code("run", recipe_of(trained), f"run_dir={copied}", "success.evaluate=[bits_per_byte > 0.1]")
        == 0
    )


def test_a_criterion_of_a_stage_that_did_not_run_is_not_judged(copied: Path, trained: Run) -> None:
    criterion = "success.evaluate=[bits_per_byte < 0.1]"
    assert exit_code("run", recipe_of(trained), f"run_dir={copied}", criterion, "--until", "tokens") == 0


# --- interruption -------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_stopped_run_continues_to_the_same_bits(
    trained: Run, tmp_path: Path, stop_at, number: int, code: int
) -> None:
    """Oracle: the uninterrupted run of the same plan."""
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(trained.dir / "plan.json", run)
    for stage in ("corpus", "tokenizer", "tokens"):
        shutil.copytree(trained.dir / stage, run / stage)
    command = ("run", recipe_of(trained), f"run_dir={run}")
    handlers = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    with stop_at(7, number):
        assert exit_code(*command) == code
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert read_json(run / "STATUS")["state"] == "stopped"
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000007"]
    assert not (run / "checkpoints/COMPLETE").exists()
    assert exit_code(*command) == 0
    assert weights(run) == weights(trained.dir)
    for name in ("train/loss", "train/lr", "train/grad_norm", "val/loss"):
        both = [[r.get(name) for r in metrics.read_jsonl(d / "metrics.jsonl")] for d in (run, trained.dir)]
        assert both[0] == both[1], name
    assert files(run / "eval") == files(trained.dir / "eval")


def test_a_run_without_a_plan_decides_and_trains_to_the_same_bits(
    trained: Run, bring_up, tmp_path: Path
) -> None:
    bring_up(until="pretrain")
    assert weights(tmp_path / "run") == weights(trained.dir)


# --- continuing another run ---------------------------------------------------------------------


def test_a_run_can_start_from_another_runs_weights_and_tokenizer(
    trained: Run, tmp_path: Path, write_project
) -> None:
    recipe = write_project(tmp_path, seed=0, documents=31)
    options = ("--init-from", trained.dir, "model.d_model=auto", "tokenizer.vocab_size=auto", "--quiet")
    assert exit_code("pretrain", recipe, *options) == 0
    run = tmp_path / "runs/tiny"
    assert (run / "tokenizer/tokenizer.json").read_bytes() == (
        trained.dir / "tokenizer/tokenizer.json"
    ).read_bytes()
    assert read_json(run / "plan.json")["decisions"]["model"] == trained.plan["decisions"]["model"]
    first = next(metrics.read_jsonl(run / "metrics.jsonl"))
    theirs = list(metrics.read_jsonl(trained.dir / "metrics.jsonl"))
    assert first[metrics.TRAIN_LOSS] < theirs[0][metrics.TRAIN_LOSS] - 0.5
    assert first[metrics.TRAIN_LOSS] == pytest.approx(theirs[-1][metrics.TRAIN_LOSS], abs=0.5)


# --- generate -----------------------------------------------------------------------------------


def test_greedy_text_of_a_run_is_the_same_each_time_and_begins_with_the_prompt(trained: Run, capsys) -> None:
    command = ("generate", trained.dir, "--prompt", "Abc", "--temperature", "0", "--max-tokens", "8")
    texts = []
    for _ in range(2):
        assert exit_code(*command) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith("Abc") and len(texts[0]) > 4


def test_a_stage_summary_is_machine_readable(trained: Run, copied: Path, capsys) -> None:
    assert exit_code("evaluate", recipe_of(trained), f"run_dir={copied}", "--json", "--quiet") == 0
    assert json.loads(capsys.readouterr().out) == dict(trained.artifacts["evaluate"].summary)


def test_stages_run_in_the_order_of_the_data_flow() -> None:
    assert list(STAGES) == BUILT
