"""The files of one work unit, and the seals that make an interrupted build continue.

A pass over a unit writes whole files and then its seal: their sizes, and what it counted. A sealed
pass is never repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lavra.artifact import read_json, write_json
from lavra.corpus.accounting import Tally

WORK = "work"  # folder of intermediate files, inside the corpus artifact


class ReadUnit(NamedTuple):
    """Files of one unit below the `documents` artifact `out`."""

    out: Path
    unit: int

    @property
    def folder(self) -> Path:
        """All of them but the errors."""
        return self.out / "units" / f"{self.unit:05d}"

    @property
    def documents(self) -> Path:
        """Documents that could be read, in order, with their signals."""
        return self.folder / "documents.parquet"

    @property
    def records(self) -> Path:
        """Binary records of `documents`."""
        return self.folder / "records.bin"

    @property
    def errors(self) -> Path:
        """Records that could not be read."""
        return self.out / "errors" / f"part-{self.unit:05d}.parquet"

    @property
    def seal(self) -> Path:
        """The record that says that the unit is read."""
        return self.folder / "read.json"


class WriteUnit(NamedTuple):
    """Files of one unit below the `corpus` artifact `out`, and those that it comes from."""

    out: Path
    read: ReadUnit

    @property
    def folder(self) -> Path:
        """Intermediate files."""
        return self.out / WORK / "units" / f"{self.read.unit:05d}"

    @property
    def verdicts(self) -> Path:
        """Bits [documents, rules / 8] of the rules that speak against each document."""
        return self.folder / "verdicts.npy"

    def part(self, side: str) -> Path:
        """Its part of the finished corpus: train, validation or dropped."""
        return self.out / side / f"part-{self.read.unit:05d}.parquet"

    def seal(self, name: str) -> Path:
        """The record that says that a pass, `judge` or `write`, is complete."""
        return self.folder / f"{name}.json"


def sealed_tally(seal_file: Path, out: Path) -> Tally | None:
    """The tally of a complete pass over files below `out`; None when it must (again) be done."""
    if not seal_file.exists():
        return None
    record = read_json(seal_file)
    for file, size in record["files"].items():
        path = out / file
        if not path.exists() or path.stat().st_size != size:
            return None
    return Tally(record["tally"])


def seal(seal_file: Path, out: Path, files: Sequence[Path], tally: Tally) -> None:
    """Declare a pass complete; files that were not needed do not exist."""
    sizes = {str(path.relative_to(out)): path.stat().st_size for path in files if path.exists()}
    write_json(seal_file, {"files": sizes, "tally": tally.to_rows()})


def merged(seals: Sequence[Path], out: Path) -> Tally:
    """The tallies of several complete passes together."""
    tallies = [sealed_tally(seal_file, out) for seal_file in seals]
    return Tally(row for tally in tallies if tally is not None for row in tally.to_rows())
