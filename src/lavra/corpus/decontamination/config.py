"""Settings of decontamination."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from lavra.schema import Config


class Benchmark(Config):
    """Items that the training text must not hold."""

    path: str = Field(description="JSONL file (.gz, .zst, .bz2 too), relative to the recipe")
    name: str = Field(default="", description="Name in the report; default: the file's, without suffixes")
    fields: tuple[str, ...] = Field(
        default=(),
        description="Fields that hold text or lists of texts; default: all that ever hold two words",
    )

    @property
    def title(self) -> str:
        """Name in the report."""
        return self.name or Path(self.path).name.split(".")[0]


class Decontamination(Config):
    """Which runs of words of a benchmark item count, and what happens to documents that hold one."""

    benchmarks: tuple[Benchmark, ...] = Field(
        default=(), description="Items to look for; none: nothing is looked for"
    )
    ngram_words: Annotated[int, Field(ge=2, le=64)] = Field(
        default=13,
        description="Words in a row of an item that a document must not hold (Brown et al. 2020: 13)",
    )
    min_words: Annotated[int, Field(ge=2, le=64)] = Field(
        default=8,
        description="An item with no text of `ngram_words` is looked for whole, if it has this many",
    )
    max_items: Annotated[int, Field(ge=1)] = Field(
        default=10,
        description="Words that more items than this share are a phrase of the benchmark, and not looked for",
    )
    policy: Literal["drop", "report"] = Field(
        default="drop", description="Documents that hold an item: dropped as `contaminated`, or only reported"
    )
