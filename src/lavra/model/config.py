"""Shape of a decoder: the recipe's section, the concrete shape, exact parameter and FLOP counts."""

from __future__ import annotations

import math
from functools import cache
from typing import Annotated, Literal

from pydantic import Field, model_validator

from lavra.errors import UsageError
from lavra.schema import AutoCount, Config, Count

# Beyond 1024 in steps of 256, so that four query heads share each key/value head all along the ladder.
WIDTHS = [*range(64, 1024, 64), *range(1024, 16385, 256)]


class ModelConfig(Config):
    """Recipe section `model`: one dial (`size`), and every dimension to override."""

    size: AutoCount = Field(
        default="auto",
        description="Parameters, e.g. 10M; sets width, depth and heads; `auto`: what the budget trains best",
    )
    d_model: AutoCount = Field(default="auto", description="Width of the residual stream")
    n_layers: AutoCount = Field(default="auto", description="Number of blocks")
    n_heads: AutoCount = Field(default="auto", description="Query heads; `auto`: d_model / 64")
    n_kv_heads: AutoCount = Field(
        default="auto", description="Key/value heads (grouped-query attention); divides n_heads"
    )
    d_ff: AutoCount = Field(
        default="auto", description="Width of the SwiGLU; `auto`: 8/3 d_model to a multiple of 64"
    )
    tie_embeddings: bool | Literal["auto"] = Field(
        default="auto", description="Use the embedding as output head; `auto`: yes below 500M parameters"
    )
    rope_theta: Annotated[float, Field(gt=0)] = Field(default=10_000.0, description="RoPE base frequency")
    attention_window: Count = Field(
        default=0, description="Keys that a token attends to at most, itself included; 0: all of its document"
    )
    attention_soft_cap: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="Bound c of the attention scores s, which become c tanh(s / c); 0: none"
    )


class ModelShape(Config):
    """A concrete Llama-style decoder (RMSNorm, RoPE, SwiGLU, GQA)."""

    vocab_size: Count
    d_model: Count
    n_layers: Count
    n_heads: Count
    n_kv_heads: Count
    d_ff: Count
    seq_len: Count
    tie_embeddings: bool
    rope_theta: float = 10_000.0
    attention_window: Count = 0
    attention_soft_cap: Annotated[float, Field(ge=0)] = 0.0

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelShape:
        if self.d_model % self.n_heads or self.head_dim % 2:
            raise ValueError(
                f"d_model {self.d_model} must be n_heads {self.n_heads} times an even head width"
            )
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} must be a multiple of n_kv_heads {self.n_kv_heads}")
        return self

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_heads

    def block_matrices(self) -> list[tuple[int, int]]:
        """Rows and columns of each matrix of one block: query, key, value, output, gate, up, down."""
        kv = self.n_kv_heads * self.head_dim
        d, ff = self.d_model, self.d_ff
        return [(d, d), (kv, d), (kv, d), (d, d), (ff, d), (ff, d), (d, ff)]

    def parameter_count(self) -> int:
        """Exact number of trainable parameters."""
        embeddings = self.vocab_size * self.d_model * (1 if self.tie_embeddings else 2)
        block = sum(r * c for r, c in self.block_matrices()) + 2 * self.d_model
        return embeddings + self.n_layers * block + self.d_model

    def matmul_parameter_count(self) -> int:
        """Parameters that multiply every token: blocks and output head, no norms, no input embedding."""
        block = sum(r * c for r, c in self.block_matrices())
        return self.n_layers * block + self.vocab_size * self.d_model

    def flops_per_token(self, seq_len: int | None = None) -> float:
        """Training FLOPs a token: 6 x matmul parameters + causal attention 6 L d s, or 6 L d w (2 - w / s) in a window w.

        Convention: output head counted, input embedding not, attention causal and inside its window (s^2 / 2
        pairs of query and key, or w s - w^2 / 2), documents not regarded, forward plus twice that for
        backward; recomputation is not counted (MFU, Chowdhery et al. 2022, App. B).
        """
        length = self.seq_len if seq_len is None else seq_len
        window = min(self.attention_window or length, length)
        keys = window * (2 - window / length)  # twice the mean number that a query sees
        return 6.0 * self.matmul_parameter_count() + 6.0 * self.n_layers * self.d_model * keys


