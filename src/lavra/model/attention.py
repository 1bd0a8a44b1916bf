"""Causal attention inside packed documents: one function, four backends, the same numbers.

    attention(q, k, v)                                           plain causal
    attention(q, k, v, document_starts)                          causal inside each packed document
    attention(q, k, v, document_starts, window=4096)             ... and no farther back than that
    attention(q, k, v, document_starts, soft_cap=50.0)           ... with bounded scores
    cached_attention(q, k, v, window=..., soft_cap=...)          the newest queries over a key/value cache

| backend | computes | chosen |
|---|---|---|
| `block` | `lavra::block_attention`, blocks of queries over the keys they may see | CPU: training; evaluation with documents, windows, soft caps |
| `sdpa` | `scaled_dot_product_attention`, with a boolean mask where plain causal does not do | CPU: plain causal evaluation; CUDA: plain causal; every other device |
| `varlen` | FlashAttention over the documents one after the other | CUDA, bf16 and fp16: documents, windows |
| `flex` | FlexAttention, a kernel compiled for a block mask | CUDA, what is left: fp32 with documents or a window, soft caps |

What was run: `block` and `sdpa` on a CPU in full; `flex` forward, uncompiled, on a CPU; `varlen` with PyTorch's own
operator and autograd formula over kernels written out for the CPU in the tests. The CUDA kernels behind `sdpa`, `flex`
and `varlen` have not been run by this project yet.

Shapes: B rows, T positions, H query heads, K key/value heads (K divides H; G = H / K), D head size, N documents.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lavra.model.accelerator_attention import flex, varlen
from lavra.model.block_attention import block_attention

Backend = Literal["block", "sdpa", "flex", "varlen"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_starts: Tensor | None = None,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Softmax attention of each query over the earlier keys of its own document, scores scaled by 1/sqrt(D).

    Args:
        q: queries `[B, H, T, D]`, any floating dtype and strides.
        k: keys `[B, K, T, D]`; query head h reads key head `h // (H // K)` (grouped-query attention).
        v: values `[B, K, T, D]`.
        document_starts: `[B, T]` int64, the index of the first token of each token's document; key j is visible to
            query i when `document_starts[b, i] <= j <= i`. None: one document a row.
        window: keys that a query sees at most, itself included: `i - window < j`. None: all of its document.
        soft_cap: scaled scores s become `soft_cap * tanh(s / soft_cap)` (Gemma 2, https://arxiv.org/abs/2408.00118).

    Returns:
        `[B, H, T, D]` in the dtype of the inputs, or of the autocast region where one is active.

    Raises:
        ValueError: shapes, dtypes, devices or values do not fit together.
    """
    _check(q, k, v, document_starts, window, soft_cap)
    device, length = q.device.type, q.shape[2]
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if window is not None and window >= length:
        window = None
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    backend = choose_backend(
        device,
        q.dtype,
        q.shape[3],
        needs_grad=needs_grad,
        documents=document_starts is not None,
        window=window,
        soft_cap=soft_cap,
        flash=device == "cuda" and torch.cuda.get_device_capability(q.device) >= (8, 0),
    )
    if document_starts is None and (window is not None or soft_cap is not None):
        document_starts = torch.zeros(q.shape[0], length, dtype=torch.int64, device=q.device)
    if backend == "block":
        return block_attention(q, k, v, document_starts, window=window, soft_cap=soft_cap, keep=needs_grad)
    if document_starts is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    if backend == "varlen":
        return varlen(q, k, v, document_starts, window=window)
    if backend == "flex":
        return flex(q, k, v, document_starts, window=window, soft_cap=soft_cap)
    return masked_sdpa(q, k, v, document_starts, window=window)


