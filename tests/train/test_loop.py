"""Oracle: the uninterrupted run, bit for bit."""

from __future__ import annotations

import errno
import itertools
import math
import os
import signal
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lavra import metrics
from lavra.checkpoint import store
from lavra.checkpoint.store import complete_checkpoints, latest_checkpoint, load_model, load_state
from lavra.errors import DivergedError, ExitCode, InterruptedByUser, PreflightError, RequeueError
from lavra.metrics import LEARNING_RATE, MFU, TOKENS_PER_SECOND, TRAIN_LOSS, read_jsonl
from lavra.objective.causal import causal_numerator
from lavra.optim.build import OptimizerSettings
from lavra.optim.schedules import lr_multiplier
from lavra.tokens.ramps import Ramp, StepPlan
from lavra.tokens.sampler import Sampler
from lavra.train import loop
from lavra.train.config import GuardConfig
from lavra.train.horizon import Horizon
from lavra.train.loop import train
from lavra.train.signals import StopRequest, stop_requests

STEPS = 12


class PowerCut(BaseException):
    """Nothing may catch it."""


def at_step(step: int, act):
    def callback(facts) -> None:
        if facts.step == step:
            act()

    return callback


def cut() -> None:
    raise PowerCut


def run(model, sampler, settings, folder, *callbacks, horizon=None, stop=None, **more):
    horizon = horizon or Horizon(steps=STEPS, decay=4, decided=True)
    return train(
        model,
        sampler,
        settings,
        horizon,
        run_dir=folder,
        stop=stop or StopRequest(),
        callbacks=callbacks,
        **more,
    )


def weights(model) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def series(folder, name: str) -> list[float]:
    records = list(read_jsonl(folder / "metrics.jsonl"))
    assert [r["step"] for r in records] == list(range(1, len(records) + 1))  # no gap, no duplicate
    return [r[name] for r in records]


def test_training_learns_and_says_so(tmp_path, tiny_model, sampler, settings) -> None:
    model, lasts = tiny_model(), []
    state = run(
        model, sampler, settings(), tmp_path, lambda f: lasts.append(f.last),
        horizon=Horizon(steps=40, decay=10, decided=True),
    )  # fmt: skip
    losses = series(tmp_path, TRAIN_LOSS)
    assert losses[0] == pytest.approx(math.log(48), rel=0.02)  # knows nothing yet
    assert losses[-1] < losses[0] - 1
    assert lasts == [False] * 39 + [True]
    expected = [1e-2 * lr_multiplier(s, schedule="wsd", warmup=3, horizon=40, decay=10) for s in range(40)]
    assert series(tmp_path, LEARNING_RATE) == pytest.approx(expected)
    windows = sampler.windows.count
    full = sampler.batch(np.arange(windows)).loss_mask.sum().item()
    used = sum(sampler.batch(6 * s + np.arange(6)).loss_mask.sum().item() for s in range(40))
    assert (state.step, state.tokens) == (40, used) and used > full  # more than one epoch
    loaded = tiny_model(seed=1)
    load_model(latest_checkpoint(tmp_path / "checkpoints"), loaded)
    assert equal(weights(loaded), weights(model))


@pytest.mark.parametrize("kill_at", [1, 5, 11])
def test_a_killed_and_resumed_run_equals_the_uninterrupted_one_bitwise(
    tmp_path, tiny_model, sampler, settings, clock, kill_at: int
) -> None:
    whole = tiny_model()
    run(whole, sampler, settings(), tmp_path / "whole")
    often = settings(checkpoint_every=0.5)  # of the clock's seconds: not every step
    with pytest.raises(PowerCut):
        run(tiny_model(), sampler, often, tmp_path / "cut", at_step(kill_at, cut))
    torch.manual_seed(99)  # a new process shares nothing
    resumed = tiny_model(seed=7)
    if latest_checkpoint(tmp_path / "cut/checkpoints") is None:
        resumed = tiny_model()  # nothing saved yet: it starts over, as a new run does
    run(resumed, sampler, often, tmp_path / "cut")
    assert equal(weights(whole), weights(resumed))
    for name in (TRAIN_LOSS, LEARNING_RATE):
        assert series(tmp_path / "cut", name) == series(tmp_path / "whole", name)
    saved = [latest_checkpoint(tmp_path / f / "checkpoints") for f in ("whole", "cut")]
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (saved[0] / file).read_bytes() == (saved[1] / file).read_bytes()


