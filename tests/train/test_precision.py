"""Oracles: fp32 training, and the definition of a dynamic loss scale written out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lavra.errors import PreflightError
from lavra.metrics import LOSS_SCALE, OVERFLOWS, TRAIN_LOSS, read_jsonl
from lavra.objective.causal import causal_numerator
from lavra.train import loop
from lavra.train.ema import Ema
from lavra.train.horizon import Horizon
from lavra.train.loop import train
from lavra.train.precision import LossScale, check_precision
from lavra.train.signals import StopRequest


def run(model, sampler, settings, folder, steps=30, on_event=lambda event: None):
    horizon = Horizon(steps=steps, decay=8, decided=True)
    train(model, sampler, settings, horizon, run_dir=folder, stop=StopRequest(), on_event=on_event)
    return list(read_jsonl(folder / "metrics.jsonl"))


@given(outcomes=st.lists(st.booleans(), max_size=60), interval=st.integers(1, 5))
def test_the_loss_scale_halves_on_overflow_and_doubles_after_good_steps(outcomes, interval: int) -> None:
    scale = LossScale(True, scale=1024.0, interval=interval)
    expected, good = 1024.0, 0
    for overflow in outcomes:
        if overflow:
            assert scale.overflowed() is (expected > 1)
            if expected > 1:
                expected, good = expected / 2, 0
        else:
            scale.stepped()
            good += 1
            if good == interval:
                expected, good = min(2 * expected, 2.0**24), 0
        assert scale.scale == expected


def test_fp16_recovers_from_an_overflow_without_losing_the_batch(
    tmp_path, tiny_model, sampler, settings, monkeypatch
) -> None:
    exact = run(tiny_model(), sampler, settings(), tmp_path / "fp32")

    def overflowing(model, batch):
        loss = causal_numerator(model, batch)
        # From step 10 on gradients of a scale above 2^14 do not fit, as with a real fp16 overflow.
        if batch.sample_ids.min() >= 54:
            loss.register_hook(lambda g: g * math.inf if g.abs() * 96 > 2**14 * 1.5 else g)
        return loss

    monkeypatch.setattr(loop, "causal_numerator", overflowing)
    events = []
    found = run(tiny_model(), sampler, settings(precision="fp16"), tmp_path / "fp16", on_event=events.append)
    assert [r["step"] for r in found] == [r["step"] for r in exact]
    assert [e["kind"] for e in events] == ["overflow"] * len(events) and events
    assert events[0]["step"] == 10
    assert found[8][LOSS_SCALE] == 65536 > found[-1][LOSS_SCALE]
    assert found[-1][OVERFLOWS] == len(events)
    assert [r["tokens"] for r in found] == [r["tokens"] for r in exact]
    for mine, its in zip(found, exact, strict=True):
        assert mine[TRAIN_LOSS] == pytest.approx(its[TRAIN_LOSS], rel=0.02)


def test_what_the_hardware_cannot_do_is_refused_with_the_reason() -> None:
    with pytest.raises(PreflightError, match="NVIDIA"):
        check_precision("tf32", torch.device("cpu"))
    assert "emulated" in check_precision("fp8", torch.device("cpu"))
    assert check_precision("fp32", torch.device("cpu")) == check_precision("bf16", torch.device("cpu")) == ""


def test_the_moving_average_is_the_sum_it_says(tiny_model) -> None:
    model = tiny_model()
    ema = Ema(model, 0.9)
    weight = model.blocks[0].attention.qkv.weight
    expected = weight.detach().double().clone()
    for step in range(120):
        with torch.no_grad():
            weight.add_(0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(step)))
        ema.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * weight.detach().double()
    average = ema.tensors()["blocks.0.attention.qkv.weight"]
    torch.testing.assert_close(average.double(), expected, atol=1e-6, rtol=1e-5)
    own = weight.detach().clone()
    with ema.applied():
        torch.testing.assert_close(weight.detach().double(), expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(weight, own)
