"""Oracles: the run that never met the fault, and the run that was told from the start what to leave out."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lavra.checkpoint.store import latest_checkpoint, load_state
from lavra.errors import DivergedError
from lavra.metrics import TRAIN_LOSS, read_jsonl
from lavra.objective.causal import causal_numerator
from lavra.tokens.ramps import skip
from lavra.train import loop
from lavra.train.config import GuardConfig
from lavra.train.guard import Guard
from lavra.train.horizon import Horizon
from lavra.train.loop import train
from lavra.train.signals import StopRequest

STEPS = 40


def run(model, sampler, settings, folder, *callbacks, steps=STEPS, on_event=lambda event: None):
    horizon = Horizon(steps=steps, decay=10, decided=True)
    return train(
        model, sampler, settings, horizon,
        run_dir=folder, stop=StopRequest(), callbacks=callbacks, on_event=on_event,
    )  # fmt: skip


def weights(model) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def losses(folder) -> list[float]:
    return [r[TRAIN_LOSS] for r in read_jsonl(folder / "metrics.jsonl")]


def harmed(samples: set[int], harm):
    """A loss that `harm` spoils for the sequences in `samples`."""

    def numerator(model, batch):
        loss = causal_numerator(model, batch)
        return harm(loss, model) if samples & set(batch.sample_ids.tolist()) else loss

    return numerator


HARMS = {
    "loss": lambda loss, model: loss * math.nan,
    "infinite": lambda loss, model: loss * math.inf,
    "gradient": lambda loss, model: loss + (loss * 0).sqrt() * 0,
    "spike": lambda loss, model: loss + 40 * loss.detach(),
    "steep": lambda loss, model: loss * 50 - 49 * loss.detach(),
}


# --- the window ---


def accepted(values: list[float], **config) -> Guard:
    guard = Guard(GuardConfig(**config))
    for value in values:
        guard.accept(value, 1.0 + 0.1 * value)
    return guard


@given(st.lists(st.floats(2.0, 4.0), min_size=16, max_size=32))
def test_what_lies_inside_the_windows_own_range_is_never_a_spike(values: list[float]) -> None:
    guard = accepted(values)
    spread = max(values) - min(values)
    for value in (min(values), sorted(values)[len(values) // 2], min(values) - spread):
        assert guard.judge(value, 1.2) is None


def test_a_spike_is_judged_and_does_not_widen_the_window_for_the_next() -> None:
    """OLMo-core: a caught spike polluted mean and deviation, so the next one passed."""
    guard = accepted([3 + 0.05 * math.sin(i) for i in range(40)])
    for _ in range(200):
        verdict = guard.judge(6.0, 1.3)
        assert verdict is not None and verdict.kind == "loss_spike" and verdict.limit < 3.5
        guard.reject()
    assert guard.judge(3.02, 1.3) is None


def test_a_few_large_losses_in_the_window_hide_no_spike() -> None:
    """The first steps of a run are accepted and large: mean and deviation would allow 14 here."""
    guard = accepted([10.5, 10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, *(3 + 0.05 * math.sin(i) for i in range(60))])
    assert guard.judge(3.1, 1.3) is None
    verdict = guard.judge(4.5, 1.3)
    assert verdict is not None and verdict.kind == "loss_spike" and 3.1 < verdict.limit < 3.5
    assert guard.judge(3.0, 4.0).kind == "grad_spike"


def test_a_loss_that_falls_through_the_window_is_no_noise_that_hides_a_spike() -> None:
    """From 6 to 4 in 128 steps: around one median for all of them, 7 would have been allowed."""
    guard = accepted([6 - i / 64 + 0.05 * math.sin(i) for i in range(128)])
    assert guard.judge(4.1, 1.4) is None
    verdict = guard.judge(5.6, 1.4)
    assert verdict is not None and verdict.kind == "loss_spike" and 4.3 < verdict.limit < 5.5
    assert guard.usual_loss() == pytest.approx(4.25, abs=0.1)


def test_one_infinity_rejects_one_step_not_a_window_of_them() -> None:
    """OLMo-core: an infinite loss in the history froze updates until it left the window."""
    guard = accepted([3 + 0.05 * math.sin(i) for i in range(40)])
    for bad in (math.nan, math.inf, -math.inf):
        assert guard.judge(bad, 1.0).kind == guard.judge(3.0, abs(bad)).kind == "non_finite"
        guard.reject()
        assert guard.judge(3.0, 1.3) is None


def test_a_gradient_spike_is_judged_by_its_own_window() -> None:
    guard = accepted([3 + 0.05 * math.sin(i) for i in range(40)])
    assert guard.judge(3.0, 2.0) is None
    assert guard.judge(3.0, 20.0).kind == "grad_spike"


def test_a_restored_guard_judges_as_before() -> None:
    guard = accepted([3 + 0.1 * math.sin(i) for i in range(200)], window=64)
    other = Guard(guard.config)
    other.load(json.loads(json.dumps(guard.state())))
    for value in np.linspace(2.5, 5, 40):
        assert guard.judge(value, 1.0) == other.judge(value, 1.0)
    assert len(other.losses) == 64


# --- in the loop ---


@pytest.mark.parametrize("harm", HARMS)
def test_a_skipped_batch_leaves_no_trace_in_weights_or_moments(
    tmp_path, tiny_model, sampler, settings, monkeypatch, harm: str
) -> None:
    """OLMo-core's skip multiplied by 0, and NaN x 0 = NaN. Here: as if the batch had not been in the data."""
    step, events = 25, []
    first = 6 * (step - 1)
    bad = set(range(first, first + 6))
    monkeypatch.setattr(loop, "causal_numerator", harmed(bad, HARMS[harm]))
    guarded = tiny_model()
    state = run(guarded, sampler, settings(), tmp_path / "guarded", on_event=events.append)
    assert [(e["step"], e["act"], e["first_sample"], e["samples"]) for e in events] == [
        (step, "skip", first, 6)
    ]
    assert state.skipped == [[first, 6]] and state.step == STEPS
    monkeypatch.undo()
    told = tiny_model()
    without = type(sampler)(sampler.windows, sampler.seed)
    batch = without.batch
    without.batch = lambda samples: batch(skip(samples, [(first, 6)]))
    run(told, without, settings(), tmp_path / "told")
    assert equal(weights(guarded), weights(told))
    assert losses(tmp_path / "guarded") == losses(tmp_path / "told")
    saved = [
        latest_checkpoint(tmp_path / f / "checkpoints") / "optimizer.safetensors" for f in ("guarded", "told")
    ]
    assert saved[0].read_bytes() == saved[1].read_bytes()


