"""Muon: momentum whose matrices are orthogonalised (Jordan et al. 2024); AdamW for all that is no matrix.

N matrices of one shape, R rows, C columns, R <= C.
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from lavra.optim.cost import GRAM_RATIO, NEWTON_SCHULZ_STEPS
from lavra.optim.slots import zeros_at_first

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # (a, b, c) of Jordan 2024: steepest at 0, ends near [0.7, 1.2]
_SMALLEST_NORM = 1e-7
# Elements of one stack: on a CPU what its caches hold, elsewhere a bound on the memory that a step takes.
_STACK_ON_CPU, _STACK_ELSEWHERE = 1 << 18, 1 << 26


class Muon(torch.optim.Optimizer):
    """Groups with algorithm "muon" are orthogonalised, those with "adamw" take AdamW's step.

    Muon, as `torch.optim.Muon` defines it with `adjust_lr_fn="match_rms_adamw"`:

        B = momentum B + (1 - momentum) g
        U = momentum B + (1 - momentum) g                      (Nesterov)
        p = (1 - lr weight_decay) p - lr 0.2 sqrt(max(R, C)) orthogonalize(U)

    The factor gives the update the root mean square of AdamW's, about 0.2, so that AdamW's learning rate
    and decay carry over (Liu et al. 2025, "Muon is Scalable", 2.2). A weight that stacks several matrices
    (`splits`, see `muon_groups`) has each orthogonalised and scaled by itself: queries and keys do not
    share a spectrum. Orthogonalisation is in fp32 on a CPU and in bf16 elsewhere.

    State: `momentum_buffer` in the shape of the parameter; for AdamW `step`, `exp_avg`, `exp_avg_sq`.

    Raises:
        RuntimeError: at the first step, where torch has no fused AdamW for the parameters' device.
    """

    def __init__(
        self,
        groups: list[dict],
        *,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        defaults = {"lr": 1e-3, "weight_decay": 0.0, "momentum": momentum, "betas": betas, "eps": eps}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # the loop has no closures
        """One step for each parameter that has a gradient."""
        for group in self.param_groups:
            if group["algorithm"] == "muon":
                self._orthogonalized_step(group)
            else:
                self._adamw_step(group)

    def _orthogonalized_step(self, group: dict) -> None:
        stacks: dict[torch.Size, list[tuple[Tensor, Tensor, Tensor]]] = defaultdict(list)
        for parameter, splits in zip(group["params"], group["splits"], strict=True):
            if parameter.grad is None:
                continue
            (buffer,) = zeros_at_first(self, [parameter], "momentum_buffer")
            buffer.lerp_(parameter.grad, 1 - group["momentum"])
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            for p, g, b in zip(*(t.split(splits) for t in (parameter, parameter.grad, buffer)), strict=True):
                # A tall matrix lies down: the orthogonal factor of the transpose is the transpose.
                wide = (p.mT, g.mT, b.mT) if p.shape[0] > p.shape[1] else (p, g, b)
                stacks[wide[0].shape].append(wide)
        for shape, matrices in stacks.items():
            on_cpu = matrices[0][0].is_cpu
            count = max(1, (_STACK_ON_CPU if on_cpu else _STACK_ELSEWHERE) // shape.numel())
            for start in range(0, len(matrices), count):
                parameters, gradients, buffers = zip(*matrices[start : start + count], strict=True)
                updates = torch.stack(torch._foreach_lerp(gradients, buffers, group["momentum"]))
                updates = orthogonalize(updates if on_cpu else updates.bfloat16())
                scale = 0.2 * math.sqrt(shape[1])
                torch._foreach_add_(parameters, updates.unbind(), alpha=-group["lr"] * scale)

    def _adamw_step(self, group: dict) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        for p in parameters:
            if not self.state[p]:
                self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        adamw(
            parameters,
            [p.grad for p in parameters],
            zeros_at_first(self, parameters, "exp_avg"),
            zeros_at_first(self, parameters, "exp_avg_sq"),
            [],
            [self.state[p]["step"] for p in parameters],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def orthogonalize(x: Tensor) -> Tensor:
    """Stack `[N, R, C]` -> `[N, R, C]`: singular vectors kept, singular values moved near 1.

    Five steps of `X <- a X + (b A + c A^2) X` with `A = X X^T`, from X of Frobenius norm 1 (Jordan 2024).
    Every step multiplies X by a polynomial of its Gram matrix, and polynomials of one matrix commute; so
    where C is much larger than R the steps run on `[R, R]` alone and their product meets X once, at the
    end. In bf16 the Gram matrix would lose the small singular values, whose squares it holds.
    """
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_(min=_SMALLEST_NORM)
    if x.dtype == torch.float32 and x.shape[2] >= GRAM_RATIO * x.shape[1]:
        return torch.bmm(_product_of_steps(torch.bmm(x, x.mT)), x)
    a, b, c = NEWTON_SCHULZ
    other, gram = torch.empty_like(x), x.new_empty(*x.shape[:2], x.shape[1])
    polynomial = torch.empty_like(gram)
    for _ in range(NEWTON_SCHULZ_STEPS):
        torch.bmm(x, x.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.baddbmm(x, polynomial, x, beta=a, out=other)
        x, other = other, x
    return x


def _product_of_steps(gram: Tensor) -> Tensor:
    """`[N, R, R]` of X X^T -> the matrix that five steps multiply X by."""
    a, b, c = NEWTON_SCHULZ
    product = None
    for step in range(NEWTON_SCHULZ_STEPS):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        product = factor if product is None else torch.bmm(factor, product)
        if step < NEWTON_SCHULZ_STEPS - 1:
            gram = torch.bmm(torch.bmm(factor, gram), factor)  # of X after this step
    assert product is not None
    return product
