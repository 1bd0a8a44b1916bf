"""Next-token prediction. loss = sum of masked cross entropies / number of unmasked targets."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lavra.batch import Batch


def causal_numerator(model: nn.Module, batch: Batch) -> Tensor:
    """Sum over unmasked targets of -ln p(target | earlier tokens of its document), in nats (fp32 scalar)."""
    logits = model(batch.tokens, batch.positions)  # [B, T, V]
    targets = batch.targets.masked_fill(~batch.loss_mask, -100)
    return F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )


def causal_normalizer(batch: Batch) -> int:
    """Number of targets that count; summed over the whole global step before any division (law 1)."""
    return int(batch.loss_mask.sum())