def choose_backend(
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    *,
    needs_grad: bool,
    documents: bool,
    window: int | None,
    soft_cap: float | None,
    flash: bool,
) -> Backend:
    """The backend that serves a call best.

    Args:
        device: type of the device, `cpu`, `cuda`, ...
        flash: the device has FlashAttention's kernels (CUDA from compute capability 8.0 on).
    """
    masked = documents or window is not None
    if device == "cpu":  # forward alone, the library's kernel is faster where it needs no mask
        return "block" if needs_grad or masked or soft_cap is not None else "sdpa"
    if soft_cap is not None:
        return "flex"
    if device != "cuda" or not masked:
        return "sdpa"
    half = dtype in (torch.bfloat16, torch.float16)
    return "varlen" if flash and half and head_dim % 8 == 0 and head_dim <= 256 else "flex"


def masked_sdpa(q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor, *, window: int | None) -> Tensor:
    """`scaled_dot_product_attention` with a boolean mask: every score is computed, hidden ones too."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:  # the fused kernels that take a mask do not take grouped heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    visible = visible_keys(document_starts, window)[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


def cached_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, soft_cap: float | None = None
) -> Tensor:
    """`attention` of the newest positions of one document, over the cached keys and values of all.

    Args:
        q: queries `[B, H, new, D]` of the last `new` positions.
        k, v: `[B, K, T, D]`, T at least `new`; the last `new` are those of the queries.

    Returns:
        `[B, H, new, D]`.
    """
    new, groups = q.shape[2], q.shape[1] // k.shape[1]
    if window is not None:  # older keys are seen by none of these queries
        k, v = k[:, :, -(new + window - 1) :], v[:, :, -(new + window - 1) :]
    index = torch.arange(k.shape[2], device=q.device)
    queries = index[-new:, None]
    visible = index <= queries  # [new, T]
    if window is not None:
        visible &= index > queries - window
    if soft_cap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=groups > 1)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = soft_cap * torch.tanh(q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 / soft_cap))
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v


def document_starts_from_positions(positions: Tensor) -> Tensor:
    """First index of each token's document, from positions that restart at 0 at each document's first token.

    Args:
        positions: `[B, T]` integers; the first column is 0 (a window that cuts a document starts it anew).

    Returns:
        `[B, T]` int64, `starts[b, i] = i - positions[b, i]`.

    Raises:
        ValueError: not a `[B, T]` integer tensor.
    """
    if positions.dim() != 2 or positions.is_floating_point():
        raise ValueError(f"positions must be [B, T] integers, got {list(positions.shape)} {positions.dtype}")
    return torch.arange(positions.shape[1], device=positions.device) - positions.long()


def visible_keys(document_starts: Tensor, window: int | None = None) -> Tensor:
    """`[B, T]` document starts -> `[B, T, T]` bool, True where query i (rows) may see key j (columns)."""
    index = torch.arange(document_starts.shape[1], device=document_starts.device)
    visible = (index <= index[:, None]) & (index >= document_starts[:, :, None])
    return visible if window is None else visible & (index > index[:, None] - window)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_starts: Tensor | None,
    window: int | None,
    soft_cap: float | None,
) -> None:
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise ValueError(
            "attention takes q [B, H, T, D] and k, v [B, K, T, D], "
            f"got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    batch, heads, length, head_dim = q.shape
    if (batch, length, head_dim) != (k.shape[0], k.shape[2], k.shape[3]) or heads % k.shape[1]:
        raise ValueError(
            f"k and v {list(k.shape)} do not fit q {list(q.shape)}: B, T, D must be equal and K divide H"
        )
    if document_starts is not None and (
        document_starts.shape != (batch, length)
        or document_starts.dtype != torch.int64
        or document_starts.device != q.device
    ):
        raise ValueError(
            f"document_starts must be [{batch}, {length}] int64 on {q.device}, "
            f"got {list(document_starts.shape)} {document_starts.dtype} on {document_starts.device}"
        )
    if (window is not None and window < 1) or (soft_cap is not None and not soft_cap > 0):
        raise ValueError(f"window {window} must be 1 or more, soft_cap {soft_cap} above 0, or None")
