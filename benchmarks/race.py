"""Contenders as processes that take turns: start them, ask for steps, find a contender's fastest variant."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contenders.protocol import Variant, command

STEPS_OF_A_TURN = 2
SEARCH_ROUNDS = 2


@dataclass(frozen=True)
class Contender:
    """Who takes part: a module of `contenders`, the interpreter that has its library, and how it may run.

    Attributes:
        variants: the first one runs unless a search found a faster one.
    """

    name: str
    module: str
    python: Path
    variants: list[Variant]


@dataclass
class Timings:
    """What a contender did in a race: seconds of a step for each round, and its peak memory."""

    variant: Variant
    facts: dict[str, Any]
    first_losses: list[float]
    seconds: list[float] = field(default_factory=list)
    peak_mib: float = 0.0


class ContenderFailed(Exception):
    """A contender's process ended before it was asked to."""


class Runner:
    """A contender's process. Its other output is kept beside the task, for when it fails."""

    def __init__(self, contender: Contender, variant: Variant, task: Path) -> None:
        self.contender, self.variant = contender, variant
        self._log = task.with_name(f"{contender.name}.log")
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                command(contender.python, contender.module, task, variant),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=Path(__file__).parent,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
            )
        self.facts = self._answer()

    def steps(self, number: int) -> dict[str, Any]:
        """Let it take some steps while everybody else waits."""
        with contextlib.suppress(BrokenPipeError):  # it is gone: its answer, which is missing, says why
            self._process.stdin.write(f"step {number}\n")
            self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            tail = "\n".join(self._log.read_text().splitlines()[-12:])
            raise ContenderFailed(f"{self.contender.name} ({self.variant}) failed:\n{tail}")
        return json.loads(line)


def race(
    entries: Iterable[tuple[Contender, Variant]], task: Path, rounds: int, report: Callable[[str], None]
) -> dict[str, Timings]:
    """All contenders in turns, `rounds` times; what each did, by name. The warm-up is not timed.

    One that does not get through its warm-up is reported and left out.

    Raises:
        ContenderFailed: one ended in the middle of the race.
    """
    runners: list[Runner] = []
    results: dict[str, Timings] = {}
    try:
        for contender, variant in entries:
            try:
                runner = Runner(contender, variant, task)
                losses = runner.steps(1)["losses"] + runner.steps(STEPS_OF_A_TURN)["losses"]
            except ContenderFailed as failure:
                report(f"{failure}\n{contender.name} does not take part")
                continue
            runners.append(runner)
            results[contender.name] = Timings(variant, runner.facts, losses)
        for _ in range(rounds):
            for runner in runners:
                answer, timings = runner.steps(STEPS_OF_A_TURN), results[runner.contender.name]
                timings.seconds.append(answer["seconds"])
                timings.peak_mib = answer["peak_mib"]
    finally:
        for runner in runners:
            runner.close()
    return results


def fastest(contender: Contender, task: Path, report: Callable[[str], None]) -> Variant | None:
    """The variant with the best turn, each alone for two rounds; None where no variant runs."""
    seconds: dict[Variant, float] = {}
    for variant in contender.variants:
        if timings := race([(contender, variant)], task, SEARCH_ROUNDS, report).get(contender.name):
            seconds[variant] = min(timings.seconds)
            report(f"{contender.name}, {variant}: {seconds[variant]:.3f} s a step")
    return min(seconds, key=seconds.__getitem__) if seconds else None
