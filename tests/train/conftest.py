"""A tiny training run: store, sampler, settings, and a clock that only moves when looked at."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lavra.tokens.windows import Sampler, Windows
from lavra.train.loop import TrainSettings
from lavra.train.signals import StopRequest


@pytest.fixture(scope="session")
def sampler(tmp_path_factory, write_store) -> Sampler:
    """Sixty documents with some order in them, windows of 16."""
    chosen = random.Random(0)
    documents = [[1 + (start + 3 * i) % 40 for i in range(chosen.randint(0, 40))] for start in range(60)]
    return Sampler(Windows(write_store(tmp_path_factory.mktemp("tokens"), [documents]), 16), seed=5)


@pytest.fixture
def settings() -> Callable[..., TrainSettings]:
    def make(**overrides: Any) -> TrainSettings:
        values = dict(
            batch_size=6,
            micro_batch_size=4,
            learning_rate=1e-2,
            schedule="wsd",
            warmup=3,
            weight_decay=0.1,
            betas=(0.9, 0.95),
            grad_clip=1.0,
            precision="fp32",
            compile=False,
            seed=0,
            checkpoint_every=1e9,
            keep_checkpoints=2,
            log_every=1,
        )
        return TrainSettings(**(values | overrides))

    return make


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """Time inside the loop: every look at it takes `clock.tick` seconds."""
    state = SimpleNamespace(now=100.0, tick=0.02)

    def look() -> float:
        state.now += state.tick
        return state.now

    monkeypatch.setattr("lavra.train.loop.time", SimpleNamespace(perf_counter=look))
    return state


@pytest.fixture
def stop() -> StopRequest:
    return StopRequest()
