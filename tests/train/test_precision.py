"""Oracles: fp32 training, and the definition of a dynamic loss scale written out."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lavra.errors import PreflightError
from lavra.metrics import LOSS_SCALE, OVERFLOWS, TRAIN_LOSS, read_jsonl
from lavra.objective.causal import causal_numerator
from lavra.optim.build import OptimizerSettings
from lavra.optim.groups import muon_groups
from lavra.tokens.packing import ConcatRows
from lavra.tokens.ramps import StepPlan
from lavra.tokens.sampler import Sampler
from lavra.tokens.windows import Windows
from lavra.train import loop
from lavra.train.ema import Ema
from lavra.train.horizon import Horizon
from lavra.train.loop import train
from lavra.train.precision import LossScale, apply_precision, check_precision
from lavra.train.signals import StopRequest


def run(model, sampler, settings, folder, steps=30, decay=8, on_event=lambda event: None):
    horizon = Horizon(steps=steps, decay=decay, decided=True)
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


# --- on real text ---

REAL_STEPS = 300


@pytest.fixture(scope="module")
def real_bytes(realdata, tmp_path_factory, write_store) -> Sampler:
    """English prose as bytes, windows of 64."""
    with pa.input_stream(realdata / "text/en-misc.jsonl.zst", compression="zstd") as file:
        lines = file.read(1_000_000).split(b"\n")[:-1]
    documents = [list(json.loads(line)["text"].encode()) for line in lines]
    store = write_store(tmp_path_factory.mktemp("real"), [documents], vocab_size=256)
    return Sampler(Windows(store, ConcatRows(store, 64)), seed=1)


@pytest.fixture(scope="module")
def real_losses(real_bytes, tiny_model, settings, tmp_path_factory) -> Callable[[str], np.ndarray]:
    """`real_losses(precision)` -> the loss of every step; the same seed, data and settings each time.

    With these settings another seed ends within 1 %: at larger rates, or with tied embeddings, the moment when such a
    small model leaves its plateau moves by a hundred steps for any reason at all.
    """

    @functools.cache
    def losses(precision: str) -> np.ndarray:
        shape = dict(vocab_size=256, d_model=32, n_heads=2, n_kv_heads=2, d_ff=64, seq_len=64)
        model = tiny_model(**shape, tie_embeddings=False)
        apply_precision(model, precision, torch.device("cpu"))
        config = settings(
            steps=StepPlan(8, 64),
            micro_batch_size=8,
            optimizer=OptimizerSettings(learning_rate=3e-3),
            warmup=30,
            precision=precision,
        )
        records = run(model, real_bytes, config, tmp_path_factory.mktemp(precision), REAL_STEPS, decay=100)
        return np.array([r[TRAIN_LOSS] for r in records])

    return losses


@pytest.mark.slow
@pytest.mark.realdata
@pytest.mark.parametrize(("precision", "allowed"), [("bf16", 0.01), ("fp8", 0.02)])
def test_low_precision_tracks_fp32_on_real_text(real_losses, precision: str, allowed: float) -> None:
    """The mean of any 50 steps, the last 50 included. Measured: bf16 0.2 %, fp8 0.8 %; weights in bf16 2.3 %."""
    if precision == "fp8":
        pytest.importorskip("torchao")
    exact, found = real_losses("fp32"), real_losses(precision)
    assert exact[-50:].mean() < 2.3 < 5 < exact[0]  # much more was learned than the frequencies of bytes
    assert len(exact) == len(found) == REAL_STEPS and not np.array_equal(exact, found)
    smooth = [np.convolve(losses, np.full(50, 1 / 50), "valid") for losses in (exact, found)]
    assert np.abs(smooth[1] / smooth[0] - 1).max() <= allowed


def test_what_the_hardware_cannot_do_is_refused_with_the_reason() -> None:
    with pytest.raises(PreflightError, match="NVIDIA"):
        check_precision("tf32", torch.device("cpu"))
    assert "emulated" in check_precision("fp8", torch.device("cpu"))
    assert check_precision("fp32", torch.device("cpu")) == check_precision("bf16", torch.device("cpu")) == ""


def test_fp8_keeps_names_and_the_matrices_that_a_weight_stacks(tiny_model) -> None:
    """Muon orthogonalises queries, keys and values apart in any precision."""
    pytest.importorskip("torchao")
    plain, model = (tiny_model(d_model=32, n_heads=2, n_kv_heads=2) for _ in range(2))
    apply_precision(model, "fp8", torch.device("cpu"))
    assert type(model.blocks[0].feed_forward.out) is not nn.Linear
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    named = [
        {key: value for key, value in group.items() if key != "params"}
        for net in (plain, model)
        for group in muon_groups(net, 0.1)
    ]
    assert named[: len(named) // 2] == named[len(named) // 2 :]


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
