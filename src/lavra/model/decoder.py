"""Llama-style decoder. B batch, T tokens, D width, H heads, K kv heads, E head width, V vocabulary."""

from __future__ import annotations

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lavra.model.attention import attention, document_starts_from_positions
from lavra.model.config import ModelShape


class RotaryTable(nn.Module):
    """cos and sin of RoPE (Su et al. 2021), `[T_max, E/2]` each; never saved, rebuilt from the shape."""

    cos: Tensor
    sin: Tensor

    def __init__(self, seq_len: int, head_dim: int, theta: float) -> None:
        super().__init__()
        self.seq_len, self.head_dim, self.theta = seq_len, head_dim, theta
        self.register_buffer("cos", torch.empty(seq_len, head_dim // 2), persistent=False)
        self.register_buffer("sin", torch.empty(seq_len, head_dim // 2), persistent=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Fill the buffers; again after `to_empty`, which leaves them undefined (`initialize` does)."""
        frequencies = self.theta ** (-torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim)
        angles = torch.outer(torch.arange(self.seq_len, dtype=torch.float64), frequencies)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, T]` -> cos and sin `[B, 1, T, E/2]`."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + E/2) of each head `[B, H, T, E]` by their position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class StackedLinear(nn.Linear):
    """Several matrices of `splits` rows each in one weight: one product instead of many.

    Optimizers that look at matrices (Muon) read `splits`.
    """

    def __init__(self, columns: int, splits: tuple[int, ...]) -> None:
        super().__init__(columns, sum(splits), bias=False)
        self.splits = splits


class Attention(nn.Module):
    """Causal grouped-query attention inside documents, windows and soft caps as the shape has them."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.n_heads, shape.n_kv_heads, shape.head_dim
        self.window, self.soft_cap = shape.attention_window or None, shape.attention_soft_cap or None
        rows = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim
        self.qkv = StackedLinear(shape.d_model, rows)
        self.out = nn.Linear(self.heads * self.head_dim, shape.d_model, bias=False)

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """`[B, T, D]` -> rotated q `[B, H, T, E]`, rotated k and plain v `[B, K, T, E]`."""
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        return rotate(q, *rope), rotate(k, *rope), v

    def merge(self, x: Tensor) -> Tensor:
        """Heads `[B, H, T, E]` -> output `[B, T, D]`."""
        return self.out(x.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], document_starts: Tensor) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`; `document_starts` `[B, T]` as in `attention`."""
        q, k, v = self.project(x, rope)
        return self.merge(attention(q, k, v, document_starts, window=self.window, soft_cap=self.soft_cap))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): out(silu(gate(x)) * up(x)), gate and up in one matrix."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_up = StackedLinear(shape.d_model, (shape.d_ff, shape.d_ff))
        self.out = nn.Linear(shape.d_ff, shape.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., D]` -> `[..., D]`."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.d_model, eps=1e-5)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.d_model, eps=1e-5)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], document_starts: Tensor) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`."""
        x = x + self.attention(self.attention_norm(x), rope, document_starts)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """Token and position indices `[B, T]` -> next-token logits `[B, T, V]`."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.d_model)
        self.rotary = RotaryTable(shape.seq_len, shape.head_dim, shape.rope_theta)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layers))
        self.norm = nn.RMSNorm(shape.d_model, eps=1e-5)
        self.head = None if shape.tie_embeddings else nn.Linear(shape.d_model, shape.vocab_size, bias=False)

    @property
    def output_weight(self) -> Tensor:
        """`[V, D]`; tied by construction (law 8)."""
        return self.embedding.weight if self.head is None else self.head.weight

    def hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """`[B, T]` -> normalised output of the last block `[B, T, D]`; times `output_weight` it is the logits."""
        rope = self.rotary(positions)
        starts = document_starts_from_positions(positions)
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, rope, starts)
        return self.norm(hidden)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """`[B, T]` -> next-token logits `[B, T, V]`."""
        return F.linear(self.hidden(tokens, positions), self.output_weight)


@torch.no_grad()
def initialize(model: Decoder, seed: int) -> None:
    """Normal(0, 0.02), residual outputs scaled by 1/sqrt(2 layers) (GPT-2); norms 1.

    Each parameter is drawn from its own generator, seeded by its name: the values do not depend on
    the order of construction or on how the model is laid out over processes. The table of RoPE is filled
    too: whatever memory held after `to_empty` is gone.
    """
    model.rotary.reset()
    residual_scale = 1 / math.sqrt(2 * model.shape.n_layers)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            parameter.fill_(1.0)
            continue
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        scale = residual_scale if name.endswith("out.weight") else 1.0
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.02 * scale))


def build_decoder(shape: ModelShape, *, seed: int, device: torch.device | str = "cpu") -> Decoder:
    """A freshly initialised fp32 decoder."""
    model = Decoder(shape)
    initialize(model, seed)
    return model.to(device)
