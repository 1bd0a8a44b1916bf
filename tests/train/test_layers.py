"""Oracle: q and k of a block, by hand, over the pairs that may see one another."""

from __future__ import annotations

import math

import pytest
import torch

from lavra.batch import Batch
from lavra.model.attention import document_starts_from_positions
from lavra.train.layers import activation_statistics


@torch.no_grad()
@pytest.mark.parametrize("window", [0, 1, 4])
@pytest.mark.parametrize("soft_cap", [0, 1.0])
def test_the_largest_attention_logit_is_that_of_a_visible_pair_before_the_soft_cap(
    tiny_model, window: int, soft_cap: float
) -> None:
    model = tiny_model(scale=8, attention_window=window, attention_soft_cap=soft_cap)
    tokens = torch.randint(48, (1, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(7), torch.arange(9)])[None]
    batch = Batch(
        tokens, tokens, positions, torch.ones(1, 16, dtype=torch.bool), torch.zeros(1, dtype=torch.long)
    )
    found = activation_statistics(model, batch, "fp32")
    rope, stream = model.rotary(positions), model.embedding(tokens)
    for number, block in enumerate(model.blocks):
        q, k, _ = block.attention.project(block.attention_norm(stream), rope)
        pairs = [
            abs(float(q[0, head, i] @ k[0, head // 2, j])) / math.sqrt(6)
            for head in range(4)
            for first, last in ((0, 7), (7, 16))
            for i in range(first, last)
            for j in range(first, i + 1)
            if not window or i - j < window
        ]
        assert found[f"blocks.{number}"]["attention_logit"] == pytest.approx(max(pairs), rel=1e-5)
        stream = block(stream, rope, document_starts_from_positions(positions))
