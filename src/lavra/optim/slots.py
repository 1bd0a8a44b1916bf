"""State of an optimizer, one tensor a parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def zeros_at_first(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], name: str
) -> list[Tensor]:
    """`optimizer.state[p][name]` of each parameter, in its shape; zeros at its first step."""
    for parameter in parameters:
        if name not in optimizer.state[parameter]:
            optimizer.state[parameter][name] = torch.zeros_like(parameter)
    return [optimizer.state[parameter][name] for parameter in parameters]