def test_the_event_names_rank_micro_batch_layer_and_documents(
    tmp_path, tiny_model, sampler, settings, monkeypatch
) -> None:
    """The third block returns NaN for one sequence."""
    model, events = tiny_model(n_layers=4), []
    culprit = 6 * 9 + 4  # the fifth sequence of step 10: second micro-batch of four
    first_token = sampler.batch(np.array([culprit])).tokens[0]

    def infect(module, inputs, output):
        hit = [i for i in range(len(output)) if torch.equal(seen[0][i], first_token)]
        for row in hit:
            output = output.index_fill(0, torch.tensor([row]), math.nan)
        return output

    seen = []
    model.embedding.register_forward_pre_hook(lambda m, inputs: seen.insert(0, inputs[0]))
    model.blocks[2].feed_forward.out.register_forward_hook(infect)
    run(model, sampler, settings(), tmp_path, on_event=events.append)
    event = events[0]
    assert (event["step"], event["kind"], event["cause"]) == (10, "non_finite", "data")
    assert event["layer"] == "blocks.2.feed_forward.out (forward)"
    (sequence,) = event["sequences"]
    assert (sequence["rank"], sequence["micro_batch"], sequence["sample"]) == (0, 1, culprit)
    assert [d["id"] for d in sequence["documents"]] == [d.id for d in sampler.documents(culprit)]


def test_weights_that_are_not_finite_are_named(tmp_path, tiny_model, sampler, settings) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.blocks[1].feed_forward.out.weight[0, 0] = math.nan
    with pytest.raises(DivergedError, match="not finite") as error:
        run(model, sampler, settings(), tmp_path)
    assert "blocks.1.feed_forward.out.weight (weights)" in error.value.what


def test_a_warning_steps_all_the_same_but_never_on_nan(
    tmp_path, tiny_model, sampler, settings, monkeypatch
) -> None:
    bad, worse = set(range(120, 126)), set(range(150, 156))

    def numerator(model, batch):
        ids = set(batch.sample_ids.tolist())
        loss = causal_numerator(model, batch)
        return loss * math.nan if ids & worse else loss * 30 if ids & bad else loss

    monkeypatch.setattr(loop, "causal_numerator", numerator)
    events = []
    config = settings(guard=GuardConfig(policy="warn"))
    state = run(tiny_model(), sampler, config, tmp_path, on_event=events.append)
    assert [(e["kind"], e["act"]) for e in events] == [("loss_spike", "warn"), ("non_finite", "skip")]
    assert state.skipped == [[150, 6]]
    assert max(state.guard["losses"]) < 5  # what was warned of does not widen the window


def test_rejections_in_a_row_stop_the_run_with_advice(
    tmp_path, tiny_model, sampler, settings, monkeypatch
) -> None:
    monkeypatch.setattr(loop, "causal_numerator", harmed(set(range(150, 10_000)), HARMS["spike"]))
    events = []
    with pytest.raises(DivergedError) as error:
        run(tiny_model(), sampler, settings(guard=GuardConfig(patience=3)), tmp_path, on_event=events.append)
    assert len(events) == 3 and "learning_rate" in error.value.hint and "3 steps in a row" in error.value.hint


