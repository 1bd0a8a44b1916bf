"""Next-token prediction. loss = sum of masked cross entropies / number of unmasked targets."""

from __future__ import annotations

from torch import Tensor

from lavra.batch import Batch
from lavra.model.decoder import Decoder
from lavra.objective.cross_entropy import IGNORED, linear_cross_entropy


def causal_numerator(model: Decoder, batch: Batch) -> Tensor:
    """Sum over unmasked targets of -ln p(target | earlier tokens of its document), in nats (fp32 scalar)."""
    hidden = model.hidden(batch.tokens, batch.positions)  # [B, T, D]
    targets = batch.targets.masked_fill(~batch.loss_mask, IGNORED)
    return linear_cross_entropy(hidden.flatten(0, 1), model.output_weight, targets.flatten())


def causal_normalizer(batch: Batch) -> int:
    """Number of targets that count; summed over the whole global step before any division (law 1)."""
    return int(batch.loss_mask.sum())
