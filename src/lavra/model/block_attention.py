"""Attention on the CPU in blocks of queries that meet only the keys they may see: one differentiable op.

PyTorch's CPU kernel trains slowly, and with a document mask it computes every masked score too. Here the queries of a
row are cut into blocks of at most `BLOCK`, each a stretch of one document or several short documents whole, so that a
block meets no key of another document (but for the short ones it holds) and none outside its window. The forward pass
may keep the probabilities for the backward pass, which walks the same blocks (the blockwise passes of FlashAttention:
Dao, Fu, Ermon, Rudra and Re, 2022, https://arxiv.org/abs/2205.14135, algorithms 1 and 4; here a block's row of scores
is whole, so no running maximum).

The blocks of the newest document layouts are remembered by their content, so that all layers share them, forward and
backward. The op is opaque to `torch.compile`: nothing inside is traced, so a new layout never recompiles anything.

Shapes: B rows, T positions, H query heads, K key/value heads (K divides H; G = H / K), D head size. A block has R rows
of equal documents, C queries and N keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

BLOCK = 128  # queries in a block: 64 multiplies less in vain, 256 calls less often; 128 measured fastest on AVX512
LONGEST_KEPT = 1024  # the longest T whose probabilities are kept for the backward pass, not computed again


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_starts: Tensor | None,
    *,
    window: int | None,
    soft_cap: float | None,
    keep: bool,
) -> Tensor:
    """`attention` by this op, its arguments checked; probabilities worth keeping are kept if `keep`."""
    # The derivative of a cap needs the scores: where they are computed again, kept probabilities save little.
    keep = keep and soft_cap is None and q.shape[2] <= LONGEST_KEPT
    out: Tensor = _block_attention(q, k, v, document_starts, window, soft_cap, keep)[0]
    return out


# --- which queries meet which keys ---


@dataclass(frozen=True)
class _Block:
    """Queries `[first, end)` of some rows against keys `[lo, end)`.

    Attributes:
        biases: `(columns, [C, number of columns])`, to be added to those columns of the `[C, N]` scores: -inf where a
            query may not see a key, else 0.
    """

    rows: slice
    first: int
    end: int
    lo: int
    biases: tuple[tuple[slice, Tensor], ...]


def _spans(starts: list[int]) -> Iterator[tuple[int, int, int]]:
    """Document starts of one row -> `(first, end, lo)` of its blocks, before any window."""
    openings = [i for i, start in enumerate(starts) if start == i]
    waiting = 0  # from here on, whole short documents wait for more to share their block
    for opening, closing in pairwise([*openings, len(starts)]):
        if closing - waiting <= BLOCK:
            continue
        if waiting < opening:
            yield waiting, opening, waiting
        waiting = opening
        if closing - opening > BLOCK:
            for first in range(opening, closing, BLOCK):
                yield first, min(first + BLOCK, closing), opening
            waiting = closing
    if waiting < len(starts):
        yield waiting, len(starts), waiting


@lru_cache(maxsize=4)
def _blocks(
    content: bytes | None, batch: int, length: int, window: int | None, dtype: torch.dtype
) -> tuple[_Block, ...]:
    """The blocks of `[B, T]` int64 document starts, given as their bytes; None: one document a row."""
    starts = np.frombuffer(content or bytes(8 * batch * length), np.int64).reshape(batch, length)
    own = np.arange(length)
    if not ((starts == own) | ((starts == np.roll(starts, 1, axis=1)) & (own > 0))).all():
        raise ValueError("document_starts must be each query's own index or that of the query before it")
    later = torch.full((BLOCK, BLOCK), -torch.inf, dtype=dtype).triu_(1)
    gone = torch.full((BLOCK, BLOCK), -torch.inf, dtype=dtype).tril_(-1)
    blocks, row = [], 0
    for _, group in groupby(starts, key=lambda line: line.tobytes()):
        same = list(group)
        rows, line, row = slice(row, row + len(same)), same[0], row + len(same)
        for first, end, opening in _spans(line.tolist()):
            size, lo = end - first, opening
            last = later[:size, :size]  # of the last columns, the block's own queries as keys
            if line[end - 1] > opening:  # it holds several documents
                others = np.arange(first, end) < line[first:end, None]
                last = last.masked_fill(torch.from_numpy(others), -torch.inf)
            biases = [(slice(-size, None), last)]
            if window is not None:
                oldest = first - window + 1  # that the first query sees
                lo = max(opening, oldest)
                if (left := end - window - lo) > 0:  # columns that leave the window of later queries
                    biases.append((slice(left), gone[:size, lo - oldest : size - 1]))
            blocks.append(_Block(rows, first, end, lo, tuple(biases)))
    return tuple(blocks)


def _layout(q: Tensor, document_starts: Tensor | None, window: int | None) -> tuple[_Block, ...]:
    content = None if document_starts is None else document_starts.numpy().tobytes()
    return _blocks(content, q.shape[0], q.shape[2], window, q.dtype)


# --- one block's arithmetic ---


class _Heads:
    """Copies between `[B, heads, T, D]` of any strides and the `[R K, rows, D]` matrices that one bmm call takes."""

    def __init__(self, q: Tensor, k: Tensor, soft_cap: float | None) -> None:
        _, self.heads, _, self.head_dim = q.shape
        self.kv_heads, self.groups = k.shape[1], self.heads // k.shape[1]
        self.scale, self.soft_cap = self.head_dim**-0.5, soft_cap

    def queries(self, x: Tensor, block: _Block) -> Tensor:
        """Query-side `[B, H, T, D]` -> this block's `[R K, G C, D]`."""
        part = x[block.rows, :, block.first : block.end]
        return part.reshape(part.shape[0] * self.kv_heads, -1, self.head_dim)

    def put_queries(self, x: Tensor, block: _Block, part: Tensor) -> None:
        """The inverse of `queries`: write this block's part of x."""
        size = block.end - block.first
        x[block.rows, :, block.first : block.end] = part.view(-1, self.heads, size, self.head_dim)

    def keys(self, x: Tensor) -> Tensor:
        """`[B, K, T, D]` -> `[B K, T, D]`."""
        return x.reshape(-1, x.shape[2], self.head_dim)

    def keys_transposed(self, x: Tensor) -> Tensor:
        """`[B, K, T, D]` -> `[B K, D, T]`, contiguous: half again as fast to multiply by as a transposed view."""
        return x.transpose(2, 3).reshape(-1, self.head_dim, x.shape[2]).contiguous()

    def seen(self, x: Tensor, block: _Block, axis: int = 1) -> Tensor:
        """This block's keys: `[B K, T, D]` -> `[R K, N, D]`, or with axis 2 `[B K, D, T]` -> `[R K, D, N]`."""
        rows = x[block.rows.start * self.kv_heads : block.rows.stop * self.kv_heads]
        return rows.narrow(axis, block.lo, block.end - block.lo)

    def scaled_bmm(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.baddbmm(a.new_zeros(()), a, b, beta=0, alpha=self.scale)

    def scores(self, q_rows: Tensor, kt_seen: Tensor) -> Tensor:
        """`[R K, G C, D]` queries, `[R K, D, N]` keys -> scaled and capped `[R K, G C, N]`."""
        scores = self.scaled_bmm(q_rows, kt_seen)
        return scores if self.soft_cap is None else scores.div_(self.soft_cap).tanh_().mul_(self.soft_cap)

    def probabilities(self, scores: Tensor, block: _Block, out: Tensor | None = None) -> Tensor:
        """Scores, which are overwritten -> rows that sum to one, nothing where a key is hidden."""
        grid = scores.view(-1, self.groups, block.end - block.first, scores.shape[-1])
        for columns, bias in block.biases:
            grid[..., columns] += bias
        return torch.softmax(scores, -1, out=out)


def _like_tokens(x: Tensor) -> Tensor:
    """Uninitialised `[B, H, T, D]` whose memory order is `[B, T, H, D]`: merging heads afterwards copies nothing."""
    return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def _kept_numel(q: Tensor, window: int | None) -> int:
    """Room for the probabilities of all blocks of any layout: one document a row needs the most."""
    batch, heads, length, _ = q.shape
    full, rest = length // BLOCK, length % BLOCK
    room = BLOCK * BLOCK * full * (full + 1) // 2 + rest * length
    if window is not None:
        room = min(room, length * (BLOCK - 1 + window))
    return batch * heads * room


def _slots(heads: _Heads, kept: Tensor, blocks: tuple[_Block, ...]) -> Iterator[Tensor | None]:
    """Where each block's probabilities live in the flat buffer; None where they are not kept."""
    used = 0
    for block in blocks:
        if not kept.numel():
            yield None
            continue
        matrices = (block.rows.stop - block.rows.start) * heads.kv_heads
        shape = matrices, heads.groups * (block.end - block.first), block.end - block.lo
        size = shape[0] * shape[1] * shape[2]
        yield kept[used : used + size].view(shape)
        used += size


# --- the op ---


@torch.library.custom_op("lavra::block_attention", mutates_args=())
def _block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_starts: Tensor | None,
    window: int | None,
    soft_cap: float | None,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Output and, one after the other in a flat buffer, the probabilities of each block if they are to be kept."""
    heads, out = _Heads(q, k, soft_cap), _like_tokens(q)
    kept = q.new_empty(_kept_numel(q, window) if keep else 0)
    kt, values = heads.keys_transposed(k), heads.keys(v)
    blocks = _layout(q, document_starts, window)
    with torch.autocast("cpu", enabled=False):
        for block, slot in zip(blocks, _slots(heads, kept, blocks), strict=True):
            scores = heads.scores(heads.queries(q, block), heads.seen(kt, block, 2))
            p = heads.probabilities(scores, block, out=slot)
            heads.put_queries(out, block, torch.bmm(p, heads.seen(values, block)))
    return out, kept


@torch.library.custom_op("lavra::block_attention_backward", mutates_args=())
def _block_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_starts: Tensor | None,
    window: int | None,
    soft_cap: float | None,
    kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v.

    With P = softmax(S): dV = P'g, dS = P * (gV' - rowsum(P * gV')), dQ = dS K, dK = dS'Q; where S = c tanh(X / c),
    dX = dS * (1 - (S / c)^2) goes on in the place of dS.
    """
    heads, dq = _Heads(q, k, soft_cap), _like_tokens(q)
    kt, keys, vt = heads.keys_transposed(k), heads.keys(k), heads.keys_transposed(v)
    # Many blocks add to one key: low precision would drift.
    sum_dtype = torch.promote_types(q.dtype, torch.float32)
    dk, dv = torch.zeros_like(keys, dtype=sum_dtype), torch.zeros_like(keys, dtype=sum_dtype)
    blocks = _layout(q, document_starts, window)
    with torch.autocast("cpu", enabled=False):
        for block, p in zip(blocks, _slots(heads, kept, blocks), strict=True):
            q_rows, g_rows = heads.queries(q, block), heads.queries(grad, block)
            slope = None
            if p is None:
                scores = heads.scores(q_rows, heads.seen(kt, block, 2))
                slope = None if soft_cap is None else 1 - (scores / soft_cap).square_()
                p = heads.probabilities(scores, block)
            heads.seen(dv, block).add_(torch.bmm(p.transpose(1, 2), g_rows))
            dp = torch.bmm(g_rows, heads.seen(vt, block, 2))
            ds = torch.ops.aten._softmax_backward_data(dp, p, -1, p.dtype)
            if slope is not None:
                ds *= slope
            heads.put_queries(dq, block, heads.scaled_bmm(ds, heads.seen(keys, block)))
            heads.seen(dk, block).add_(heads.scaled_bmm(ds.transpose(1, 2), q_rows))
    return dq, dk.to(k.dtype).view(k.shape), dv.to(v.dtype).view(v.shape)


@_block_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_starts: Tensor | None,
    window: int | None,
    soft_cap: float | None,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    return _like_tokens(q), q.new_empty(_kept_numel(q, window) if keep else 0)


@_block_attention_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_starts: Tensor | None,
    window: int | None,
    soft_cap: float | None,
    kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return _like_tokens(q), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, document_starts, ctx.window, ctx.soft_cap, _ = inputs
    ctx.save_for_backward(q, k, v, document_starts, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    q, k, v, document_starts, kept = ctx.saved_tensors
    gradients = _block_attention_backward(grad, q, k, v, document_starts, ctx.window, ctx.soft_cap, kept)
    return *gradients, None, None, None, None


_block_attention.register_autograd(_backward, setup_context=_save)
