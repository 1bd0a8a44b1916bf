"""Causal attention that keeps packed documents apart: one function, two backends.

    attention(q, k, v)                              plain causal
    attention(q, k, v, document_starts)             causal inside each packed document

PyTorch's CPU kernel for `scaled_dot_product_attention` trains slowly, and with a document mask it computes every masked
score too. So on the CPU, when gradients are needed, the op `lavra::block_attention` takes over: it walks the queries in
blocks, multiplies each block only with the keys that some query of it may see, and keeps the probabilities for the
backward pass, which walks the same blocks (the blockwise forward and backward of FlashAttention: Dao, Fu, Ermon, Rudra
and Re, 2022, https://arxiv.org/abs/2205.14135, algorithms 1 and 4; here a block row is whole, so no running maximum).
Everything else (accelerators, evaluation) goes to `scaled_dot_product_attention`.

The op is opaque to `torch.compile`: nothing inside is traced, so a new document layout never recompiles anything.

Shapes: B rows, T positions, H query heads, K key/value heads (K divides H; G = H / K), D head size, C queries in a
block, N keys a block looks at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128  # queries in a block: 64 multiplies less in vain, 256 calls less often; 128 measured fastest on AVX512
LONGEST_KEPT = 1024  # the longest T whose probabilities are kept for the backward pass, not computed again


def attention(q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None = None) -> Tensor:
    """Softmax attention of each query over the earlier keys of its own document, scores scaled by 1/sqrt(D).

    Args:
        q: queries `[B, H, T, D]`, any floating dtype and strides.
        k: keys `[B, K, T, D]`; query head h reads key head `h // (H // K)` (grouped-query attention).
        v: values `[B, K, T, D]`.
        document_starts: `[B, T]` int64, the first key that each query may see; key j is visible to query i when
            `document_starts[b, i] <= j <= i`. Every query must see itself. None: all earlier keys.

    Returns:
        `[B, H, T, D]` in the dtype of the inputs, or of the autocast region where one is active.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
    """
    _check(q, k, v, document_starts)
    device = q.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if device == "cpu" and needs_grad:
        out: Tensor = _block_attention(q, k, v, document_starts)[0]
        return out
    return _sdpa(q, k, v, document_starts)


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


def visible_keys(document_starts: Tensor) -> Tensor:
    """`[B, T]` document starts -> `[B, T, T]` bool, True where query i (rows) may see key j (columns)."""
    index = torch.arange(document_starts.shape[1], device=document_starts.device)
    return (index <= index[:, None]) & (index >= document_starts[:, :, None])


def _check(q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None) -> None:
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


def _sdpa(q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    if document_starts is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups > 1)
    if groups > 1:  # the fused kernels that take a mask do not take grouped heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible_keys(document_starts)[:, None])


# --- the block op ---


@dataclass(frozen=True)
class _Block:
    """Queries `[first, end)` against keys `[lo, end)`. `bias` is -inf where a query may not see a key and else 0; it
    covers the block's last keys, those before them are seen by all: `[B or 1, 1, 1, C, up to N]`."""

    first: int
    end: int
    lo: int
    bias: Tensor


def _blocks(q: Tensor, document_starts: Tensor | None) -> list[_Block]:
    length = q.shape[2]
    if document_starts is not None and bool(
        ((document_starts < 0) | (document_starts > torch.arange(length))).any()
    ):
        raise ValueError("document_starts must lie between 0 and the query's own index")
    above_diagonal = torch.full((BLOCK, BLOCK), -torch.inf, dtype=q.dtype).triu_(1)[None, None, None]
    blocks = []
    for first in range(0, length, BLOCK):
        end = min(first + BLOCK, length)
        lo, bias = 0, above_diagonal[..., : end - first, : end - first]
        if document_starts is not None:
            starts = document_starts[:, first:end]  # [B, C]
            lo = int(starts.min())
            if int(starts.max()) > lo:  # some query sees less than its block does
                keys, queries = torch.arange(lo, end), torch.arange(first, end)
                hidden = (keys > queries[:, None]) | (keys < starts[..., None])
                bias = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -torch.inf)[
                    :, None, None
                ]
        blocks.append(_Block(first, end, lo, bias))
    return blocks


