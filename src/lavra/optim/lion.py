"""Lion: the sign of an interpolated momentum (Chen et al. 2023, "Symbolic Discovery", algorithm 2)."""

from __future__ import annotations

import torch

from lavra.optim.slots import zeros_at_first


class Lion(torch.optim.Optimizer):
    """`p -= lr * (sign(b1 m + (1 - b1) g) + weight_decay * p)`, then `m = b2 m + (1 - b2) g`.

    Every entry moves by the whole learning rate, so the paper divides AdamW's rate by 3 to 10 and
    multiplies its decay by as much; its betas are (0.9, 0.99).

    State: `exp_avg` (m) in the shape of the parameter.
    """

    def __init__(self, groups: list[dict], *, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(groups, {"lr": 1e-4, "weight_decay": 0.0, "betas": betas})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # the loop has no closures
        """One step for each parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            gradients = [p.grad for p in parameters]
            averages = zeros_at_first(self, parameters, "exp_avg")
            beta1, beta2 = group["betas"]
            updates = torch._foreach_lerp(averages, gradients, 1 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, updates, alpha=-group["lr"])
            torch._foreach_lerp_(averages, gradients, 1 - beta2)
