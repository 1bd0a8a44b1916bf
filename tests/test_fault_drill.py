"""A drill on real books: random bytes in a shard, a NaN in layer 3, a learning rate a hundred times too high.

The guard must name the documents, the layer, the cause; rewinding and skipping must end where the clean run ends; and
a resume keeps the record.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lavra import metrics, pretrain
from lavra.artifact import read_json
from lavra.errors import DivergedError, RequeueError
from lavra.pipeline import Run
from lavra.recipe import load_recipe
from lavra.stages import run_recipe
from lavra.tokens.build import open_windows
from lavra.tokens.sampler import Sampler

pytestmark = [pytest.mark.slow, pytest.mark.realdata]

SEQ_LEN, BATCH, STEPS, HARMED = 64, 16, 300, 180
RECIPE = f"""\
name: clean
budget: {{tokens: {SEQ_LEN * BATCH * STEPS}}}
corpus: {{sources: [{{path: BOOKS, name: books}}], workers: 1, max_bytes: 3MB}}
model: {{d_model: 64, n_layers: 4, n_heads: 1}}
tokenizer: {{vocab_size: 1024}}
tokens: {{seq_len: {SEQ_LEN}}}
train:
  batch_tokens: {SEQ_LEN * BATCH}
  learning_rate: 3e-3
  precision: fp32
  compile: 'off'
  keep_every: 20
  validations: 2
  validation_tokens: 32k
  sample_tokens: 0
  guard: {{policy: rewind, rewind_steps: 2}}
"""


@pytest.fixture(scope="module")
def recipe(realdata: Path, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("drill") / "drill.yaml"
    path.write_text(RECIPE.replace("BOOKS", str(realdata / "text/en-books.jsonl.zst")))
    return path


@pytest.fixture(scope="module")
def clean(recipe: Path) -> Run:
    return run_recipe(load_recipe(str(recipe), environment={}), until="pretrain")


@pytest.fixture
def drill(recipe: Path, clean: Run, tmp_path: Path) -> Callable[..., Run]:
    """`drill(*overrides)`: train again on a copy of the clean run's plan and tokens, in `tmp_path/run`."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    shutil.copy(clean.dir / "plan.json", run_dir)
    for stage in ("corpus", "tokenizer", "tokens"):
        shutil.copytree(clean.dir / stage, run_dir / stage)

    def train(*overrides: str) -> Run:
        return run_recipe(load_recipe(str(recipe), [f"run_dir={run_dir}", *overrides], {}), until="pretrain")

    return train


def sampler_of(run_dir: Path, clean: Run) -> Sampler:
    tokenizer = pretrain._load_tokenizer(clean)
    return Sampler(open_windows(run_dir / "tokens", "train", tokenizer, "concat", SEQ_LEN), seed=0)


def events(run_dir: Path) -> list[dict[str, Any]]:
    return list(metrics.read_jsonl(run_dir / "events.jsonl"))


def named(event: dict[str, Any]) -> set[str]:
    return {document["id"] for sequence in event["sequences"] for document in sequence["documents"]}


def final_loss(run: Run) -> float:
    return run.artifacts["pretrain"].summary["val_loss"]


