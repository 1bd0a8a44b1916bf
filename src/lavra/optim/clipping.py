"""Gradient clipping; the norm it returns is what the guard judges before the optimizer moves."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lavra.optim.config import ClipKind


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], kind: ClipKind, limit: float) -> Tensor:
    """Clip gradients in place; returns their global L2 norm before, a scalar.

    `norm`: all gradients are scaled by one factor so that the global norm is at most `limit` (Pascanu et
    al. 2013, algorithm 1). `value`: every entry is clamped to [-limit, limit]. `off`: nothing changes.

    When the norm is not finite no gradient changes: scaling would write 0 or NaN over the finite ones
    and hide where the fault is, and no optimizer should step on them anyhow.
    """
    # A list: an iterator would be exhausted by the norm and clip nothing (torchtitan PR#1258).
    gradients = [p.grad for p in parameters if p.grad is not None]
    before = nn.utils.get_total_norm(gradients)
    if kind == "off" or not before.isfinite():
        return before
    if kind == "value":
        torch._foreach_clamp_min_(gradients, -limit)
        torch._foreach_clamp_max_(gradients, limit)
    elif before > limit:
        torch._foreach_mul_(gradients, limit / float(before))
    return before
