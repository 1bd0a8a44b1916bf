"""The one loss path: numerator sums over the global step, divided once by its normaliser."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lavra.batch import Batch
from lavra.model.decoder import Decoder
from lavra.objective.causal import causal_normalizer, causal_numerator

Numerator = Callable[[Decoder, Batch], Tensor]


@dataclass
class StepResult:
    """Facts of one optimizer step before the optimizer moved.

    Attributes:
        loss: nats per target, mean over the global step.
        targets: number of targets of the global step.
    """

    loss: float
    targets: int


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager:
    """bf16 compute over fp32 master weights, or plain fp32."""
    if precision == "bf16":
        return torch.autocast(device.type, torch.bfloat16)
    return contextlib.nullcontext()


def accumulate(
    model: Decoder, batch: Batch, *, micro_batch_size: int, precision: str, numerator: Numerator
) -> StepResult:
    """Gradients of the mean loss of the whole global step, summed over its micro-batches.

    Args:
        batch: the global step's sequences.
        micro_batch_size: sequences a forward pass; changes memory, not the loss.
    """
    device = next(model.parameters()).device
    targets = causal_normalizer(batch)
    assert targets, "a global step without targets"
    total = torch.zeros((), dtype=torch.float64)
    for micro in batch.split(micro_batch_size):
        with autocast(device, precision):
            loss_sum = numerator(model, micro.to(device))
        (loss_sum / targets).backward()
        total += loss_sum.detach().double().cpu()
    return StepResult(loss=float(total) / targets, targets=targets)


@torch.no_grad()
def validation_loss(model: Decoder, batches: list[Batch], *, precision: str) -> float:
    """Mean nats per target over `batches`: the same numerator and normaliser as training."""
    device = next(model.parameters()).device
    total, targets = 0.0, 0
    for batch in batches:
        with autocast(device, precision):
            total += float(causal_numerator(model, batch.to(device)))
        targets += causal_normalizer(batch)
    return total / targets
