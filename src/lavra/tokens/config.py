"""Settings of the tokens room."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lavra.schema import AutoCount, Config, Count

SUCCESS_METRICS = ("train_tokens", "validation_tokens")

Packing = Literal["concat", "best_fit", "pad"]
_Weight = Annotated[float, Field(ge=0)]
Weights = dict[str, _Weight]


class TokenSource(Config):
    """Text that is tokenised already, with the run's own tokenizer."""

    path: str = Field(
        description="A .bin file (nanoGPT, llm.c), the prefix of a Megatron .bin and .idx, a folder or glob of .bin "
        "files, or a run directory of lavra (its training tokens)"
    )
    name: str = Field(
        default="", description="Name in mixture and ledger; default: the last part of the path"
    )
    end_id: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="End token in these files; needed without an .idx; default: the tokenizer's end token",
    )


class CurriculumStage(Config):
    """A stage of the curriculum: other weights from some moment on."""

    start: Literal["decay"] | Count = Field(
        description="When it begins: tokens of training, or `decay`, when the learning rate begins to fall"
    )
    mixture: Weights = Field(description="Share of the tokens by source; they need not sum to one")


class SequenceRamp(Config):
    """Shorter sequences at the beginning of training."""

    until: Annotated[Count, Field(ge=1)] = Field(description="Tokens of training before which it holds")
    seq_len: Annotated[Count, Field(ge=1)] = Field(description="Tokens a sequence; divides tokens.seq_len")


class TokensConfig(Config):
    """How tokens are cut into training rows, and how often each source is read."""

    seq_len: AutoCount = Field(
        default="auto", description="Tokens a sequence; `auto`: by budget, at most what the corpus fills"
    )
    sources: tuple[TokenSource, ...] = Field(
        default=(), description="Tokenised text beside the corpus's (needs tokenizer.path)"
    )
    packing: Packing = Field(
        default="concat",
        description="concat: one stream cut into rows; best_fit: no document is cut that fits in a row; "
        "pad: one document (or piece of a long one) a row",
    )
    mixture: Weights = Field(
        default={}, description="Share of the tokens by source; empty: every source by its size"
    )
    max_epochs: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={},
        description="A source is read at most so often, then its share goes to the others (needs tokens.mixture)",
    )
    curriculum: tuple[CurriculumStage, ...] = Field(
        default=(), description="Later stages with other weights (needs tokens.mixture)"
    )
    seq_len_ramp: tuple[SequenceRamp, ...] = Field(
        default=(), description="Shorter sequences at the beginning, by rising `until`; the data order stays"
    )
