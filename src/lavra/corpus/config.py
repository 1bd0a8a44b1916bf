"""Settings of the corpus room."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lavra.corpus.decontamination.config import Decontamination
from lavra.corpus.near.config import NearDuplicates
from lavra.corpus.pii import Pii
from lavra.schema import AutoBytes, AutoCount, Bytes, Config

STANDARD_LIBRARY = "python:stdlib"
SUCCESS_METRICS = ("documents_in", "kept_fraction", "train_bytes", "validation_bytes", "error_documents")


class Source(Config):
    """One place that text comes from."""

    path: str = Field(
        description="File, folder or glob, relative to the recipe; or `python:stdlib`, the text of this Python"
    )
    name: str = Field(
        default="", description="Name in accounting and report; default: the last part of the path"
    )
    text_field: str = Field(default="text", description="JSONL/Parquet field that holds the text")
    id_field: str = Field(
        default="id", description="JSONL/Parquet field that names a record, when there is one"
    )
    group_field: str = Field(
        default="auto",
        description="JSONL/Parquet field whose records never straddle train and validation (a book, a repository); "
        "`auto`: `group` if present, else the part of a path-like id before its last `/`, else the record itself",
    )


class CorpusConfig(Config):
    """What text to read, what to keep, and how to split it."""

    sources: tuple[Source, ...] = Field(
        default=(Source(path=STANDARD_LIBRARY),),
        description="Where text comes from; none: all text comes tokenised, from tokens.sources",
    )
    max_bytes: AutoBytes = Field(
        default="auto",
        description="Text bytes to take (a sample by content hash); `auto`: what the budget can use",
    )
    max_document_bytes: Bytes = Field(
        default=16 << 20, description="A larger record is quarantined as `oversize` without being loaded"
    )
    rulesets: tuple[str, ...] = Field(
        default=("lavra",),
        description="Rules that drop documents: names (`lavra corpus --rulesets`) or YAML files of your own; none: []",
    )
    thresholds: dict[str, float] = Field(
        default={}, description="Thresholds of the rulesets that you change, as `min_characters: 200`"
    )
    languages: tuple[str, ...] = Field(
        default=(), description="Languages to keep, as `[en, pt]`; none: any, and none is identified"
    )
    min_language_score: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.65,
        description="Probability below which a language is not believed (FineWeb and RefinedWeb: 0.65)",
    )
    pii: Pii = Pii()
    near_duplicates: NearDuplicates = NearDuplicates()
    decontamination: Decontamination = Decontamination()
    validation_fraction: Annotated[float, Field(gt=0, lt=0.5)] = Field(
        default=0.05, description="Share of the kept bytes held out, by whole groups"
    )
    validation_max_bytes: AutoBytes = Field(
        default="auto", description="Upper bound of held-out bytes; `auto`: what evaluation has time for"
    )
    workers: AutoCount = Field(default="auto", description="Worker processes; `auto`: one a core")
