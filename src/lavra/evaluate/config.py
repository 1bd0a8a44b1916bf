"""Settings of the evaluate room."""

from __future__ import annotations

from pydantic import Field

from lavra.schema import AutoBytes, Config

SUCCESS_METRICS = ("bits_per_byte", "prose_bits_per_byte", "code_bits_per_byte", "xz_ratio", "zstd_ratio")


class EvaluateConfig(Config):
    """Bits per byte on whole validation documents."""

    max_bytes: AutoBytes = Field(
        default="auto",
        description="Validation text scored (whole documents); `auto`: what the budget has time for",
    )
