"""Everything a person sees in the terminal: lines, tables, progress. Plain text off a terminal."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from lavra.units import format_seconds

_quiet = False
PLAIN_INTERVAL_SECONDS = 10.0


def set_quiet(quiet: bool) -> None:
    """Silence progress and notes; results and errors still print."""
    global _quiet
    _quiet = quiet


def is_quiet() -> bool:
    """Whether progress and notes are silenced."""
    return _quiet


def say(text: str = "") -> None:
    """One note on standard error (standard output is kept for results)."""
    if not _quiet:
        print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """A note that must be seen, even when quiet."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


def format_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns; numbers to the right, text to the left."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(headers), *cells]) for i in range(len(headers))]
    right = [
        all(isinstance(row[i], (int, float)) or str(row[i])[:1].isdigit() for row in rows)
        for i in range(len(headers))
    ]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()

    return "\n".join([line(headers), "  ".join("-" * w for w in widths), *map(line, cells)])


_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Finite values as one line of at most `width` blocks, lowest to highest; each block is the mean of its share."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((v - low) / (high - low) * top) if high > low else 0] for v in means)


class Progress(Protocol):
    """Handle given by `progress`."""

    def advance(self, amount: float, note: str = "") -> None:
        """Add to the amount done; `note` replaces the text at the end of the bar."""


@contextmanager
def progress(label: str, total: float) -> Iterator[Progress]:
    """A bar with ETA on a terminal; elsewhere a plain line at most every 10 seconds."""
    if _quiet:
        yield _Silent()
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        with RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(file=sys.stderr),
        ) as bar:
            yield _Rich(bar, bar.add_task(label, total=max(total, 1e-9), note=""))
    else:
        yield _Plain(label, total)


class _Silent:
    def advance(self, amount: float, note: str = "") -> None:
        pass


class _Rich:
    def __init__(self, bar, task) -> None:
        self.bar, self.task = bar, task

    def advance(self, amount: float, note: str = "") -> None:
        self.bar.update(self.task, advance=amount, **({"note": note} if note else {}))


class _Plain:
    def __init__(self, label: str, total: float) -> None:
        self.label, self.total, self.done = label, max(total, 1e-9), 0.0
        self.start = self.printed = time.monotonic()

    def advance(self, amount: float, note: str = "") -> None:
        self.done += amount
        now = time.monotonic()
        if now - self.printed >= PLAIN_INTERVAL_SECONDS and self.done > 0:
            self.printed = now
            remaining = (now - self.start) * max(self.total - self.done, 0) / self.done
            percent = 100 * self.done / self.total
            say(f"{self.label} {percent:.0f}% ETA {format_seconds(remaining)} {note}".rstrip())
