"""AdamW (Loshchilov & Hutter 2019) over named parameter groups; norm clipping."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups, each with `name`, `params`, `param_names`, `weight_decay`.

    Matrices of linear layers decay; embeddings, norms and biases never do.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    groups: dict[str, list[tuple[str, nn.Parameter]]] = {"decay": [], "no_decay": []}
    for name, parameter in model.named_parameters():
        decays = parameter.ndim >= 2 and id(parameter) not in embeddings
        groups["decay" if decays else "no_decay"].append((name, parameter))
    return [
        {
            "name": key,
            "params": [p for _, p in members],
            "param_names": [n for n, _ in members],
            "weight_decay": weight_decay if key == "decay" else 0.0,
        }
        for key, members in groups.items()
        if members
    ]


def describe_groups(groups: list[dict]) -> str:
    """One line a group: name, tensors, parameters, weight decay."""
    return "\n".join(
        f"  {g['name']}: {len(g['params'])} tensors, {sum(p.numel() for p in g['params']):,} parameters, "
        f"weight_decay {g['weight_decay']}"
        for g in groups
    )


def build_adamw(groups: list[dict], *, learning_rate: float, betas: tuple[float, float]) -> torch.optim.AdamW:
    """Fused AdamW (one pass over memory, on CPU and CUDA)."""
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=1e-8, fused=True)


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients so that their global L2 norm is at most `max_norm`; returns the norm before."""
    # A list: an iterator would be exhausted by the norm and clip nothing.
    return nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], max_norm)
