"""A recipe that changes while its model is half trained: what takes effect, what is ignored, what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lavra import metrics
from lavra.artifact import read_json
from lavra.console import set_quiet
from lavra.errors import PreflightError, RequeueError
from lavra.pipeline import Run
from lavra.recipe import load_recipe
from lavra.resume import find_changes
from lavra.stages import run_recipe

STOPPED = 7  # steps of the half-trained run


@pytest.fixture(scope="session")
def half_trained(trained: Run, tmp_path_factory, stop_at) -> Path:
    """A run directory whose training was stopped after step 7."""
    folder = tmp_path_factory.mktemp("half") / "run"
    folder.mkdir()
    shutil.copy(trained.dir / "plan.json", folder)
    for stage in ("corpus", "tokenizer", "tokens"):
        shutil.copytree(trained.dir / stage, folder / stage)
    with stop_at(STOPPED), pytest.raises(RequeueError):
        run_recipe(load_recipe(str(recipe_of(trained)), [f"run_dir={folder}"], {}))
    return folder


def recipe_of(trained: Run) -> Path:
    return trained.dir.parent.parent / "tiny.yaml"


@pytest.fixture
def go_on(trained: Run, half_trained: Path, tmp_path: Path) -> Callable[..., Run]:
    """`go_on(*overrides, **options)`: resume a copy of the half-trained run with other settings."""
    shutil.copytree(half_trained, tmp_path / "run")

    def run(*overrides: str, **options: Any) -> Run:
        arguments = [f"run_dir={tmp_path}/run", *overrides]
        return run_recipe(load_recipe(str(recipe_of(trained)), arguments, {}), until="pretrain", **options)

    return run


def log(folder: Path) -> list[dict[str, Any]]:
    return list(metrics.read_jsonl(folder / "metrics.jsonl"))


def values(folder: Path, name: str) -> list[float]:
    return [record[name] for record in log(folder)]


def test_another_learning_rate_takes_effect_from_the_checkpoint_on_and_is_recorded(
    trained: Run, go_on, capsys
) -> None:
    set_quiet(False)
    run = go_on("train.learning_rate=1e-4")
    assert "train.learning_rate: auto -> 0.0001 takes effect" in capsys.readouterr().err
    losses, rates = values(run.dir, metrics.TRAIN_LOSS), values(run.dir, metrics.LEARNING_RATE)
    usual_losses, usual = values(trained.dir, metrics.TRAIN_LOSS), values(trained.dir, metrics.LEARNING_RATE)
    assert losses[: STOPPED + 1] == usual_losses[: STOPPED + 1]  # the next loss is that of the checkpoint
    assert losses[STOPPED + 1 :] != usual_losses[STOPPED + 1 :]
    ratio = 1e-4 / trained.plan["decisions"]["learning_rate"]
    assert rates[:STOPPED] == usual[:STOPPED]
    assert rates[STOPPED:] == pytest.approx([rate * ratio for rate in usual[STOPPED:]])
    assert len(rates) == trained.plan["horizon"]["steps"]
    events = [e for e in metrics.read_jsonl(run.dir / "events.jsonl") if e["kind"] == "settings"]
    assert [(e["step"], e["text"]) for e in events] == [(STOPPED, "train.learning_rate auto -> 0.0001")]


def test_the_result_of_a_changed_run_has_its_own_fingerprint_and_is_reused(trained: Run, go_on) -> None:
    first = go_on("train.learning_rate=1e-4")
    again = go_on("train.learning_rate=1e-4")
    assert again.built == []
    fingerprints = {r.artifacts["pretrain"].fingerprint for r in (first, again)}
    whole = load_recipe(str(recipe_of(trained)), [f"run_dir={first.dir}-2", "train.learning_rate=1e-4"], {})
    fingerprints |= {run_recipe(whole, until="pretrain").artifacts["pretrain"].fingerprint}
    assert len(fingerprints) == 2, "half of it was trained with another rate"


def test_a_longer_budget_moves_the_last_step(trained: Run, go_on) -> None:
    run = go_on("budget.tokens=4000")
    steps = -(-4000 // trained.plan["decisions"]["batch_tokens"])
    assert steps > trained.plan["horizon"]["steps"]
    rates = values(run.dir, metrics.LEARNING_RATE)
    assert [r["step"] for r in log(run.dir)] == list(range(1, steps + 1))
    assert rates[-1] == min(rates[STOPPED:]), "the decay ends where the horizon is now"
    assert run.plan["horizon"]["tokens"] == steps * trained.plan["decisions"]["batch_tokens"]


def test_a_budget_that_is_used_up_already_is_refused(go_on) -> None:
    with pytest.raises(PreflightError, match="ends at step 4; training is past step 7"):
        go_on("budget.tokens=500")


@pytest.mark.parametrize(
    "override", ["seed=3", "tokens.mixture={text: 1}", "train.batch_tokens=64", "tokens.packing=best_fit"]
)
def test_a_change_that_breaks_the_data_order_is_refused_unless_forced(
    go_on, half_trained: Path, tmp_path: Path, override: str
) -> None:
    with pytest.raises(PreflightError, match="breaks the data order") as refused:
        go_on(override)
    assert override.split("=")[0] in refused.value.what and "--force" in refused.value.hint
    kept = [p.name for p in (tmp_path / "run/checkpoints").glob("step-*/COMPLETE")]
    assert len(kept) == 1 and read_json(tmp_path / "run/plan.json") == read_json(half_trained / "plan.json")
    run = go_on(override, force=True)
    assert values(run.dir, metrics.TRAIN_LOSS)[:STOPPED] == values(half_trained, metrics.TRAIN_LOSS)[:STOPPED]
    assert log(run.dir)[-1]["step"] == run.plan["horizon"]["steps"]
    assert not (tmp_path / "run/checkpoints.old-1").exists()


@pytest.mark.parametrize(
    "override", ["model.d_model=64", "tokenizer.vocab_size=290", "train.optimizer=lion", "tokens.seq_len=16"]
)
def test_another_model_needs_a_new_start_even_when_forced(go_on, tmp_path: Path, override: str) -> None:
    with pytest.raises(PreflightError, match="needs a new start") as refused:
        go_on(override, force=True)
    assert "--from plan" in refused.value.hint
    run = go_on(override, from_stage="plan")
    assert len(log(run.dir)) == run.plan["horizon"]["steps"]
    assert list((tmp_path / "run/checkpoints.old-1").glob("step-*/COMPLETE"))


def test_another_text_needs_a_new_start(
    write_project, tmp_path: Path, half_trained: Path, trained: Run
) -> None:
    recipe = write_project(tmp_path / "elsewhere", seed=4)
    shutil.copytree(half_trained, tmp_path / "run")
    with pytest.raises(PreflightError, match="sources: as they were -> other content needs a new start"):
        run_recipe(load_recipe(str(recipe), [f"run_dir={tmp_path}/run"], {}))


def test_watching_settings_change_without_a_word(trained: Run, go_on, capsys) -> None:
    set_quiet(False)
    run = go_on("train.log_every=2", "train.keep_every=4", "name=other")
    assert "takes effect" not in capsys.readouterr().err
    assert values(run.dir, metrics.TRAIN_LOSS)[-1] == values(trained.dir, metrics.TRAIN_LOSS)[-1]


def test_settings_whose_moment_has_passed_are_ignored_and_said_so() -> None:
    plan = {
        "budget": {"kind": "time"},
        "decisions": {"warmup_steps": 5},
        "horizon": {"decided": True},
    }
    old = {"budget": {"time": 60}, "train": {"warmup_fraction": 0.1, "decay_fraction": 0.3, "grad_clip": 1}}
    new = {"budget": {"time": 90}, "train": {"warmup_fraction": 0.2, "decay_fraction": 0.4, "grad_clip": 2}}
    effects = {c.path: c.effect for c in find_changes(old, new, plan, step=5)}
    assert effects == {
        "budget.time": "is ignored",
        "train.warmup_fraction": "is ignored",
        "train.decay_fraction": "is ignored",
        "train.grad_clip": "takes effect",
    }
    plan["horizon"]["decided"] = False
    effects = {c.path: c.effect for c in find_changes(old, new, plan, step=4)}
    assert set(effects.values()) == {"takes effect"}
