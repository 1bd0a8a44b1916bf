"""From logits to the next token: temperature, top-k, top-p, seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lavra.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens. `temperature` 0 takes the most likely one."""

    temperature: float = 0.8
    top_k: int = 0  # 0: off
    top_p: float = 0.95  # 1: off (Holtzman et al. 2020)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise UsageError(
                f"temperature {self.temperature}, top_k {self.top_k}, top_p {self.top_p} are not all in range",
                hint="temperature >= 0, top_k >= 0, 0 < top_p <= 1",
            )


def next_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one token id from `logits` `[V]`."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = logits.float().cpu() / sampling.temperature
    if 0 < sampling.top_k < logits.numel():
        kept = logits.topk(sampling.top_k)  # exactly k, also among equal logits
        logits = torch.full_like(logits, -torch.inf).index_copy(0, kept.indices, kept.values)
    probabilities = logits.softmax(-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(descending=True, stable=True)
        # Keep the smallest set whose mass reaches top_p: drop a token when the mass before it already does.
        dropped = ordered.cumsum(-1) - ordered >= sampling.top_p
        probabilities = probabilities.index_fill(0, order[dropped], 0.0)
    return int(torch.multinomial(probabilities, 1, generator=generator))