class _Heads:
    """Copies between `[B, heads, T, D]` of any strides and the `[B K, rows, D]` matrices that one bmm call takes."""

    def __init__(self, q: Tensor, k: Tensor) -> None:
        self.batch, self.heads, _, self.head_dim = q.shape
        self.kv_heads, self.groups = k.shape[1], self.heads // k.shape[1]
        self.scale = self.head_dim**-0.5

    def rows(self, x: Tensor, block: _Block) -> Tensor:
        """Query-side `[B, H, T, D]` -> this block's `[B K, G C, D]`."""
        return x[:, :, block.first : block.end].reshape(self.batch * self.kv_heads, -1, self.head_dim)

    def put_rows(self, x: Tensor, block: _Block, rows: Tensor) -> None:
        """The inverse of `rows`: write this block's part of x."""
        x[:, :, block.first : block.end] = rows.view(self.batch, self.heads, -1, self.head_dim)

    def keys(self, x: Tensor) -> Tensor:
        """`[B, K, T, D]` -> `[B K, T, D]`."""
        return x.reshape(self.batch * self.kv_heads, -1, self.head_dim)

    def keys_transposed(self, x: Tensor) -> Tensor:
        """`[B, K, T, D]` -> `[B K, D, T]`, contiguous: half again as fast to multiply by as a transposed view."""
        return x.transpose(2, 3).reshape(self.batch * self.kv_heads, self.head_dim, -1).contiguous()

    def scaled_bmm(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.baddbmm(a.new_zeros(()), a, b, beta=0, alpha=self.scale)

    def probabilities(self, q_rows: Tensor, kt: Tensor, block: _Block, out: Tensor | None = None) -> Tensor:
        """`[B K, G C, D]` queries, `[B K, D, T]` keys -> `[B K, G C, N]`, rows that sum to one."""
        scores = self.scaled_bmm(q_rows, kt[:, :, block.lo : block.end])
        grid = scores.view(self.batch, self.kv_heads, self.groups, block.end - block.first, -1)
        grid[..., -block.bias.shape[-1] :] += block.bias
        return torch.softmax(scores, -1, out=out)


def _kept_numel(q: Tensor) -> int:
    """Room for the probabilities of all blocks, or 0 where the backward pass computes them again."""
    batch, heads, length, _ = q.shape
    if length > LONGEST_KEPT:
        return 0
    full, rest = length // BLOCK, length % BLOCK
    return batch * heads * (BLOCK * BLOCK * full * (full + 1) // 2 + rest * length)


def _like_tokens(x: Tensor) -> Tensor:
    """Uninitialised `[B, H, T, D]` whose memory order is `[B, T, H, D]`: merging heads afterwards copies nothing."""
    return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def _slots(heads: _Heads, kept: Tensor, blocks: list[_Block]) -> list[Tensor | None]:
    """Where each block's probabilities live in the flat buffer; None where they are not kept."""
    slots: list[Tensor | None] = []
    used = 0
    for block in blocks:
        rows, seen = heads.groups * (block.end - block.first), block.end - block.lo
        size = heads.batch * heads.kv_heads * rows * seen
        slots.append(kept[used : used + size].view(-1, rows, seen) if kept.numel() else None)
        used += size
    return slots


@torch.library.custom_op("lavra::block_attention", mutates_args=())
def _block_attention(
    q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output and, one after the other in a flat buffer, the probabilities of each block."""
    heads, out, kept = _Heads(q, k), _like_tokens(q), q.new_empty(_kept_numel(q))
    kt, values = heads.keys_transposed(k), heads.keys(v)
    blocks = _blocks(q, document_starts)
    with torch.autocast("cpu", enabled=False):
        for block, slot in zip(blocks, _slots(heads, kept, blocks), strict=True):
            p = heads.probabilities(heads.rows(q, block), kt, block, out=slot)
            heads.put_rows(out, block, torch.bmm(p, values[:, block.lo : block.end]))
    return out, kept


@torch.library.custom_op("lavra::block_attention_backward", mutates_args=())
def _block_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v; with P = softmax(S): dV = P'g, dS = P * (gV' - rowsum(P * gV')), dQ = dS K, dK = dS'Q."""
    heads, dq = _Heads(q, k), _like_tokens(q)
    kt, keys, vt = heads.keys_transposed(k), heads.keys(k), heads.keys_transposed(v)
    # Many blocks add to one key: low precision would drift.
    sum_dtype = torch.promote_types(q.dtype, torch.float32)
    dk, dv = torch.zeros_like(keys, dtype=sum_dtype), torch.zeros_like(keys, dtype=sum_dtype)
    blocks = _blocks(q, document_starts)
    with torch.autocast("cpu", enabled=False):
        for block, slot in zip(blocks, _slots(heads, kept, blocks), strict=True):
            seen = slice(block.lo, block.end)
            q_rows, g_rows = heads.rows(q, block), heads.rows(grad, block)
            p = heads.probabilities(q_rows, kt, block) if slot is None else slot
            dv[:, seen] += torch.bmm(p.transpose(1, 2), g_rows)
            ds = torch.ops.aten._softmax_backward_data(torch.bmm(g_rows, vt[:, :, seen]), p, -1, p.dtype)
            heads.put_rows(dq, block, heads.scaled_bmm(ds, keys[:, seen]))
            dk[:, seen] += heads.scaled_bmm(ds.transpose(1, 2), q_rows)
    return dq, dk.to(k.dtype).view(k.shape), dv.to(v.dtype).view(v.shape)


@_block_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None) -> tuple[Tensor, Tensor]:
    return _like_tokens(q), q.new_empty(_kept_numel(q))


@_block_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _like_tokens(q), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, document_starts = inputs
    ctx.save_for_backward(q, k, v, document_starts, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None
    q, k, v, document_starts, kept = ctx.saved_tensors
    return *_block_attention_backward(grad, q, k, v, document_starts, kept), None


_block_attention.register_autograd(_backward, setup_context=_save)
