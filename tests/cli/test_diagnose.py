"""`lavra diagnose` on finished, stopped and empty runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lavra.cli.main import main
from lavra.console import sparkline


@pytest.fixture
def lavra(capsys):
    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


def test_a_real_run_is_judged_and_what_is_not_known_is_said(lavra, trained) -> None:
    code, out, _ = lavra("diagnose", trained.dir)
    assert code == 0 and out.startswith(f"{trained.dir}: 24 of 24 steps\nnothing found")
    assert "cannot be judged: overfitting: 3 validation losses were recorded" in " ".join(out.split())


def test_a_rate_that_is_too_high_is_told_with_evidence_plot_and_setting(
    lavra, trained, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained.dir, run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in lines[4:]:
        record["train/loss"] = 20.0
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    code, out, _ = lavra("diagnose", run)
    flat = " ".join(out.split())
    assert code == 0 and "1. The learning rate is too high (harmful)" in out
    assert "the loss was above that of guessing" in flat and "train.learning_rate=0.001" in flat
    assert "▁▁▁▁████" in out and "train/loss, steps 1 to 24:" in out
    _, text, _ = lavra("diagnose", run, "--json")
    (finding,) = json.loads(text)["findings"]
    assert finding["kind"] == "learning_rate_too_high" and finding["overrides"] == [
        "train.learning_rate=0.001"
    ]


def test_a_run_without_a_step_says_what_to_do(lavra, trained, tmp_path: Path) -> None:
    shutil.copy(trained.dir / "recipe.resolved.yaml", tmp_path)
    code, out, text = lavra("diagnose", tmp_path)
    assert code == 3 and out == "" and "no step of training is recorded" in text and "lavra pretrain" in text


def test_a_run_that_diverged_at_its_first_step_is_judged_by_its_events(lavra, tmp_path: Path) -> None:
    event = {
        "step": 1,
        "kind": "non_finite",
        "cause": "weights",
        "layer": "norm.weight (weights)",
        "act": "stop",
    }
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "STATUS").write_text('{"state": "diverged", "stage": "pretrain"}')
    code, out, _ = lavra("diagnose", tmp_path)
    assert code == 0 and "ended by the guard" in out
    assert "1. Values that are not finite (stopped the run)" in out and "norm.weight (weights)" in out


def test_a_run_that_the_guard_ends_points_here_and_is_marked(
    lavra, write_project, no_measuring, tmp_path, monkeypatch
) -> None:
    import math

    from lavra.objective.causal import causal_numerator

    monkeypatch.setattr(
        "lavra.train.loop.causal_numerator", lambda model, batch: causal_numerator(model, batch) * math.nan
    )
    recipe = write_project(tmp_path / "project")
    code, _, text = lavra("run", recipe, "--quiet")
    run = recipe.parent / "runs/tiny"
    assert code == 4 and f"-> `lavra diagnose {run}`" in text
    assert json.loads((run / "STATUS").read_text())["state"] == "diverged"
    code, out, _ = lavra("diagnose", run)
    assert code == 0 and "Values that are not finite (stopped the run)" in out


def test_torch_is_not_needed(trained) -> None:
    program = "import sys\nfrom lavra.cli.main import main\ntry:\n main(sys.argv[1:])\nfinally:\n print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program, "diagnose", str(trained.dir)], capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_a_sparkline_spans_its_values_in_the_width_that_there_is() -> None:
    assert sparkline([]) == "" and sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline(list(range(8))) == "▁▂▃▄▅▆▇█"
    assert len(sparkline(list(range(1000)), 60)) == 60
    assert sparkline([0, 0, 6, 8, 7, 7], 3) == "▁██"
