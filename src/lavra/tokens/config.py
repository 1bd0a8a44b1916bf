"""Settings of the tokens room."""

from __future__ import annotations

from pydantic import Field

from lavra.schema import AutoCount, Config

SUCCESS_METRICS = ("train_tokens", "validation_tokens")


class TokensConfig(Config):
    """How tokens are cut into training windows."""

    seq_len: AutoCount = Field(
        default="auto", description="Tokens a window; `auto`: by budget, at most what the corpus fills"
    )
