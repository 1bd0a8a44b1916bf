"""Which source each training sample comes from: weights, caps on epochs, and stages of a curriculum.

A run reads samples 0, 1, 2 ... The mixture says, for sample i, its source and which sample of that source it is; both
are closed forms of i, so nothing is saved, and the order depends on neither batch size nor the number of processes.

Inside a stretch of constant weights the sources follow a golden-ratio sequence u_j = (A j + c) mod M: source s takes the
samples whose u_j falls in its share of [0, M). Every window of n samples then holds n w_s of source s within a few, and
how many of the first n are its own is a sum of floors (`_floor_sum`), exact in integers.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lavra.errors import PreflightError

_MODULUS = 1 << 32
_STEP = 2654435769  # the odd integer next to 2^32 / golden ratio (Knuth, TAOCP 3, 6.4)


@dataclass(frozen=True)
class Stage:
    """Weights in force from a sample on.

    Attributes:
        first: first sample of the stage.
        weights: share of the samples by source name; need not sum to one.
    """

    first: int
    weights: Mapping[str, float]


@dataclass(frozen=True)
class _Segment:
    """Samples `[first, next segment's first)`.

    Attributes:
        limits: `[sources + 1]` share boundaries in `[0, M]`.
        before: samples of each source before the segment.
    """

    first: int
    limits: tuple[int, ...]
    before: tuple[int, ...]


class Mixture:
    """Sources by sample.

    Args:
        rows: rows of each source in one epoch, by name.
        stages: by rising `first`, the first at 0.
        max_epochs: a source is read at most so often, then its share goes to the others; absent: no limit.
        seed: shifts the sequence.

    Raises:
        PreflightError: a weight names no source, all weights of a stage are zero, or all its sources are used up at once.
    """

    def __init__(
        self,
        rows: Mapping[str, int],
        stages: Sequence[Stage],
        max_epochs: Mapping[str, float] = {},
        seed: int = 0,
    ) -> None:
        assert stages and stages[0].first == 0
        self.sources = list(rows)
        self._rows = [rows[name] for name in self.sources]
        self._caps = [
            int(max_epochs[name] * n) if name in max_epochs else None if n else 0 for name, n in rows.items()
        ]
        self.check_sources([*max_epochs, *(name for stage in stages for name in stage.weights)])
        self._shift = seed * 0x9E3779B1 % _MODULUS
        self._stages = list(stages)
        self._segments: list[_Segment] = []
        self.end: int | None = None  # samples until every source is used up
        self._build()

    def check_sources(self, names: Iterable[str]) -> None:
        """Whether there are tokens of these sources.

        Raises:
            PreflightError: there are not.
        """
        for name in names:
            if name not in self.sources:
                raise PreflightError(
                    f"the mixture names a source `{name}` that has no tokens",
                    where="tokens.mixture",
                    hint="sources: " + ", ".join(self.sources),
                )

    def begin_stage(self, stage: Stage) -> None:
        """Add a stage that begins at or after the last one."""
        assert stage.first >= self._stages[-1].first
        kept = [s for s in self._stages if s.first < stage.first]
        self._stages = [*kept, replace(stage, first=stage.first if kept else 0)]
        self._build()

    def counts(self, n: int) -> list[int]:
        """How many of the first `n` samples come from each source."""
        segment = self._segments[self._segment_of(max(n - 1, 0))]
        return [b + c for b, c in zip(segment.before, self._inside(segment, n - segment.first), strict=True)]

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each sample its source (index) and its number among that source's samples."""
        source, number = np.empty_like(samples), np.empty_like(samples)
        order = np.argsort(samples, kind="stable")
        firsts = [segment.first for segment in self._segments[1:]]
        for place, chunk in enumerate(np.split(order, np.searchsorted(samples[order], firsts))):
            if len(chunk):
                source[chunk], number[chunk] = self._locate_in(self._segments[place], samples[chunk])
        return source, number

    def epochs(self, n: int) -> dict[str, float]:
        """How often each source has been read after `n` samples."""
        return {
            name: c / max(rows, 1)
            for name, c, rows in zip(self.sources, self.counts(n), self._rows, strict=True)
        }

    def changes(self) -> list[tuple[int, dict[str, float]]]:
        """Where the shares change: first sample, share by source."""
        return [
            (s.first, {n: (b - a) / _MODULUS for n, a, b in zip(self.sources, s.limits, s.limits[1:], strict=False) if b > a})
            for s in self._segments
        ]  # fmt: skip

    def _locate_in(self, segment: _Segment, samples: NDArray[np.int64]) -> tuple[NDArray, NDArray]:
        """Of one segment; `samples` rise. Between two of them nothing is assumed: gaps cost a walk over them."""
        first, last = int(samples[0]), int(samples[-1])
        walk = np.arange(first - segment.first, last - segment.first + 1, dtype=np.uint64)
        places = (walk * np.uint64(_STEP) + np.uint64(self._shift)) & np.uint64(_MODULUS - 1)
        sources = np.searchsorted(np.array(segment.limits, np.uint64), places, side="right") - 1
        base = self._inside(segment, first - segment.first)
        numbers = np.empty(len(walk), np.int64)
        for s in np.unique(sources):
            mine = sources == s
            numbers[mine] = segment.before[s] + base[s] + np.arange(np.count_nonzero(mine))
        return sources[samples - first], numbers[samples - first]

    def _inside(self, segment: _Segment, n: int) -> list[int]:
        """Samples of each source among the segment's first `n`."""
        below = [_count_below(n, limit, self._shift) for limit in segment.limits]
        return [b - a for a, b in itertools.pairwise(below)]

    def _segment_of(self, sample: int) -> int:
        return bisect.bisect_right([s.first for s in self._segments], sample) - 1

    def _build(self) -> None:
        self._segments, self.end = [], None
        before = [0] * len(self.sources)
        for place, stage in enumerate(self._stages):
            first = stage.first
            stop = self._stages[place + 1].first if place + 1 < len(self._stages) else None
            while stop is None or first < stop:
                left = [None if c is None else c - b for c, b in zip(self._caps, before, strict=True)]
                limits = self._limits(stage, left)
                if limits is None:
                    if first == stage.first:
                        raise PreflightError(
                            f"no source of the mixture has anything left at sample {first}",
                            where="tokens.mixture",
                            hint="raise tokens.max_epochs, give other sources a weight, or train for fewer tokens",
                        )
                    self.end = first
                    return
                segment = _Segment(first, limits, tuple(before))
                self._segments.append(segment)
                length = self._length(segment, left, None if stop is None else stop - first)
                if length is None:
                    break
                before = [b + c for b, c in zip(before, self._inside(segment, length), strict=True)]
                first += length

    def _limits(self, stage: Stage, left: list[int | None]) -> tuple[int, ...] | None:
        """Share boundaries of the sources that have something left; None: none has."""
        weights = [
            0.0 if room is not None and room <= 0 else float(stage.weights.get(name, 0.0))
            for name, room in zip(self.sources, left, strict=True)
        ]
        total = sum(weights)
        if total <= 0:
            return None
        cumulated = [0.0]
        for weight in weights:
            cumulated.append(cumulated[-1] + weight)
        return tuple(round(c / cumulated[-1] * _MODULUS) for c in cumulated)

    def _length(self, segment: _Segment, left: list[int | None], longest: int | None) -> int | None:
        """Samples until the first source is used up or the stage ends; None: for ever."""
        lengths = [] if longest is None else [longest]
        for s, room in enumerate(left):
            if room is not None and segment.limits[s + 1] > segment.limits[s]:
                lengths.append(self._when(segment, s, room))
        return min(lengths) if lengths else None

    def _when(self, segment: _Segment, source: int, room: int) -> int:
        """The smallest n whose first n samples hold `room` of the source."""
        low, high = 0, 1
        while self._inside(segment, high)[source] < room:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._inside(segment, middle)[source] < room else (low, middle)
        return high


def _count_below(n: int, limit: int, shift: int) -> int:
    """#{j < n : (A j + shift) mod M < limit}, for 0 <= limit <= M."""
    lifted = shift + _MODULUS  # keeps the second sum's terms from going negative
    return _floor_sum(n, _MODULUS, _STEP, lifted) - _floor_sum(n, _MODULUS, _STEP, lifted - limit)


def _floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Sum of floor((a i + b) / m) over i < n, for a, b >= 0, in O(log m) steps (Graham, Knuth & Patashnik, 3.26)."""
    total = 0
    while n > 0:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        top = a * n + b
        if top < m:
            break
        n, b, m, a = top // m, top % m, a, m
    return total
