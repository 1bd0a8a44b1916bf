"""Oracle: the tensors at the moment of the snapshot. Background writes are held back until the test lets them go."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from lavra.checkpoint import store
from lavra.checkpoint.store import (
    Saver,
    complete_checkpoints,
    latest_checkpoint,
    load_by_name,
    load_model,
    load_optimizer,
    load_state,
    take_snapshot,
)
from lavra.optim.build import OptimizerSettings, build_optimizer

SECONDS = 60  # a fault must fail, not hang


@pytest.fixture
def net(tiny_model):
    """A model and an optimizer with moments."""
    model = tiny_model()
    optimizer = build_optimizer(model, OptimizerSettings(learning_rate=1e-2))
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer) -> None:
    """One in-place step of weights and moments."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def steps_of(folder: Path) -> list[int]:
    return [load_state(c)["step"] for c in complete_checkpoints(folder)]


@contextlib.contextmanager
def held_back() -> Iterator[threading.Event]:
    """Writes wait at their first file until the event is set."""
    go, write = threading.Event(), store.artifact.write_bytes

    def wait(path: Path, data: bytes) -> None:
        assert go.wait(SECONDS)
        write(path, data)

    with mock.patch.object(store.artifact, "write_bytes", wait):
        try:
            yield go
        finally:
            go.set()


def failing(at: int) -> Callable[..., None]:
    """A disk that is full at write number `at` and has room before and afterwards."""
    calls, write = itertools.count(1), store.artifact.write_bytes

    def maybe(path: Path, data: bytes) -> None:
        if next(calls) == at:
            raise OSError(errno.ENOSPC, "disk full")
        write(path, data)

    return maybe


def test_training_goes_on_behind_a_write_and_does_not_reach_the_file(tmp_path, tiny_model, net) -> None:
    """Weights, moments and average change in place while the file of an earlier moment is being written."""
    model, optimizer = net
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    held = {name: t.clone() for name, t in average.items()}
    weights = [p.detach().clone() for p in model.parameters()]
    moments = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    saver = Saver(tmp_path, keep=2, background=True)
    with held_back() as go:
        saver.save(1, take_snapshot(model, optimizer, {"step": 1}, average=average, copy=True))
        assert latest_checkpoint(tmp_path) is None  # `save` came back before anything was written
        step(model, optimizer)
        torch._foreach_zero_(list(average.values()))
        go.set()
        saver.wait()
    saved = latest_checkpoint(tmp_path)
    other = tiny_model(seed=9)
    other_optimizer = build_optimizer(other, OptimizerSettings())
    load_model(saved, other)
    load_optimizer(saved, other, other_optimizer)
    load_by_name(saved, store.AVERAGE, average)
    assert all(torch.equal(a, b) for a, b in zip(weights, other.parameters(), strict=True))
    for before, parameter in zip(moments, other.parameters(), strict=True):
        assert torch.equal(before, other_optimizer.state[parameter]["exp_avg"])
        assert float(other_optimizer.state[parameter]["step"]) == 1
    assert all(torch.equal(held[name], tensor) for name, tensor in average.items())


def test_one_write_runs_at_a_time_and_in_order(tmp_path, net) -> None:
    saver = Saver(tmp_path, keep=5, background=True)
    with held_back() as go:
        saver.save(1, take_snapshot(*net, {"step": 1}, copy=True))
        second = threading.Thread(
            target=saver.save, args=(2, take_snapshot(*net, {"step": 2}, copy=True)), daemon=True
        )
        second.start()
        second.join(0.1)
        assert second.is_alive()  # it waits for the first
        go.set()
        second.join(SECONDS)
    saver.wait()
    assert steps_of(tmp_path) == [1, 2]


@pytest.mark.parametrize("call", ["save", "wait"])
def test_an_error_of_a_background_write_is_raised_by_the_next_call_and_only_once(
    tmp_path, net, call: str
) -> None:
    saver = Saver(tmp_path, keep=5, background=True)
    saver.save(1, take_snapshot(*net, {"step": 1}, copy=True))
    saver.wait()
    with mock.patch.object(store.artifact, "write_bytes", failing(at=2)):
        saver.save(2, take_snapshot(*net, {"step": 2}, copy=True))
        with pytest.raises(OSError, match="disk full"):
            saver.save(3, take_snapshot(*net, {"step": 3}, copy=True)) if call == "save" else saver.wait()
        saver.save(4, take_snapshot(*net, {"step": 4}, copy=True))
        saver.wait()
    assert steps_of(tmp_path) == [1, 4]  # what failed left nothing; the next one is whole


@pytest.mark.parametrize("background", [False, True])
def test_old_checkpoints_go_only_after_the_new_one_is_complete(tmp_path, net, background: bool) -> None:
    """Lightning#688, torchtitan#909: purging before or beside a save that fails leaves nothing."""
    saver = Saver(tmp_path, keep=1, keep_every=10, background=background)
    for number in (10, 11):
        saver.save(number, take_snapshot(*net, {"step": number}, copy=True))
    saver.wait()
    assert steps_of(tmp_path) == [10, 11]
    for place in range(1, 5):  # weights, moments, state, marker
        with (
            mock.patch.object(store.artifact, "write_bytes", failing(at=place)),
            pytest.raises(OSError, match="disk full"),
        ):
            saver.save(12, take_snapshot(*net, {"step": 12}, copy=True))
            saver.wait()
        assert steps_of(tmp_path) == [10, 11]
    saver.save(13, take_snapshot(*net, {"step": 13}, copy=True))
    saver.wait()
    assert steps_of(tmp_path) == [10, 13]  # of the newest one, and of every ten steps


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("at", range(5))  # weights, moments, state, marker, name of the latest
def test_killed_in_the_middle_of_a_save_the_earlier_checkpoint_is_the_latest(
    tmp_path, net, background: bool, at: int
) -> None:
    """SIGKILL in a process of its own, between any two files of a checkpoint."""
    Saver(tmp_path, keep=1).save(1, take_snapshot(*net, {"step": 1}))
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            _save_until(at, tell, tmp_path, net, background)
        os._exit(0)
    os.close(tell)
    with os.fdopen(ready, "rb") as waiting:
        assert waiting.read(1) == b"!"
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert load_state(latest_checkpoint(tmp_path))["step"] == (2 if at == 4 else 1)
    Saver(tmp_path, keep=1).save(3, take_snapshot(*net, {"step": 3}))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000003"]


def _save_until(at: int, tell: int, folder: Path, net, background: bool) -> None:
    """Save step 2, but stop for ever before file number `at` and say so."""
    calls, write = itertools.count(), store.artifact.write_bytes

    def stop(path: Path, data: bytes) -> None:
        if next(calls) == at:
            os.write(tell, b"!")
            time.sleep(SECONDS)
        write(path, data)

    store.artifact.write_bytes = stop
    saver = Saver(folder, keep=1, background=background)
    saver.save(2, take_snapshot(*net, {"step": 2}, copy=True))
    saver.wait()
