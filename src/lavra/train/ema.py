"""Exponential moving average of the weights (Polyak & Juditsky 1992; decay as in Morales-Brotons et al. 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Ema:
    """average = decay x average + (1 - decay) x weights after every step; starts at the initial weights.

    The decay of step t is at most (1 + t) / (10 + t), so that the random start fades quickly.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.names = [name for name, _ in model.named_parameters()]
        self._weights = list(model.parameters())
        self.average = [p.detach().clone() for p in self._weights]

    @torch.no_grad()
    def restart(self) -> None:
        """Be the weights as they are now."""
        torch._foreach_copy_(self.average, [p.detach() for p in self._weights])

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after optimizer step `step` = 0, 1, ..."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.average, [p.detach() for p in self._weights], 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model holds the average inside, and its own weights again afterwards."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for weight, average in zip(self._weights, self.average, strict=True):
            held = weight.detach().clone()
            weight.copy_(average)
            average.copy_(held)

    def tensors(self) -> dict[str, Tensor]:
        """The average by parameter name."""
        return dict(zip(self.names, self.average, strict=True))