@cache
def shape_for(config: ModelConfig, size: int, *, vocab_size: int, seq_len: int) -> ModelShape:
    """The shape nearest to `size` parameters on lavra's aspect-ratio curve, overrides respected.

    Depth follows width (d/64 layers up to width 1024, then slower, as GPT-2 and Llama shapes do).

    Raises:
        UsageError: overrides that do not fit together.
    """
    widths = [config.d_model] if config.d_model != "auto" else WIDTHS
    best: ModelShape | None = None
    for width in widths:
        heads = _heads(config.n_heads, config.n_kv_heads, width)
        if heads is None:
            continue
        shapes = [_shape(config, size, width, n, heads, vocab_size, seq_len) for n in _depths(config, width)]
        best = min([best, *shapes] if best else shapes, key=lambda shape: _distance(shape, size))
        if shapes[0].parameter_count() > 3 * size:
            break  # wider ones are only farther
    if best is None:
        seen = {k: v for k in ("d_model", "n_heads", "n_kv_heads") if (v := getattr(config, k)) != "auto"}
        raise UsageError(
            "no decoder has " + ", ".join(f"{k} {v}" for k, v in seen.items()),
            where="model",
            hint="d_model is n_heads times an even head width, n_heads a multiple of n_kv_heads",
        )
    return best


def _distance(shape: ModelShape, size: int) -> float:
    """Relative distance from `size`; depth off the natural curve costs a little, so it only fine-tunes."""
    off_curve = abs(shape.n_layers - natural_depth(shape.d_model)) / natural_depth(shape.d_model)
    return abs(shape.parameter_count() / size - 1) + 0.3 * off_curve


def natural_depth(d_model: int) -> int:
    """Layers for a width: 256 -> 4, 768 -> 12, 1024 -> 16, 2048 -> 21, 4096 -> 32."""
    return max(2, round(d_model / 64)) if d_model <= 1024 else 16 + round((d_model - 1024) / 192)


def _depths(config: ModelConfig, d_model: int) -> list[int]:
    if config.n_layers != "auto":
        return [config.n_layers]
    natural = natural_depth(d_model)
    return sorted({max(2, natural + delta) for delta in (-1, 0, 1)})


@cache
def _heads(n_heads: int | str, n_kv_heads: int | str, width: int) -> tuple[int, int] | None:
    """Query and key/value heads for a width, head width as near to 64 as it divides; None: nothing fits."""
    allowed = range(1, width // 2 + 1) if isinstance(n_heads, str) else [n_heads]
    kv_heads = 1 if isinstance(n_kv_heads, str) else n_kv_heads
    fitting = [h for h in allowed if width % (2 * h) == 0 and h % kv_heads == 0]
    if not fitting:
        return None
    heads = min(fitting, key=lambda h: abs(math.log(width / h / 64)))
    if not isinstance(n_kv_heads, str):
        return heads, kv_heads
    return heads, heads // 4 if width >= 1024 and heads % 4 == 0 else heads


def _shape(
    config: ModelConfig,
    size: int,
    width: int,
    depth: int,
    heads: tuple[int, int],
    vocab_size: int,
    seq_len: int,
) -> ModelShape:
    tie = size < 500_000_000 if config.tie_embeddings == "auto" else config.tie_embeddings
    return ModelShape(
        vocab_size=vocab_size,
        d_model=width,
        n_layers=depth,
        n_heads=heads[0],
        n_kv_heads=heads[1],
        d_ff=config.d_ff if config.d_ff != "auto" else 64 * max(1, round(8 * width / 3 / 64)),
        seq_len=seq_len,
        tie_embeddings=tie,
        rope_theta=config.rope_theta,
        attention_window=config.attention_window,
        attention_soft_cap=config.attention_soft_cap,
    )
