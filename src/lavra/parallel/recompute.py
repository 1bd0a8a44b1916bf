"""Activation recomputation (Chen et al. 2016, arXiv:1604.06174): compute again in the backward pass what was not kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lavra.model.decoder import Decoder

RecomputePolicy = Literal["none", "full", "selective"] | int

_aten = torch.ops.aten
# Costly to compute again; everything else (norms, rotation, activation function) is cheap.
_KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.lavra.block_attention.default,
}


def apply_recompute(model: Decoder, policy: RecomputePolicy) -> str:
    """Wrap the blocks' forward passes in place; parameter names stay. Returns what was done in words, "" for nothing.

    Args:
        policy: `none`; `full`: every block; n: every n-th block; `selective`: every block, but the results of matrix
            products and attention are kept.
    """
    if policy == "none":
        return ""
    every = policy if isinstance(policy, int) else 1
    context = (
        {"context_fn": partial(create_selective_checkpoint_contexts, _keep)} if policy == "selective" else {}
    )
    recomputed: Callable[..., Any] = partial(checkpoint, use_reentrant=False, **context)  # type: ignore[arg-type]
    chosen = [block for number, block in enumerate(model.blocks) if number % every == 0]
    for block in chosen:
        block.forward = partial(recomputed, block.forward)
    kept = ", matrix products and attention kept" if policy == "selective" else ""
    return f"{len(chosen)} of {len(model.blocks)} blocks{kept}"


def _keep(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
