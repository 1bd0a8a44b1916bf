"""Stochastic gradient descent, plain, with momentum or Nesterov's, and decoupled weight decay."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from lavra.optim.slots import zeros_at_first


class DecoupledSGD(torch.optim.Optimizer):
    """`p -= lr * weight_decay * p`, then torch's own fused SGD without its decay.

    torch's `weight_decay` adds to the gradient, so it would enter the momentum buffer; here the decay is
    that of Loshchilov & Hutter 2019, algorithm 1 (SGDW), and means the same as with the other optimizers.
    Momentum is torch's: `buffer = momentum * buffer + g`, no dampening (Sutskever et al. 2013 with the
    learning rate outside).

    State: `momentum_buffer` in the shape of the parameter; nothing without momentum.

    Raises:
        RuntimeError: at the first step, where torch has no fused SGD for the parameters' device.
    """

    def __init__(self, groups: list[dict], *, momentum: float = 0.0, nesterov: bool = False) -> None:
        super().__init__(
            groups, {"lr": 1e-3, "weight_decay": 0.0, "momentum": momentum, "nesterov": nesterov}
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # the loop has no closures
        """One step for each parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            buffers: list[Tensor | None] = []
            if group["momentum"]:
                buffers += zeros_at_first(self, parameters, "momentum_buffer")
            if group["weight_decay"]:
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            sgd(
                parameters,
                [p.grad for p in parameters],
                buffers,
                fused=True,
                lr=group["lr"],
                momentum=group["momentum"],
                nesterov=group["nesterov"],
                weight_decay=0.0,
                dampening=0.0,
                maximize=False,
            )
