"""A tiny training run: store, sampler, settings, and a clock that only moves when looked at."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from lavra.tokens.packing import ConcatRows
from lavra.tokens.sampler import Sampler
from lavra.tokens.windows import Windows
from lavra.train.signals import StopRequest


@pytest.fixture(scope="session")
def sampler(tmp_path_factory, write_store) -> Sampler:
    """Sixty documents with some order in them, windows of 16."""
    chosen = random.Random(0)
    documents = [[1 + (start + 3 * i) % 40 for i in range(chosen.randint(0, 40))] for start in range(60)]
    store = write_store(tmp_path_factory.mktemp("tokens"), [documents])
    return Sampler(Windows(store, ConcatRows(store, 16)), seed=5)


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """Time inside the loop: every look at it takes `clock.tick` seconds."""
    state = SimpleNamespace(now=100.0, tick=0.02)

    def look() -> float:
        state.now += state.tick
        return state.now

    for module in ("loop", "horizon"):
        monkeypatch.setattr(f"lavra.train.{module}.time", SimpleNamespace(perf_counter=look))
    return state


@pytest.fixture
def stop() -> StopRequest:
    return StopRequest()