def poison(run_dir: Path, clean: Run, steps: range) -> set[str]:
    """Random tokens over half of the rows of some steps; the documents that lie there."""
    sampler = sampler_of(run_dir, clean)
    (shard,) = (run_dir / "tokens").glob("train-00000-000.tokens")
    tokens = np.memmap(shard, "<u2", "r+")
    documents = set()
    for step in steps:
        for sample in range(step * BATCH, step * BATCH + BATCH // 2):
            start = int(sampler.rows(np.array([sample]))[0]) * SEQ_LEN
            if start + SEQ_LEN < len(tokens):
                tokens[start : start + SEQ_LEN] = np.random.default_rng(sample).integers(1, 1000, SEQ_LEN)
                documents |= {span.id for span in sampler.documents(sample)}
    tokens.flush()
    return documents


def test_random_bytes_in_a_shard_are_named_and_left_out(drill, clean: Run, tmp_path: Path) -> None:
    harmed = poison(tmp_path / "run", clean, range(HARMED, HARMED + 2))
    run = drill()
    told = events(run.dir)
    spikes = [e for e in told if e["kind"] in ("loss_spike", "grad_spike")]
    assert spikes and all(e["step"] == HARMED + 1 + n for n, e in enumerate(spikes[:1]))
    assert {e["cause"] for e in spikes} == {"data"}
    assert named(spikes[0]) <= harmed
    assert all(d["path"] and d["excerpt"] for s in spikes[0]["sequences"] for d in s["documents"])
    assert any(e["kind"] == "rewound" for e in told)
    assert final_loss(run) == pytest.approx(final_loss(clean), rel=0.01)


@pytest.fixture
def nan_in_layer_3(monkeypatch, clean: Run) -> Iterator[int]:
    """Layer 3 gives NaN whenever it sees one certain sample, as a fault that data brings out."""
    sample = HARMED * BATCH + 5
    bad = torch.from_numpy(sampler_of(clean.dir, clean).batch(np.array([sample])).tokens.numpy())[0]
    real = pretrain._initial_model

    def with_fault(run: Run, shape: Any) -> Any:
        model = real(run, shape)
        seen: dict[str, torch.Tensor] = {}
        model.embedding.register_forward_pre_hook(lambda module, inputs: seen.update(tokens=inputs[0]))

        def fault(module, inputs, output):
            hit = (seen["tokens"] == bad).all(1)
            return output.masked_fill(hit[:, None, None], torch.nan) if hit.any() else output

        model.blocks[3].feed_forward.out.register_forward_hook(fault)
        return model

    monkeypatch.setattr(pretrain, "_initial_model", with_fault)
    yield sample


def test_a_nan_in_layer_3_is_found_there_and_its_sample_left_out(
    drill, clean: Run, nan_in_layer_3: int
) -> None:
    run = drill()
    event = next(e for e in events(run.dir) if e["kind"] == "non_finite")
    assert event["step"] == HARMED + 1
    assert event["layer"].startswith("blocks.3.feed_forward.out (forward)")
    assert event["cause"] == "data"
    assert [s["sample"] for s in event["sequences"]] == [nan_in_layer_3]
    assert named(event) == {span.id for span in sampler_of(clean.dir, clean).documents(nan_in_layer_3)}
    assert final_loss(run) == pytest.approx(final_loss(clean), rel=0.01)


def test_a_learning_rate_a_hundred_times_too_high_is_called_so_and_the_right_one_mends_the_run(
    drill, clean: Run, tmp_path: Path, stop_at
) -> None:
    with stop_at(HARMED), pytest.raises(RequeueError):
        drill()
    with pytest.raises(DivergedError) as stopped:
        drill("train.learning_rate=0.3")
    assert "lower train.learning_rate" in stopped.value.hint
    told = [e for e in events(tmp_path / "run") if e["kind"] in ("loss_spike", "grad_spike")]
    assert {e["cause"] for e in told} == {"weights"} and told[0]["step"] <= HARMED + 10
    run = drill("train.learning_rate=3e-3")
    assert final_loss(run) == pytest.approx(final_loss(clean), rel=0.01)


def test_a_resume_after_the_drill_keeps_the_record(drill, clean: Run, tmp_path: Path, stop_at) -> None:
    """Oracle: the drill without a stop."""
    poison(tmp_path / "run", clean, range(HARMED, HARMED + 2))
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    with stop_at(HARMED + 10), pytest.raises(RequeueError):
        drill()
    stopped = max((tmp_path / "run/checkpoints").glob("step-*/state.json"))
    before = read_json(stopped)["skipped"]
    assert before
    resumed = drill()
    whole = drill(f"run_dir={tmp_path}/whole")
    records = [read_json(max((r.dir / "checkpoints").glob("step-*/state.json"))) for r in (resumed, whole)]
    assert records[0]["skipped"] == records[1]["skipped"] and before[0] in records[0]["skipped"]
    assert final_loss(resumed) == final_loss(whole)
    logs = [[{k: v for k, v in e.items() if k != "time"} for e in events(r.dir)] for r in (resumed, whole)]
    assert logs[0] == logs[1]