def test_a_run_resumed_in_its_second_epoch_goes_on_inside_it(
    tmp_path, tiny_model, sampler, settings, stop
) -> None:
    """OLMo#650, #584: the start index was kept for the next epoch, or the epoch forgotten."""
    read: list[int] = []
    recorded = Sampler(sampler.windows, sampler.seed)
    recorded.batch = lambda samples: read.extend(samples.tolist()) or sampler.batch(samples)

    def ask() -> None:
        stop.signal = signal.SIGTERM

    rows = sampler.windows.count
    halfway = rows * 3 // 2 // 6
    horizon = Horizon(steps=-(-3 * rows // 6), decay=4, decided=True)
    with pytest.raises(RequeueError):
        run(tiny_model(), recorded, settings(), tmp_path, at_step(halfway, ask), horizon=horizon, stop=stop)
    assert rows < 6 * halfway < 2 * rows
    del read[6 * halfway :]  # made ready, never trained on
    run(tiny_model(seed=7), recorded, settings(), tmp_path, horizon=horizon)
    orders = [sampler.rows(np.array(read[e * rows : (e + 1) * rows])).tolist() for e in range(3)]
    assert all(sorted(order) == list(range(rows)) for order in orders)
    assert orders[0] != orders[1] != orders[2]


def test_the_first_step_after_a_resume_has_the_schedules_learning_rate(
    tmp_path, tiny_model, sampler, settings, stop
) -> None:
    """torchtitan#275, nanotron#245: it had the initial one. A new peak takes effect at once."""

    def ask() -> None:
        stop.signal = signal.SIGTERM

    with pytest.raises(RequeueError):
        run(tiny_model(), sampler, settings(), tmp_path, at_step(9, ask), stop=stop)
    used: list[float] = []

    def rate_in_the_optimizer(optimizer, *_) -> None:
        used.append(optimizer.param_groups[0]["lr"])

    seen = register_optimizer_step_pre_hook(rate_in_the_optimizer)
    try:
        run(tiny_model(), sampler, settings(optimizer=OptimizerSettings(learning_rate=3e-2)), tmp_path)
    finally:
        seen.remove()
    left = [3, 2, 1]  # of the four steps of the decay, which ends one notch above 0
    assert used == pytest.approx([3e-2 * notches / 5 for notches in left])
    assert series(tmp_path, LEARNING_RATE)[9:] == used


def test_the_schedule_counts_optimizer_steps_not_micro_batches(
    tmp_path, tiny_model, sampler, settings
) -> None:
    """nanochat#775: a horizon in micro-batches made the rate negative, then the loss NaN."""
    for size in (1, 6):
        state = run(tiny_model(), sampler, settings(micro_batch_size=size), tmp_path / str(size))
        assert state.step == STEPS
        moments = load_file(latest_checkpoint(tmp_path / f"{size}/checkpoints") / "optimizer.safetensors")
        assert {float(t) for name, t in moments.items() if name.startswith("step/")} == {STEPS}
    rates = series(tmp_path / "1", LEARNING_RATE)
    assert rates == series(tmp_path / "6", LEARNING_RATE)
    rising, flat, falling = [1 / 3, 2 / 3, 1], [1] * 5, [4 / 5, 3 / 5, 2 / 5, 1 / 5]
    assert rates == pytest.approx([1e-2 * m for m in rising + flat + falling])
    assert series(tmp_path / "1", TRAIN_LOSS) == pytest.approx(series(tmp_path / "6", TRAIN_LOSS), rel=1e-4)


def test_mfu_is_the_flops_of_the_tokens_over_those_of_the_machine(
    tmp_path, tiny_model, sampler, settings, clock
) -> None:
    """Tokens of the whole step, whatever the micro-batch; shorter sequences have less attention."""
    shape = tiny_model().shape
    plan = StepPlan(6, 16, seq_ramp=[Ramp(6 * 16 * 4, 8)])
    run(tiny_model(), sampler, settings(steps=plan, micro_batch_size=5), tmp_path, peak_flops=1e9)
    rates, found = series(tmp_path, TOKENS_PER_SECOND), series(tmp_path, MFU)
    looks = [6 * 16 / (rate * clock.tick) for rate in rates]  # at the clock while the step ran
    assert all(0 < n < 9 and n == pytest.approx(round(n), abs=0.01) for n in looks)
    lengths = [8] * 4 + [16] * 8
    expected = [shape.flops_per_token(n) * rate / 1e9 for n, rate in zip(lengths, rates, strict=True)]
    assert found == pytest.approx(expected, abs=1e-4) and min(found) > 0.01


def test_checkpoints_written_behind_training_hold_the_same_bytes(
    tmp_path, tiny_model, sampler, settings, clock, monkeypatch
) -> None:
    def slow(tensors) -> bytes:
        time.sleep(0.01)  # training is at the next step when the file is made
        return save(tensors)

    monkeypatch.setattr(store, "save", slow)
    for background in (False, True):
        config = settings(ema_decay=0.9, keep_every=1, background_checkpoints=background)
        run(tiny_model(), sampler, config, tmp_path / str(background))
    for step in range(1, STEPS + 1):
        before, behind = (tmp_path / f"{name}/checkpoints/step-{step:08d}" for name in ("False", "True"))
        files = {p.name for p in before.iterdir()}
        assert files == {p.name for p in behind.iterdir()} and "COMPLETE" in files
        assert all((before / name).read_bytes() == (behind / name).read_bytes() for name in files)


def test_a_background_write_that_fails_ends_the_run_and_the_next_call_continues_bitwise(
    tmp_path, tiny_model, sampler, settings, monkeypatch
) -> None:
    def full(tensors) -> bytes:
        raise OSError(errno.ENOSPC, "disk full")

    config = settings(keep_every=4, background_checkpoints=True)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        fill = at_step(5, lambda: patch.setattr(store, "save", full))
        run(tiny_model(), sampler, config, tmp_path / "full", fill)
    assert load_state(latest_checkpoint(tmp_path / "full/checkpoints"))["step"] == 4
    whole, resumed = tiny_model(), tiny_model(seed=3)
    run(whole, sampler, config, tmp_path / "whole")
    run(resumed, sampler, config, tmp_path / "full")
    assert equal(weights(whole), weights(resumed))


def test_metrics_of_steps_that_are_done_again_are_not_doubled(
    tmp_path, tiny_model, sampler, settings, stop
) -> None:
    def ask() -> None:
        stop.signal = signal.SIGTERM

    with pytest.raises(RequeueError):
        run(tiny_model(), sampler, settings(), tmp_path, at_step(4, ask), stop=stop)
    with pytest.raises(PowerCut):  # two steps beyond the checkpoint, then the lights go out
        run(tiny_model(), sampler, settings(), tmp_path, at_step(7, cut))
    assert [r["step"] for r in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 7, "tr')  # torn by the cut
    run(tiny_model(), sampler, settings(), tmp_path)
    assert len(series(tmp_path, TRAIN_LOSS)) == STEPS


@pytest.mark.parametrize(
    ("number", "error", "code"),
    [
        (signal.SIGTERM, RequeueError, ExitCode.REQUEUE),
        (signal.SIGUSR1, RequeueError, ExitCode.REQUEUE),
        (signal.SIGINT, InterruptedByUser, ExitCode.SIGINT),
    ],
)
def test_a_signal_leaves_after_a_checkpoint(
    tmp_path, tiny_model, sampler, settings, number, error, code
) -> None:
    handlers = signal.getsignal(number)
    model = tiny_model()
    with stop_requests() as stop, pytest.raises(error) as caught:
        run(model, sampler, settings(), tmp_path, at_step(5, lambda: os.kill(os.getpid(), number)), stop=stop)
    assert caught.value.exit_code == code and "step 5" in caught.value.what
    assert signal.getsignal(number) is handlers
    saved = latest_checkpoint(tmp_path / "checkpoints")
    assert load_state(saved)["step"] == 5
    whole = tiny_model()
    run(whole, sampler, settings(), tmp_path / "whole")
    run(model, sampler, settings(), tmp_path)
    assert equal(weights(model), weights(whole))


def test_a_signal_at_the_last_step_finishes(tmp_path, tiny_model, sampler, settings, stop) -> None:
    def ask() -> None:
        stop.signal = signal.SIGTERM

    assert run(tiny_model(), sampler, settings(), tmp_path, at_step(STEPS, ask), stop=stop).step == STEPS


def test_checkpoints_come_by_time_and_old_ones_go(tmp_path, tiny_model, sampler, settings, clock) -> None:
    run(tiny_model(), sampler, settings(checkpoint_every=0.0), tmp_path)
    kept = [p.name for p in complete_checkpoints(tmp_path / "checkpoints")]
    assert kept == [f"step-{STEPS - 1:08d}", f"step-{STEPS:08d}"]
    assert (tmp_path / "checkpoints/latest").read_text() == kept[-1]


# --- time-boxed ---

BOX = 3.5  # seconds of the fake clock


def boxed(steps: int) -> Horizon:
    return Horizon(steps=steps, decay=max(1, steps // 3), decided=False, seconds=BOX, decay_fraction=0.35)


def box(folder, tiny_model, sampler, settings, estimate: int, *callbacks, stop=None):
    model, decided = tiny_model(), []
    horizon = boxed(estimate)
    run(
        model, sampler, settings(), folder, *callbacks, horizon=horizon, stop=stop,
        on_horizon=lambda h, step: decided.append((h.steps, h.decay, step)),
    )  # fmt: skip
    return model, horizon, decided


@pytest.mark.parametrize("estimate", [6, 30, 10_000])
def test_a_time_box_ends_in_time_whatever_the_plan_expected_and_replays_bitwise(
    tmp_path, tiny_model, sampler, settings, clock, estimate: int
) -> None:
    start = clock.now
    model, horizon, decided = box(tmp_path / "boxed", tiny_model, sampler, settings, estimate)
    assert horizon.decided and len(decided) == 1
    steps, decay, at = decided[0]
    assert steps == at + decay == horizon.steps and 15 < steps < 200
    assert clock.now - start == pytest.approx(BOX, rel=0.15)
    assert decay / steps == pytest.approx(0.35, abs=0.1)
    rates = series(tmp_path / "boxed", LEARNING_RATE)
    assert rates[3:at] == [1e-2] * (at - 3)  # neither the estimate nor the decision reaches back
    assert rates[-1] == pytest.approx(1e-2 / (decay + 1)) and len(rates) == steps
    replayed = tiny_model()
    run(
        replayed, sampler, settings(), tmp_path / "again",
        horizon=Horizon(steps=steps, decay=decay, decided=True, seconds=BOX),
    )  # fmt: skip
    assert equal(weights(model), weights(replayed))
    assert series(tmp_path / "again", TRAIN_LOSS) == series(tmp_path / "boxed", TRAIN_LOSS)


def test_a_run_resumed_after_its_decision_was_due_still_ends_in_time(
    tmp_path, tiny_model, sampler, settings, clock, stop
) -> None:
    def due(facts) -> None:
        if facts.metrics["time"] >= 0.65 * BOX:
            stop.signal = signal.SIGTERM

    with pytest.raises(RequeueError):
        box(tmp_path, tiny_model, sampler, settings, 50, due, stop=stop)
    before = load_state(latest_checkpoint(tmp_path / "checkpoints"))
    _, horizon, decided = box(tmp_path, tiny_model, sampler, settings, 50)
    assert decided[0][2] == before["step"]  # at once
    expected = (BOX - before["seconds"]) / (before["seconds"] / before["step"])
    assert horizon.decay == pytest.approx(expected, rel=0.1)


# --- decide before you step ---


def poisoned(kind: str):
    """The third step's loss or gradient is not a number."""
    calls = itertools.count(1)

    def numerator(model, batch):
        loss = causal_numerator(model, batch)
        if next(calls) != 5:  # two micro-batches a step
            return loss
        # The derivative of sqrt at 0 is infinite, and 0 * inf is not a number.
        return loss * math.nan if kind == "loss" else loss + (loss * 0).sqrt() * 0

    return numerator


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_refused_before_the_optimizer_moves(
    tmp_path, tiny_model, sampler, settings, monkeypatch, kind: str
) -> None:
    monkeypatch.setattr(loop, "causal_numerator", poisoned(kind))
    model, good, events = tiny_model(), [], []
    with pytest.raises(DivergedError, match="step 3; weights are unchanged since step 2") as error:
        run(
            model, sampler, settings(guard=GuardConfig(policy="stop")), tmp_path,
            lambda facts: good.append(weights(facts.model)), on_event=events.append,
        )  # fmt: skip
    assert error.value.exit_code == ExitCode.DIVERGED
    assert len(good) == 2 and equal(weights(model), good[-1])
    (event,) = events
    assert (event["step"], event["kind"], event["act"]) == (3, "non_finite", "stop")
    named = {d["id"] for sequence in event["sequences"] for d in sequence["documents"]}
    assert named and named <= {d.id for sample in range(12, 18) for d in sampler.documents(sample)}


# --- memory ---


def hungry(
    largest: int, message: str = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
):
    """Runs out of memory above `largest` sequences, but not in the first micro-batch of a step."""
    seen = []

    def numerator(model, batch):
        seen.append(len(batch))
        if len(batch) > largest and (len(seen) > 1 or largest == 0):
            raise RuntimeError(message)
        return causal_numerator(model, batch)

    return numerator


def test_out_of_memory_halves_the_micro_batch_and_keeps_the_step(
    tmp_path, tiny_model, sampler, settings, monkeypatch
) -> None:
    expected = tiny_model()
    run(expected, sampler, settings(micro_batch_size=2, steps=StepPlan(12, 16)), tmp_path / "small")
    monkeypatch.setattr(loop, "causal_numerator", hungry(2))
    model, events = tiny_model(), []
    state = run(
        model, sampler, settings(micro_batch_size=8, steps=StepPlan(12, 16)), tmp_path / "large",
        on_event=events.append,
    )  # fmt: skip
    assert [(e["step"], e["kind"]) for e in events] == [(1, "out_of_memory")] * 2
    assert "8 -> 4" in events[0]["text"] and "4 -> 2" in events[1]["text"]
    assert state.micro_batch_size == 2
    assert equal(weights(model), weights(expected))  # nothing of the failed attempts stayed in the gradients
    assert series(tmp_path / "large", "tokens") == series(tmp_path / "small", "tokens")


def test_one_sequence_that_does_not_fit_ends_with_advice(
    tmp_path, tiny_model, sampler, settings, monkeypatch
) -> None:
    monkeypatch.setattr(loop, "causal_numerator", hungry(0))
    with pytest.raises(PreflightError, match="micro-batch of one") as error:
        run(tiny_model(), sampler, settings(), tmp_path)
    assert "model.size" in error.value.hint


def test_other_runtime_errors_are_not_taken_for_memory(
    tmp_path, tiny_model, sampler, settings, monkeypatch
) -> None:
    monkeypatch.setattr(loop, "causal_numerator", hungry(0, "shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        run(tiny_model(), sampler, settings(), tmp_path)


def test_a_validation_between_logged_steps_is_written_down(tmp_path, tiny_model, sampler, settings) -> None:
    def validate(facts) -> None:
        if facts.step == 7:
            facts.metrics[metrics.VALIDATION_LOSS] = 3.0

    run(tiny_model(), sampler, settings(log_every=5), tmp_path, validate)
    records = {r["step"]: r for r in read_jsonl(tmp_path / "metrics.jsonl")}
    assert list(records) == [5, 7, 10, STEPS] and records[7][metrics.VALIDATION_LOSS] == 3.0


def test_an_average_asked_for_later_begins_at_the_weights_of_the_checkpoint(
    tmp_path, tiny_model, sampler, settings
) -> None:
    model, horizon = tiny_model(), Horizon(steps=5, decay=1, decided=True)
    run(model, sampler, settings(schedule="constant"), tmp_path, horizon=horizon)
    before = weights(model)
    resumed, horizon = tiny_model(seed=3), Horizon(steps=6, decay=1, decided=True)
    seen = []
    config = settings(schedule="constant", ema_decay=0.9)
    run(resumed, sampler, config, tmp_path, lambda facts: seen.extend(facts.ema.average), horizon=horizon)
    # The decay of step 5, counted from 0, is at most (1 + 5) / (10 + 5).
    for average, old, new in zip(seen, before, weights(resumed), strict=True):
        torch.testing.assert_close(average, old + 0.6 * (new - old))