def test_rewinding_goes_back_leaves_the_batches_out_and_keeps_the_record(
    tmp_path, tiny_model, sampler, settings, monkeypatch
) -> None:
    bad = set(range(6 * 29, 6 * 30))  # step 30
    monkeypatch.setattr(loop, "causal_numerator", harmed(bad, HARMS["spike"]))
    config = settings(guard=GuardConfig(policy="rewind", rewind_steps=4), keep_every=10)
    events, model = [], tiny_model()
    state = run(model, sampler, config, tmp_path / "rewound", on_event=events.append)
    assert [e["kind"] for e in events] == ["loss_spike", "rewound"]
    assert state.skipped == [[6 * 26, 24]] and state.step == STEPS  # steps 27 to 30
    steps = [r["step"] for r in read_jsonl(tmp_path / "rewound/metrics.jsonl")]
    assert steps == list(range(1, STEPS + 1))
    monkeypatch.undo()
    told = tiny_model()
    without = type(sampler)(sampler.windows, sampler.seed)
    batch = without.batch
    without.batch = lambda samples: batch(skip(samples, [(6 * 26, 24)]))
    run(told, without, settings(), tmp_path / "told")
    assert equal(weights(model), weights(told))


def test_rewinds_that_get_no_farther_stop_the_run(
    tmp_path, tiny_model, sampler, settings, monkeypatch
) -> None:
    """All that comes after step 29 is bad: no batch is to blame, and going back for ever would help nobody."""
    monkeypatch.setattr(loop, "causal_numerator", harmed(set(range(6 * 29, 100_000)), HARMS["spike"]))
    config = settings(guard=GuardConfig(policy="rewind", rewind_steps=4, patience=3), keep_every=10)
    events = []
    with pytest.raises(DivergedError, match=r"3 rewinds|limit") as error:
        run(tiny_model(), sampler, config, tmp_path, on_event=events.append)
    assert "learning_rate" in error.value.hint
    assert 1 <= sum(e["kind"] == "rewound" for e in events) <= 3


class PowerCut(BaseException):
    """Nothing may catch it."""


@pytest.mark.parametrize("cut_at", [21, 27, 33])
@pytest.mark.parametrize("policy", ["skip", "rewind"])
def test_a_run_killed_around_a_rejection_resumes_to_the_same_bits(
    tmp_path, tiny_model, sampler, settings, monkeypatch, policy: str, cut_at: int
) -> None:
    bad = set(range(6 * 29, 6 * 30))
    monkeypatch.setattr(loop, "causal_numerator", harmed(bad, HARMS["spike"]))
    config = settings(
        guard=GuardConfig(policy=policy, rewind_steps=4), keep_every=5, ema_decay=0.9, keep_checkpoints=1
    )
    whole = tiny_model()
    expected = run(whole, sampler, config, tmp_path / "whole")
    seen = itertools.count()

    def cut(facts) -> None:
        if facts.step == cut_at and next(seen) == 0:
            raise PowerCut

    with pytest.raises(PowerCut):
        run(tiny_model(), sampler, config, tmp_path / "cut", cut)
    resumed = tiny_model(seed=5)
    state = run(resumed, sampler, config, tmp_path / "cut")
    assert equal(weights(whole), weights(resumed))
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    for name in ("skipped", "ledger", "tokens", "guard"):
        assert getattr(state, name) == getattr(expected, name), name
    saved = [latest_checkpoint(tmp_path / f / "checkpoints") for f in ("whole", "cut")]
    for file in ("optimizer.safetensors", "average.safetensors"):
        assert (saved[0] / file).read_bytes() == (saved[1] / file).read_bytes()
    assert load_state(saved[1])["skipped"] == expected.skipped


def test_checkpoints_from_before_a_rewind_do_not_outlive_its_decision(
    tmp_path, tiny_model, sampler, settings, monkeypatch
) -> None:
    """Killed in the first step after going back from 29 to 15, with checkpoints of 20 and 25 on disk."""
    monkeypatch.setattr(loop, "causal_numerator", harmed(set(range(6 * 29, 6 * 30)), HARMS["spike"]))
    guard = GuardConfig(policy="rewind", rewind_steps=12)
    config = settings(guard=guard, keep_every=5, keep_checkpoints=9)
    events: list[dict] = []

    def cut(facts) -> None:
        if facts.step == 16 and events:
            raise PowerCut

    with pytest.raises(PowerCut):
        run(tiny_model(), sampler, config, tmp_path, cut, on_event=events.append)
    saved = latest_checkpoint(tmp_path / "checkpoints")
    assert saved.name == "step-00000015" and load_state(saved)["skipped"]
    assert run(tiny_model(), sampler, config, tmp_path, on_event=events.append).step == STEPS
    assert [e["kind"] for e in events] == ["loss_spike", "rewound"]


def test_a_missing_checkpoint_to_rewind_to_is_said(
    tmp_path, tiny_model, sampler, settings, monkeypatch
) -> None:
    monkeypatch.setattr(loop, "causal_numerator", harmed(set(range(150, 156)), HARMS["spike"]))
    with pytest.raises(DivergedError, match="no checkpoint to rewind to"):
        run(tiny_model(), sampler, settings(guard=GuardConfig(policy="rewind")), tmp_path)
