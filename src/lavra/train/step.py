"""The one loss path: numerator sums over the global step, divided once by its normaliser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lavra.batch import Batch
from lavra.model.decoder import Decoder
from lavra.objective.causal import causal_normalizer, causal_numerator
from lavra.parallel.ranks import ALONE, Ranks
from lavra.train.precision import autocast

Numerator = Callable[[Decoder, Batch], Tensor]


@dataclass
class StepResult:
    """Facts of one optimizer step before the optimizer moved.

    Attributes:
        loss: nats per target, mean over the global step (all processes).
        targets: number of targets of the global step.
        micro_losses: summed nats of each micro-batch of this process.
    """

    loss: float
    targets: int
    micro_losses: list[float] = field(default_factory=list)


def accumulate(
    model: Decoder,
    batch: Batch,
    *,
    micro_batch_size: int,
    precision: str,
    numerator: Numerator = causal_numerator,
    seq_len: int | None = None,
    loss_scale: float = 1.0,
    ranks: Ranks = ALONE,
) -> StepResult:
    """Gradients of the mean loss of the whole global step, summed over its micro-batches and processes.

    Args:
        batch: this process's sequences of the global step; may be empty.
        micro_batch_size: sequences a forward pass; changes memory, not the loss.
        seq_len: cut the sequences to this length first (documents start anew at each cut).
        loss_scale: factor on the loss during the backward pass only; divided out of the gradients again.

    Raises:
        ValueError: the global step has no target at all.
    """
    device = next(model.parameters()).device
    targets = int(ranks.sum([causal_normalizer(batch)])[0])
    if not targets:
        raise ValueError("a global step without targets: every position is masked")
    sums = []
    for micro in batch.split(micro_batch_size):
        if seq_len is not None:
            micro = micro.cut(seq_len)
        with autocast(device, precision):
            loss_sum = numerator(model, micro.to(device))
        (loss_sum * (loss_scale / targets)).backward()
        sums.append(loss_sum.detach().double())
    ranks.sum_gradients(model.parameters())
    if loss_scale != 1.0:
        torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], 1.0 / loss_scale)
    micro_losses = torch.stack(sums).tolist() if sums else []
    return StepResult(ranks.sum([sum(micro_losses)])[0] / targets, targets, micro_losses)


@torch.no_grad()
def validation_loss(model: Decoder, batches: Sequence[Batch], *, precision: str) -> float:
    """Mean nats per target over `batches`: the same numerator and normaliser as training."""
    device = next(model.parameters()).device
    total, targets = 0.0, 0
    for batch in batches:
        with autocast(device, precision):
            total += float(causal_numerator(model, batch.to(device)))
        targets += causal_normalizer(batch)
    return total / targets
