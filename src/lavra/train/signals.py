"""Turn signals into "checkpoint at the next step, then leave"."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from lavra import console
from lavra.errors import ExitCode, InterruptedByUser, LavraError, RequeueError


class StopRequest:
    """What the loop looks at between steps."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def error(self, step: int) -> LavraError:
        """The error to leave with after the checkpoint of `step` was written."""
        assert self.signal is not None
        kind = InterruptedByUser if self.signal == signal.SIGINT else RequeueError
        return kind(
            f"stopped by {signal.Signals(self.signal).name} after the checkpoint of step {step}",
            hint="run the same command again to continue",
        )


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """SIGTERM, SIGUSR1, SIGUSR2 and the first SIGINT ask for a stop; a second SIGINT exits at once."""
    request = StopRequest()

    def handle(number: int, _frame: object) -> None:
        if number == signal.SIGINT and request.signal == signal.SIGINT:
            os._exit(ExitCode.SIGINT)
        request.signal = number
        console.say(f"\n{signal.Signals(number).name}: checkpoint at the next step, then stop")

    watched = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    try:
        before = {number: signal.signal(number, handle) for number in watched}
    except ValueError:  # not the main thread: the host program keeps its handlers
        yield request
        return
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
