"""Which samples each optimizer step reads: batch size and sequence length as pure functions of the tokens so far."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Ramp(NamedTuple):
    """A value in force until a number of tokens.

    Attributes:
        until: tokens of the run.
        value: sequences a step, or tokens a sequence.
    """

    until: int
    value: int


@dataclass(frozen=True)
class StepSamples:
    """Samples `[first, first + count)`, each cut to sequences of `seq_len`."""

    first: int
    count: int
    seq_len: int


@dataclass(frozen=True)
class StepPlan:
    """Samples of every optimizer step.

    Attributes:
        batch_size: samples a step when all ramps are over.
        seq_len: tokens of a sample; shorter sequences are samples cut in equal parts.
        batch_ramp: smaller (or larger) batches before.
        seq_ramp: shorter sequences before; each divides `seq_len`. The order of the data does not depend on it.
    """

    batch_size: int
    seq_len: int
    batch_ramp: Sequence[Ramp] = ()
    seq_ramp: Sequence[Ramp] = ()

    def __post_init__(self) -> None:
        assert all(self.seq_len % ramp.value == 0 for ramp in self.seq_ramp)
        assert all(
            a.until < b.until for r in (self.batch_ramp, self.seq_ramp) for a, b in itertools.pairwise(r)
        )

    def at(self, step: int) -> StepSamples:
        """Samples of optimizer step `step` = 0, 1, ..."""
        first, count = self._first(step)
        tokens = first * self.seq_len
        seq_len = next((r.value for r in self.seq_ramp if tokens < r.until), self.seq_len)
        return StepSamples(first, count, seq_len)

    def tokens_before(self, step: int) -> int:
        """Tokens of all steps before `step`, padding included."""
        return self._first(step)[0] * self.seq_len

    def steps_for(self, tokens: float) -> int:
        """The smallest number of steps that holds `tokens`."""
        low, high = 0, 1
        while self.tokens_before(high) < tokens:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.tokens_before(middle) < tokens else (low, middle)
        return high

    def _first(self, step: int) -> tuple[int, int]:
        """First sample and number of samples of a step."""
        first = 0
        for ramp in self.batch_ramp:
            steps = max(
                0, -(-(ramp.until // self.seq_len - first) // ramp.value)
            )  # the last may pass `until`
            if step < steps:
                return first + step * ramp.value, ramp.value
            step, first = step - steps, first + steps * ramp.value
        return first + step * self.batch_size, self.batch_size


def leave_out(skipped: Sequence[Sequence[int]], first: int, count: int) -> list[list[int]]:
    """`skipped` and `[first, first + count)` as ranges without overlap; the new one may contain old ones."""
    merged: list[list[int]] = []
    for start, size in sorted((start, size) for start, size in [*skipped, (first, count)]):
        if merged and start <= merged[-1][0] + merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], start + size - merged[-1][0])
        else:
            merged.append([start, size])
    return merged


def skip(samples: NDArray[np.int64], skipped: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Move sample numbers past the ranges `[first, first + count)` left out: the n-th that is read -> its global index.

    Args:
        skipped: (first, count) of ranges that do not overlap.
    """
    moved = samples.copy()
    for first, count in sorted((first, count) for first, count in skipped):
        moved[moved >= first] += count
    return moved


def first_left(shape: StepSamples, skipped: Sequence[Sequence[int]]) -> int:
    """Global index of the first sample that a step reads, past what is left out."""
    return int(skip(np.array([shape.first]), skipped)[0])
