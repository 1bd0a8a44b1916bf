"""A run directory, read with tolerance: what is missing is `None`; what is damaged also, and a `problem`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lavra.metrics import read_jsonl

MAX_TEXT = 100_000  # characters of one file that the report shows


@dataclass(frozen=True)
class TextFile:
    """A text file of the run; `cut` if the report shows only its beginning."""

    name: str
    text: str
    cut: bool = False


class Run:
    """Reader of one run directory; every file is read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[str] = []
        self._read: dict[str, Any] = {}

    def json(self, name: str) -> Any:
        """Parsed JSON file, or None."""
        if name not in self._read:
            self._read[name] = self._parse(name)
        return self._read[name]

    def facts(self, name: str) -> Mapping[str, Any]:
        """A JSON file that must hold an object; empty if it is not there."""
        value = self.json(name)
        if value is not None and not isinstance(value, Mapping):
            self._read[name] = None
            self.problems.append(f"{name} holds no JSON object")
        return value if isinstance(value, Mapping) else {}

    def records(self, name: str) -> list[dict[str, Any]]:
        """Objects of a JSONL log; a damaged line ends the reading and is named."""
        if name in self._read:
            return list(self._read[name])
        found: list[dict[str, Any]] = []
        try:
            found.extend(record for record in read_jsonl(self.folder / name) if isinstance(record, dict))
        except (OSError, ValueError) as error:
            self.problems.append(f"{name} cannot be read past record {len(found)}: {error}")
        self._read[name] = found
        return found

    def missing(self, name: str, stage: str) -> dict[str, Any]:
        """Context of a section whose file `name`, written by `stage`, gives nothing to show."""
        if (self.folder / name).is_file():
            return {"broken": f"{name} holds nothing that can be shown"}
        return {"notice": (name, stage)}

    def text(self, name: str) -> TextFile | None:
        """The beginning of a text file, or None."""
        try:
            with open(self.folder / name, encoding="utf-8", errors="replace") as file:
                text = file.read(MAX_TEXT + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.problems.append(f"{name} cannot be read: {error.strerror}")
            return None
        return TextFile(name, text[:MAX_TEXT], cut=len(text) > MAX_TEXT)

    def _parse(self, name: str) -> Any:
        try:
            return json.loads((self.folder / name).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            self.problems.append(f"{name} cannot be read: {error}")
            return None


def part(value: Any, key: str) -> Mapping[str, Any]:
    """`value[key]` if both are objects, else an empty one."""
    inner = value.get(key) if isinstance(value, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


def items(value: Any, key: str) -> list[Mapping[str, Any]]:
    """The objects in the list `value[key]`."""
    inner = value.get(key) if isinstance(value, Mapping) else None
    return [item for item in inner if isinstance(item, Mapping)] if isinstance(inner, list) else []


def sentences(value: Any, key: str) -> list[str]:
    """The list `value[key]` as text."""
    inner = value.get(key) if isinstance(value, Mapping) else None
    return [str(item) for item in inner] if isinstance(inner, list) else []
