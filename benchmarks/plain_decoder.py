"""The plain baseline: a Llama-style decoder and loop as a tutorial writes them, eager and fp32.

Same mathematics and same number of parameters as `lavra.model.decoder` (RMSNorm, RoPE, SwiGLU, tied
embedding), written with separate projections and PyTorch's own attention.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lavra.model.config import ModelShape


class PlainBlock(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        d, kv = shape.d_model, shape.n_kv_heads * shape.head_dim
        self.shape = shape
        self.norm1, self.norm2 = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
        self.q, self.k, self.v = (nn.Linear(d, width, bias=False) for width in (d, kv, kv))
        self.o = nn.Linear(d, d, bias=False)
        self.gate, self.up = (nn.Linear(d, shape.d_ff, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.d_ff, d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (self._heads(f(h)) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(
            rope(q, cos, sin), rope(k, cos, sin), v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)


class PlainDecoder(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab_size, shape.d_model)
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.n_layers))
        self.norm = nn.RMSNorm(shape.d_model, eps=1e-5)
        frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(shape.seq_len), frequencies)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.linear(self.norm(x), self.embedding.weight)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@torch.no_grad()
def load_weights(model: PlainDecoder, outer: dict[str, Tensor], blocks: list[dict[str, Tensor]]) -> None:
    """Weights in plain names, as `contenders.protocol.Task.separate_weights` gives them."""
    model.embedding.weight.copy_(outer["embedding"])
    model.norm.weight.copy_(outer["norm"])
    for block, weights in zip(model.blocks, blocks, strict=True):
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            getattr(block, name).weight.copy_(weights[name])
        block.norm1.weight.copy_(weights["attention_norm"])
        block.norm2.weight.copy_(weights["feed_forward_norm"])


def plain_step(
    model: PlainDecoder,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    targets: Tensor,
    clip_norm: float,
) -> float:
    """One optimizer step of the tutorial loop; returns the loss."""
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
