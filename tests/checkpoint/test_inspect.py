"""`lavra checkpoint`: oracles are the files as they were written and means computed by hand."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lavra.artifact import read_json
from lavra.checkpoint.inspect import average_weights, tensors_of
from lavra.checkpoint.store import damages, latest_checkpoint, save_checkpoint, take_snapshot
from lavra.cli.main import main
from lavra.errors import PreflightError
from lavra.optim.build import OptimizerSettings, build_optimizer
from lavra.pipeline import Run


def exit_code(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", *map(str, arguments)])
    return int(ended.value.code or 0)


@pytest.fixture
def copied(trained: Run, tmp_path: Path) -> Path:
    shutil.copytree(trained.dir, tmp_path / "run")
    return tmp_path / "run"


def save_weights(folder: Path, step: int, model, average=None) -> Path:
    optimizer = build_optimizer(model, OptimizerSettings())
    return save_checkpoint(folder, step, take_snapshot(model, optimizer, {"step": step}, average=average))


@pytest.mark.parametrize("harm", ["bit", "shorter", "missing", "marker"])
def test_verify_names_the_file_that_was_harmed(copied: Path, harm: str, capsys) -> None:
    assert exit_code("verify", copied) == 0
    checkpoint = latest_checkpoint(copied / "checkpoints")
    file = checkpoint / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    if harm == "bit":
        data[-1] ^= 1
        file.write_bytes(bytes(data))
    elif harm == "shorter":
        file.write_bytes(bytes(data[:-8]))
    elif harm == "missing":
        file.unlink()
    else:
        (checkpoint / "COMPLETE").unlink()
    (problem,) = damages(checkpoint)
    assert ("optimizer.safetensors" in problem) is (harm != "marker")
    capsys.readouterr()
    assert exit_code("verify", copied) == 3
    assert problem in capsys.readouterr().out


def test_ls_names_every_checkpoint_and_the_unfinished_ones(copied: Path, capsys) -> None:
    (copied / "checkpoints/step-00000099").mkdir()
    assert exit_code("ls", copied) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == [p.name for p in sorted(copied.glob("checkpoints/step-*"))]
    assert lines[-1].endswith("unfinished") and all(line.endswith("complete") for line in lines[:-1])


def test_show_tells_step_tokens_and_the_tensors(copied: Path, trained: Run, capsys) -> None:
    assert exit_code("show", copied, "--tensors") == 0
    shown = capsys.readouterr().out
    state = read_json(latest_checkpoint(copied / "checkpoints") / "state.json")
    assert f"step: {state['step']}\n" in shown and f"tokens: {state['tokens']}\n" in shown
    assert "blocks.0.feed_forward.out.weight" in shown and "not finite:" not in shown


def test_tensor_facts_are_those_of_the_finite_entries(tmp_path: Path) -> None:
    values = torch.tensor([[3.0, -4.0], [torch.nan, torch.inf]])
    save_file({"x": values, "none": torch.full((2,), torch.nan)}, tmp_path / "t.safetensors")
    facts = {t.name: t for t in tensors_of(tmp_path / "t.safetensors")}
    assert facts["x"].shape == (2, 2) and facts["x"].dtype == "float32" and facts["x"].not_finite == 2
    assert facts["x"].rms == pytest.approx(12.5**0.5) and facts["x"].largest == 4.0
    assert facts["none"].rms == 0.0 and facts["none"].not_finite == 2


def test_an_average_is_the_mean_of_the_weights_that_each_checkpoint_would_be_used_with(
    tiny_model, tmp_path: Path
) -> None:
    models = [tiny_model(seed=seed) for seed in range(3)]
    own = {name: p.detach() + 1 for name, p in models[2].named_parameters()}
    folders = [save_weights(tmp_path, step, model) for step, model in enumerate(models[:2], 1)]
    folders.append(save_weights(tmp_path, 3, models[2], average=own))
    for name, mean in average_weights(folders).items():
        parts = [dict(m.named_parameters())[name].detach() for m in models[:2]] + [own[name]]
        torch.testing.assert_close(mean, torch.stack(parts).mean(0))
    with pytest.raises(PreflightError, match="two checkpoints or more"):
        average_weights(folders[:1])
    other = save_weights(tmp_path / "other", 1, tiny_model(d_ff=64))
    with pytest.raises(PreflightError, match="holds another model than"):
        average_weights([folders[0], other])


def test_an_averaged_run_can_be_generated_from(copied: Path, tmp_path: Path, capsys) -> None:
    last = latest_checkpoint(copied / "checkpoints")
    weights = load_file(last / "model.safetensors")
    other = copied / "checkpoints/step-00000001"
    shutil.copytree(last, other)
    save_file({n: t + 1 for n, t in weights.items()}, other / "model.safetensors")
    out = tmp_path / "averaged"
    assert exit_code("average", copied, "--last", 2, "--out", out) == 0
    averaged = load_file(out / "checkpoints" / last.name / "model.safetensors")
    assert all(torch.allclose(averaged[n], t + 0.5) for n, t in weights.items())
    with pytest.raises(SystemExit) as ended:
        main(["generate", str(out), "--prompt", "Abc", "--max-tokens", "4"])
    assert not ended.value.code
    assert exit_code("verify", out) == 0
    assert exit_code("average", copied, "--last", 2, "--out", out) == 3, (
        "an existing folder is not overwritten"
    )
    assert exit_code("average", copied, "--last", 9, "--out", tmp_path / "b") == 3


def test_a_path_without_checkpoints_is_one_clear_error(tmp_path: Path, capsys) -> None:
    for action in ("ls", "verify", "show"):
        assert exit_code(action, tmp_path) == 3
        assert "no checkpoint at" in capsys.readouterr().err
