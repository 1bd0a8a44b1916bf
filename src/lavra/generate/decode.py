"""Autoregressive decoding with a key/value cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lavra.generate.sampling import Sampling, next_token
from lavra.model.attention import cached_attention
from lavra.model.decoder import Block, Decoder
from lavra.tokenizer.bpe import Tokenizer


class Cache:
    """Keys and values of one sequence: per layer `[1, K, T_max, E]`, `length` of them filled."""

    def __init__(self, model: Decoder) -> None:
        shape, weight = model.shape, model.embedding.weight
        size = (1, shape.n_kv_heads, shape.seq_len, shape.head_dim)
        self.keys = [weight.new_zeros(size) for _ in model.blocks]
        self.values = [weight.new_zeros(size) for _ in model.blocks]
        self.length = 0


@torch.no_grad()
def extend(model: Decoder, cache: Cache, ids: list[int]) -> Tensor:
    """Feed `ids` after what the cache holds; returns the logits `[V]` that follow the last one."""
    start, stop = cache.length, cache.length + len(ids)
    assert ids and stop <= model.shape.seq_len
    device = model.embedding.weight.device
    positions = torch.arange(start, stop, device=device).unsqueeze(0)
    rope = model.rotary(positions)
    hidden = model.embedding(torch.tensor([ids], device=device))
    for number, block in enumerate(cast("Iterable[Block]", model.blocks)):
        layer = block.attention
        q, k, v = layer.project(block.attention_norm(hidden), rope)
        cache.keys[number][:, :, start:stop] = k
        cache.values[number][:, :, start:stop] = v
        keys, values = cache.keys[number][:, :, :stop], cache.values[number][:, :, :stop]
        mixed = cached_attention(q, keys, values, window=layer.window, soft_cap=layer.soft_cap)
        hidden = hidden + layer.merge(mixed)
        hidden = hidden + block.feed_forward(block.feed_forward_norm(hidden))
    cache.length = stop
    return F.linear(model.norm(hidden[0, -1]), model.output_weight)


def generate_ids(
    model: Decoder, prompt: list[int], *, end_id: int, max_tokens: int, sampling: Sampling
) -> Iterator[int]:
    """Yield new token ids until the end token (not yielded) or `max_tokens`.

    A document is opened with the end token, as in training. When the context is full, the newest half
    of it is read again into a fresh cache.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    context = [end_id, *prompt]
    limit = model.shape.seq_len
    cache = Cache(model)
    pending = context[-limit:]
    for _ in range(max_tokens):
        if cache.length + len(pending) > limit:
            cache, pending = Cache(model), context[-(limit // 2) :]
        token = next_token(extend(model, cache, pending), sampling, generator)
        if token == end_id:
            return
        yield token
        context.append(token)
        pending = [token]


def generate_text(
    model: Decoder, tokenizer: Tokenizer, prompt: str, *, max_tokens: int, sampling: Sampling
) -> Iterator[str]:
    """Yield pieces of text as they become whole characters."""
    ids: list[int] = []
    shown = 0
    stream = generate_ids(
        model, tokenizer.encode(prompt), end_id=tokenizer.end_id, max_tokens=max_tokens, sampling=sampling
    )
    for token in stream:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character may still be incomplete
            yield text[shown:]
            shown = len(text)
    if ids and (rest := tokenizer.decode(ids)[shown:]):
        yield rest
