"""Settings of near-duplicate removal."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lavra.schema import Config

Share = Annotated[float, Field(gt=0, le=1)]


class NearDuplicates(Config):
    """Which documents are too much like an earlier one. 16 bands of 7 hashes find 98 % of pairs at Jaccard 0.8, 75 % at 0.7."""

    enabled: bool = Field(default=True, description="Remove near-duplicates (exact ones always go)")
    jaccard: Share = Field(
        default=0.8, description="Shared shingles of five words / all shingles of both, from which one goes"
    )
    containment: Share = Field(
        default=0.95, description="Shared shingles / those of the later document, from which it goes"
    )
    bands: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=16, description="Bands of the signature; equal in one: a pair is looked at"
    )
    rows: Annotated[int, Field(ge=1, le=1024)] = Field(default=7, description="Hashes in a band")
