"""Oracle: the sampler itself."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from lavra.tokens.loader import Loader


class Slow:
    """A sampler that takes a while and says who asked."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.calls = seconds, []

    def batch(self, samples):
        time.sleep(self.seconds)
        self.calls.append((samples.tolist(), threading.current_thread().name))
        if 666 in samples:
            raise OSError("disk gone")
        return samples.tolist()


def test_batches_arrive_in_order_each_made_once_and_ahead() -> None:
    sampler = Slow()
    with Loader(sampler) as loader:
        for step in range(5):
            now, then = np.arange(3) + 3 * step, np.arange(3) + 3 * (step + 1)
            assert loader.get(now, then) == now.tolist()
    made = [call[0] for call in sampler.calls]
    assert made[:5] == [[3 * s, 3 * s + 1, 3 * s + 2] for s in range(5)]  # the sixth may be cancelled
    assert all("lavra-loader" in name for _, name in sampler.calls[1:])


def test_a_changed_mind_gets_what_it_asks_for() -> None:
    """After a skip the step reads other samples than were made ready."""
    with Loader(Slow()) as loader:
        loader.get(np.arange(3), np.arange(3, 6))
        assert loader.get(np.arange(9, 12), np.arange(12, 15)) == [9, 10, 11]
        assert loader.get(np.arange(12, 15)) == [12, 13, 14]


def test_waiting_is_counted_and_work_behind_training_is_not() -> None:
    with Loader(Slow(0.05)) as loader:
        loader.get(np.arange(3), np.arange(3, 6))
        assert loader.waited >= 0.05
        time.sleep(0.15)
        loader.get(np.arange(3, 6))
        assert loader.waited < 0.04


def test_an_error_of_the_thread_reaches_the_loop() -> None:
    with Loader(Slow()) as loader:
        loader.get(np.arange(3), np.array([666]))
        with pytest.raises(OSError, match="disk gone"):
            loader.get(np.array([666]))
