"""Cross entropy of an output head without its logits ever being whole in memory.

    linear_cross_entropy(hidden, weight, targets)   sum over rows of -ln softmax(hidden @ weight.T)[target]

The rows go through in chunks: logits of a chunk, its loss, and at once its share of both gradients (softmax minus
one-hot), which is all that the backward pass needs. A chunk of logits stays in cache; N x V of them never exist.

The op is opaque to `torch.compile`. Shapes: N rows, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORED = -100  # a target that does not count
_CPU_CHUNK = 1 << 21  # logits at a time: 8 MB stay in a CPU's cache
_ACCELERATOR_CHUNK = 1 << 27  # wide enough to fill a GPU


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Summed cross entropy in nats, scalar in fp32 (fp64 of fp64); products in the autocast dtype where one is active.

    Args:
        hidden: `[N, D]`.
        weight: output head `[V, D]`.
        targets: `[N]` int64 in `[0, V)`, or `IGNORED`.
    """
    device = hidden.device.type
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    loss: Tensor = _linear_cross_entropy(hidden.to(dtype), weight, targets, needs_grad)[0]
    return loss


@torch.library.custom_op("lavra::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, needs_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, and the gradients of hidden and weight for an incoming gradient of one (empty without `needs_grad`).

    Products are in the dtype of `hidden`.
    """
    loss, d_hidden, d_weight = _results(hidden, weight, needs_grad)
    weight = weight.to(hidden.dtype)
    chunk_logits = _CPU_CHUNK if hidden.device.type == "cpu" else _ACCELERATOR_CHUNK
    rows = max(64, chunk_logits // weight.shape[0])
    with torch.autocast(hidden.device.type, enabled=False):
        for first in range(0, hidden.shape[0], rows):
            chunk, target = hidden[first : first + rows], targets[first : first + rows, None]
            counts = target != IGNORED
            target = target.clamp(min=0)
            logits = torch.mm(chunk, weight.t()).to(loss.dtype)
            right = logits.gather(1, target)
            largest = logits.amax(1, keepdim=True)
            exponentials = logits.sub_(largest).exp_()
            total = exponentials.sum(1, keepdim=True)
            loss += ((total.log() + largest - right) * counts).sum()
            if needs_grad:
                d_logits = exponentials.mul_(counts / total)
                d_logits.scatter_add_(1, target, -counts.to(loss.dtype))
                d_logits = d_logits.to(hidden.dtype)
                torch.mm(d_logits, weight, out=d_hidden[first : first + rows])
                if d_weight.dtype == hidden.dtype:
                    d_weight.addmm_(d_logits.t(), chunk)
                else:
                    d_weight += torch.mm(d_logits.t(), chunk)
    return loss, d_hidden, d_weight


def _results(hidden: Tensor, weight: Tensor, needs_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Where loss and gradients are gathered; what many chunks add to is at least fp32."""
    loss = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    if not needs_grad:
        return loss, hidden.new_empty(0), weight.new_empty(0)
    sum_dtype = torch.promote_types(weight.dtype, torch.float32)
    return loss, torch.empty_like(hidden), weight.new_zeros(weight.shape, dtype=sum_dtype)


@_linear_cross_entropy.register_fake
def _(hidden: Tensor, weight: Tensor, targets: Tensor, needs_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _results(hidden, weight, needs_grad)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, d_hidden, d_weight = output
    ctx.save_for_backward(d_hidden, d_weight)
    ctx.weight_dtype = inputs[1].dtype
    ctx.mark_non_differentiable(d_hidden, d_weight)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None
    d_hidden, d_weight = ctx.saved_tensors
    return d_hidden * grad.to(d_hidden.dtype), (d_weight * grad).to(ctx.weight_dtype), None, None


_linear_cross_entropy.register_autograd(_backward, setup_context=_save)
