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

    def cut(self, seq_len: int) -> Batch:
        """The same tokens as `T / seq_len` times as many sequences of `seq_len`; a cut document starts anew."""
        if seq_len == self.tokens.shape[1]:
            return self
        parts = [x.reshape(-1, seq_len) for x in self._tensors()[:-1]]
        tokens, targets, positions, loss_mask = parts
        positions = torch.minimum(positions, torch.arange(seq_len, device=positions.device))
        ids = self.sample_ids.repeat_interleave(len(tokens) // max(len(self), 1))
        return Batch(tokens, targets, positions, loss_mask, ids)

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`."""
        return Batch(*(t.to(device, non_blocking=True) for t in self._tensors()))

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.tokens, self.targets, self.positions, self.loss_mask, self.sample_ids
