"""Settings of the train room."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lavra.schema import AutoCount, AutoFloat, Config, Count, Seconds

SUCCESS_METRICS = ("train_loss", "val_loss", "val_bpb", "steps", "tokens")

_Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainConfig(Config):
    """Optimization, precision, checkpoints, and what is shown during training."""

    batch_tokens: AutoCount = Field(
        default="auto", description="Tokens of one optimizer step; `auto`: grows with the horizon"
    )
    micro_batch_size: AutoCount = Field(
        default="auto",
        description="Sequences a forward pass; `auto`: what fits and is fast; halves when memory runs out",
    )
    learning_rate: AutoFloat = Field(default="auto", description="Peak learning rate; `auto`: by width")
    schedule: Literal["wsd", "cosine"] = Field(
        default="wsd",
        description="Warm-up-stable-decay, or cosine (not with a time budget: its horizon must be known)",
    )
    warmup_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.05, description="Warm-up / planned steps"
    )
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.35, description="WSD decay / planned steps"
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.1, description="Decoupled; never on norms, biases, embeddings"
    )
    betas: tuple[_Beta, _Beta] = Field(default=(0.9, 0.95), description="AdamW moment decays")
    grad_clip: Annotated[float, Field(gt=0)] = Field(default=1.0, description="Largest global gradient norm")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto",
        description="bf16: bf16 compute over fp32 master weights; `auto`: the faster of what was measured here",
    )
    compile: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="torch.compile; `auto`: when the run is long enough to earn the compilation back",
    )
    checkpoint_every: Seconds = Field(default=60.0, description="Time between checkpoints")
    keep_checkpoints: Annotated[Count, Field(ge=1)] = Field(
        default=2, description="Newest complete checkpoints kept"
    )
    log_every: Annotated[Count, Field(ge=1)] = Field(
        default=1, description="Optimizer steps between metrics lines"
    )
    validations: Annotated[Count, Field(ge=1)] = Field(
        default=8, description="Validation points over the run, last step included"
    )
    validation_tokens: Annotated[Count, Field(ge=1)] = Field(
        default=16_384, description="Tokens of each in-training validation"
    )
    sample_tokens: Count = Field(
        default=96, description="Length of the text samples written at each validation; 0: none"
    )
    init_from: str = Field(
        default="", description="Run directory whose weights and tokenizer training continues from"
    )
