"""`lavra prove-resume`: equal runs are called equal, and any difference is found and named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lavra.artifact import read_json, write_json
from lavra.checkpoint.store import latest_checkpoint
from lavra.cli.main import main
from lavra.experiment.prove_resume import compare_runs
from lavra.pipeline import Run

RECIPE = """\
name: proof
budget: {tokens: 3000}
corpus: {sources: [{path: one/text, name: one}, {path: two/text, name: two}], workers: 1}
model: {d_model: 32, n_layers: 1, n_heads: 1}
tokenizer: {vocab_size: 300}
tokens:
  seq_len: 32
  packing: best_fit
  mixture: {one: 0.7, two: 0.3}
  curriculum: [{start: 1500, mixture: {one: 0.2, two: 0.8}}]
train:
  batch_tokens: 128
  learning_rate: 0.02
  micro_batch_size: 2
  validations: 2
  validation_tokens: 64
  sample_tokens: 4
  ema_decay: 0.99
  layers_every: 5
  guard: {window: 16, loss_sigmas: 0.5, grad_sigmas: 0.5, patience: 50}
"""


def exit_code(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


@pytest.fixture
def copies(trained: Run, tmp_path: Path) -> tuple[Path, Path]:
    for name in ("one", "other"):
        shutil.copytree(trained.dir, tmp_path / name)
    return tmp_path / "one", tmp_path / "other"


def test_equal_runs_are_equal_and_every_tensor_was_compared(copies) -> None:
    tensors, differences = compare_runs(*copies)
    newest = latest_checkpoint(copies[0] / "checkpoints")
    kept = len(list((copies[0] / "checkpoints").glob("step-*")))
    assert differences == []
    assert tensors == kept * sum(len(load_file(f)) for f in newest.glob("*.safetensors"))


def test_measured_times_are_no_difference_but_a_loss_is_and_its_step_is_named(copies) -> None:
    file = copies[1] / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    records[4]["time"] += 1
    file.write_text("".join(json.dumps(r) + "\n" for r in records))
    assert compare_runs(*copies)[1] == []
    records[4]["train/loss"] *= 1 + 1e-12
    file.write_text("".join(json.dumps(r) + "\n" for r in records[:-1]))
    found = compare_runs(*copies)[1]
    assert found[0].startswith("metrics.jsonl: step 5: train/loss is ")
    assert found[1] == f"metrics.jsonl: {len(records)} and {len(records) - 1} records"


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_the_last_bit_of_a_tensor_is_a_difference(copies, file: str) -> None:
    path = latest_checkpoint(copies[1] / "checkpoints") / file
    tensors = load_file(path)
    name = next(n for n in tensors if n.endswith("norm.weight"))
    tensors[name].view(torch.int32)[3] ^= 1
    save_file(tensors, path)
    (found,) = compare_runs(*copies)[1]
    assert f"{path.parent.name}/{file}: {name} differs in 1 of 32 entries" in found


def test_state_missing_files_and_missing_checkpoints_are_differences(copies) -> None:
    newest = latest_checkpoint(copies[1] / "checkpoints")
    write_json(newest / "state.json", read_json(newest / "state.json") | {"tokens": 1})
    (newest / "optimizer.safetensors").unlink()
    found = compare_runs(*copies)[1]
    assert any("state.json: tokens is" in text for text in found)
    assert any("optimizer.safetensors is in one of them only" in text for text in found)
    shutil.rmtree(newest)
    assert any(text.startswith("checkpoints: [") for text in compare_runs(*copies)[1])


def test_too_few_steps_for_the_kills_is_a_usage_error(write_project, tmp_path: Path) -> None:
    assert exit_code("prove-resume", write_project(tmp_path), "--steps", 6, "--kills", 4) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        [
            "train.precision=fp32",
            "train.compile=off",
            "train.guard.policy=rewind",
            "train.guard.rewind_steps=2",
            "train.guard.loss_sigmas=1.5",  # at 0.5 a third of the batches is rejected, and rewinds hardly get past one another
            "train.guard.grad_sigmas=1.5",
        ],
        ["train.precision=fp32", "train.compile=blocks"],
        ["train.precision=bf16", "train.compile=model"],
        ["train.precision=bf16", "train.compile=off", "train.optimizer=muon", "tokens.packing=pad"],
    ],
    ids=["fp32-rewind", "fp32-blocks", "bf16-model", "bf16-muon"],
)
def test_resume_is_bitwise_with_packing_mixture_stages_guard_events_and_average_in_play(
    write_project, tmp_path: Path, overrides: list[str], capsys
) -> None:
    for seed, name in enumerate(("one", "two")):
        write_project(tmp_path / name, seed=seed)
    (tmp_path / "proof.yaml").write_text(RECIPE)
    code = exit_code("prove-resume", tmp_path / "proof.yaml", *overrides, "--steps", 45, "--keep", "--quiet")
    assert code == 0, capsys.readouterr().out
    proof = read_json(tmp_path / "runs/proof.proof/proof.json")
    assert proof["differences"] == [] and proof["tensors"] > 60 and proof["kills"] == [17, 31]
    events = (tmp_path / "runs/proof.proof/whole/events.jsonl").read_text()
    assert proof["events"] and "_spike" in events, "the guard had nothing to do"
