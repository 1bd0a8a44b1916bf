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

WORK = "work"  # folder of intermediate files, inside the artifact


class UnitPaths(NamedTuple):
    """Files of one unit below the artifact `out`."""

    out: Path
    unit: int

    @property
    def folder(self) -> Path:
        """Its intermediate files."""
        return self.out / WORK / "units" / f"{self.unit:05d}"

    @property
    def documents(self) -> Path:
        """Documents that pass the rules, in order."""
        return self.folder / "documents.parquet"

    @property
    def dropped(self) -> Path:
        """Documents that the rules drop."""
        return self.folder / "dropped.parquet"

    @property
    def records(self) -> Path:
        """Binary records of `documents`."""
        return self.folder / "records.bin"

    def part(self, side: str) -> Path:
        """Its part of the finished corpus: train, validation, dropped or errors."""
        return self.out / side / f"part-{self.unit:05d}.parquet"

    def seal(self, name: str) -> Path:
        """The record that says that a pass is complete."""
        return self.folder / f"{name}.json"


def sealed_tally(paths: UnitPaths, name: str) -> Tally | None:
    """The tally of a complete pass; None when it must (again) be done."""
    if not paths.seal(name).exists():
        return None
    record = read_json(paths.seal(name))
    for file, size in record["files"].items():
        path = paths.out / file
        if not path.exists() or path.stat().st_size != size:
            return None
    return Tally(record["tally"])


def seal(paths: UnitPaths, name: str, files: Sequence[Path], tally: Tally) -> None:
    """Declare a pass complete; files that were not needed do not exist."""
    sizes = {str(path.relative_to(paths.out)): path.stat().st_size for path in files if path.exists()}
    write_json(paths.seal(name), {"files": sizes, "tally": tally.to_rows()})
