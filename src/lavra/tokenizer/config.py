"""Settings of the tokenizer room."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lavra.schema import AutoCount, Bytes, Config

SUCCESS_METRICS = ("vocab_size", "bytes_per_token")


class TokenizerConfig(Config):
    """Byte-level BPE, trained on the training split, or given."""

    path: str = Field(
        default="",
        description="A tokenizer.json to use; nothing is trained then (it must know <|endoftext|>)",
    )
    vocab_size: AutoCount = Field(
        default="auto",
        description="Entries, special tokens and 256 bytes included; `auto`: by budget and corpus",
    )
    pattern: Literal["qwen2", "llama-bpe", "gpt-2"] = Field(
        default="qwen2",
        description="Split pattern, by the name llama.cpp gives it (so that GGUF export can name it)",
    )
    train_max_bytes: Annotated[Bytes, Field(ge=1000)] = Field(
        default=8_000_000, description="Text that the merges are learned from (a sample by document hash)"
    )
