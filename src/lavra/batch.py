"""`Batch`: what an objective hands to a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Tensors of one micro-batch. B sequences of T tokens.

    Attributes:
        tokens: `[B, T]` int64, model input.
        targets: `[B, T]` int64, what each position predicts.
        positions: `[B, T]` int64; 0 marks the first token of a document (the one signal for RoPE,
            attention masks and packing); a window that starts inside a document starts at 0 too.
        loss_mask: `[B, T]` bool; False where the target is padding.
        sample_ids: `[B]` int64, global sample indices; they trace back to documents.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    loss_mask: Tensor
    sample_ids: Tensor

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def split(self, size: int) -> list[Batch]:
        """Micro-batches of at most `size` sequences, in order."""
        return [Batch(*(t[i : i + size] for t in self._tensors())) for i in range(0, len(self), size)]

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`."""
        return Batch(*(t.to(device, non_blocking=True) for t in self._tensors()))

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.tokens, self.targets, self.positions, self.loss_mask, self.sample_ids
