"""The two attention backends of CUDA devices that know documents: FlashAttention over sequences, FlexAttention.

    varlen(q, k, v, document_starts, window=...)              bf16 and fp16, documents and windows
    flex(q, k, v, document_starts, window=..., soft_cap=...)  any precision, soft caps too

What both derive from the documents is built once for all layers of a pass. Shapes as in `attention.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def varlen(q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor, *, window: int | None) -> Tensor:
    """FlashAttention over the documents as sequences of their own, whatever row they lie in."""
    from torch.nn.attention.varlen import varlen_attn  # imports the compiler

    offsets = sequence_offsets(document_starts)
    q_flat, k_flat, v_flat = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [B T, heads, D]
    longest = q.shape[2]  # a bound will do, and the true length would have to come from the device
    out: Any = varlen_attn(
        q_flat,
        k_flat,
        v_flat,
        offsets,
        offsets,
        longest,
        longest,
        # Keys to the left and to the right of a query, itself not counted.
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    heads: Tensor = out.view(q.shape[0], q.shape[2], q.shape[1], q.shape[3])
    return heads.transpose(1, 2)


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_starts: Tensor,
    *,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """FlexAttention: compiled, a kernel that skips blocks where nothing is visible; on a CPU a slow reference."""
    mask = _shared_by_layers(
        document_starts, ("block mask", window), lambda: _block_mask(document_starts, window)
    )
    out: Tensor = _flex_attention(compiled=q.device.type != "cpu")(
        q,
        k,
        v,
        score_mod=None if soft_cap is None else _capped(soft_cap),
        block_mask=mask,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out


@cache
def _flex_attention(*, compiled: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention  # imports the compiler

    function: Callable[..., Any] = flex_attention
    return torch.compile(function) if compiled else function


def _capped(soft_cap: float) -> Callable[..., Tensor]:
    return lambda score, *_: soft_cap * torch.tanh(score / soft_cap)


def _block_mask(document_starts: Tensor, window: int | None) -> BlockMask:
    from torch.nn.attention.flex_attention import create_block_mask

    batch, length = document_starts.shape
    starts = document_starts.clone()  # the mask outlives changes of the original, and must not keep it alive

    def visible(b: Tensor, _: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (j <= i) & (j >= starts[b, i])
        return seen if window is None else seen & (j > i - window)

    return create_block_mask(visible, batch, None, length, length, device=starts.device)


@torch.library.custom_op("lavra::sequence_offsets", mutates_args=())
def sequence_offsets(document_starts: Tensor) -> Tensor:
    """`[B, T]` document starts -> `[N + 1]` int32: where each document begins in the flattened batch, and B T.

    Their number has to come from the device. An op, so that `torch.compile` leaves it alone.
    """
    offsets: Tensor = _shared_by_layers(document_starts, "offsets", lambda: _offsets(document_starts))
    return offsets.clone()  # an op's output is its caller's


@sequence_offsets.register_fake
def _(document_starts: Tensor) -> Tensor:
    return document_starts.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int32)


def _offsets(document_starts: Tensor) -> Tensor:
    index = torch.arange(document_starts.shape[1], device=document_starts.device)
    first = (document_starts == index).flatten().nonzero().squeeze(1)
    return F.pad(first, (0, 1), value=document_starts.numel()).int()


_built: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _shared_by_layers(document_starts: Tensor, name: object, build: Callable[[], Any]) -> Any:
    """`build()`, once for each name while this very tensor lives unchanged.

    Contents are not compared: every layer would have to wait for the device.
    """
    if torch.compiler.is_compiling() or document_starts.is_inference():  # there tensors have no version
        return build()
    results = _built.setdefault(document_starts, {})
    key = name, document_starts._version
    if key not in results:
        results[key] = build()
    return results[key]
