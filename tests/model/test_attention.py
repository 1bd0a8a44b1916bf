"""Oracles: the definition in float64, PyTorch's own kernels, brute force over queries and keys.

FlashAttention's kernels exist on CUDA only; `flash_on_cpu` writes them out, sequence by sequence.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lavra.model import accelerator_attention as accelerator
from lavra.model import attention as module
from lavra.model import block_attention as blocks
from lavra.model.attention import (
    attention,
    cached_attention,
    choose_backend,
    document_starts_from_positions,
)


def seen_by(document_starts: Tensor, window: int | None) -> Tensor:
    """`[B, T, T]`: query and key are of one document, the key no later and less than a window earlier."""
    length = document_starts.shape[1]
    age = torch.arange(length)[:, None] - torch.arange(length)
    return (document_starts[:, :, None] == document_starts[:, None]) & (age >= 0) & (age < (window or length))


def definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_starts: Tensor | None = None,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    groups, length = q.shape[1] // k.shape[1], q.shape[2]
    if document_starts is None:
        document_starts = torch.zeros(q.shape[0], length, dtype=torch.int64)
    scores = q @ k.repeat_interleave(groups, 1).transpose(-1, -2) / math.sqrt(q.shape[-1])
    if soft_cap is not None:
        scores = soft_cap * (scores / soft_cap).tanh()
    scores = scores.masked_fill(~seen_by(document_starts, window)[:, None], -torch.inf)
    return scores.softmax(-1) @ v.repeat_interleave(groups, 1)


def random_qkv(
    batch: int,
    heads: int,
    kv_heads: int,
    length: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    memory: str = "tokens first",
) -> list[Tensor]:
    """`memory`: the order of a projection's output, that of the shape, or three parts of one tensor."""
    generator = torch.Generator().manual_seed(seed)
    counts = heads, kv_heads, kv_heads
    whole = torch.randn(batch, length, sum(counts), head_dim, generator=generator).to(dtype)
    parts = list(whole.transpose(1, 2).split(counts, dim=1))
    if memory != "one tensor":
        parts = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts]
    if memory == "heads first":
        parts = [x.contiguous() for x in parts]
    return [x.detach().requires_grad_() for x in parts]


def random_positions(batch: int, length: int, seed: int) -> Tensor:
    """Documents of 1 to ~length tokens in each row; now and then rows share their documents."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.rand(batch, length, generator=generator) < torch.rand(batch, 1, generator=generator) ** 4
    if seed % 3 == 0:
        first[:] = first[:1].clone()
    first[:, 0] = True
    index = torch.arange(length)
    return index - torch.where(first, index, 0).cummax(1).values


def random_starts(batch: int, length: int, seed: int) -> Tensor:
    return document_starts_from_positions(random_positions(batch, length, seed))


def value_and_gradients(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *args, **options):
    out = function(q, k, v, *args, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).cos().to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), (q, k, v))]


def in_float64(qkv: list[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in qkv]


# Lengths around the multiples of a block, and windows around both.
cases = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 3),
        "kv_heads": st.integers(1, 2),
        "groups": st.integers(1, 3),
        "head_dim": st.sampled_from([2, 10, 64]),
        "length": st.one_of(st.integers(1, 40), st.sampled_from([127, 128, 129, 256, 300])),
        "memory": st.sampled_from(["tokens first", "heads first", "one tensor"]),
        "documents": st.booleans(),
        "window": st.sampled_from([None, None, 1, 2, 7, 30, 127, 128, 129, 200]),
        "soft_cap": st.sampled_from([None, None, 0.5, 3.0, 50.0]),
        "recompute": st.booleans(),
        "seed": st.integers(0, 1000),
    }
)


def build(case: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor | None]:
    batch, length, heads = case["batch"], case["length"], case["kv_heads"] * case["groups"]
    qkv = random_qkv(
        batch,
        heads,
        case["kv_heads"],
        length,
        case["head_dim"],
        dtype=dtype,
        seed=case["seed"],
        memory=case["memory"],
    )
    return qkv, random_starts(batch, length, case["seed"]) if case["documents"] else None


def options(case: dict[str, Any]) -> dict[str, Any]:
    return {"window": case["window"], "soft_cap": case["soft_cap"]}


# --- FlashAttention's kernels, written out ---


@pytest.fixture(scope="module")
def flash_on_cpu() -> None:
    """Give PyTorch's variable-length operator, which keeps its own autograd formula, kernels for the CPU."""
    from torch.nn.attention import varlen

    def probabilities(q: Tensor, k: Tensor, offsets: Tensor, left: int) -> Iterator[tuple[slice, Tensor]]:
        """Sequences and their `[H, length, length]`; `left` keys before its own are visible to a query, -1: all."""
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        for first, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            scores = torch.einsum("qhd,khd->hqk", q[first:end], k[first:end]) / math.sqrt(q.shape[2])
            age = torch.arange(end - first)[:, None] - torch.arange(end - first)
            hidden = (age < 0) | (age > (left if left >= 0 else end))
            yield slice(first, end), scores.masked_fill(hidden, -torch.inf).softmax(-1)

    @varlen._varlen_attn.register_kernel("cpu")
    def forward(q, k, v, offsets, _, longest, *rest):
        assert longest >= offsets.diff().max() and offsets.dtype == torch.int32
        window, out = rest[3], torch.empty_like(q)
        for x, p in probabilities(q, k, offsets, window[0]):
            out[x] = torch.einsum("hqk,khd->qhd", p, v[x].repeat_interleave(q.shape[1] // v.shape[1], 1))
        return out, torch.empty(q.shape[1], q.shape[0]), torch.zeros(2, dtype=torch.uint64)

    @varlen._varlen_attn_backward.register_kernel("cpu")
    def backward(grad, q, k, v, out, lse, offsets, *rest):
        groups, window, scale = q.shape[1] // k.shape[1], rest[-1], 1 / math.sqrt(q.shape[2])
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        for x, p in probabilities(q, k, offsets, window[0]):
            keys, values = (y[x].repeat_interleave(groups, 1) for y in (k, v))
            dp = torch.einsum("qhd,khd->hqk", grad[x], values)
            ds = scale * p * (dp - (p * dp).sum(-1, keepdim=True))
            dq[x] = torch.einsum("hqk,khd->qhd", ds, keys)
            dk[x] = torch.einsum("hqk,qhd->khd", ds, q[x]).unflatten(1, (-1, groups)).sum(2)
            dv[x] = torch.einsum("hqk,qhd->khd", p, grad[x]).unflatten(1, (-1, groups)).sum(2)
        return dq, dk, dv


def through(backend: str) -> Any:
    """`attention` takes this backend whatever the device is."""
    return mock.patch.object(module, "choose_backend", lambda *_, **__: backend)


# --- every backend against the definition ---


@settings(max_examples=50, deadline=None)
@given(case=cases)
def test_float32_values_and_gradients_equal_the_definition(case: dict) -> None:
    qkv, starts = build(case)
    with mock.patch.object(blocks, "LONGEST_KEPT", 16 if case["recompute"] else 1024):
        found = value_and_gradients(attention, *qkv, starts, **options(case))
    exact = value_and_gradients(definition, *in_float64(qkv), starts, **options(case))
    for mine, truth in zip(found, exact, strict=True):
        assert (mine - truth).abs().max() <= 1e-5 * max(1, truth.abs().max())


@settings(max_examples=25, deadline=None)
@given(case=cases)
def test_bfloat16_is_as_close_to_the_definition_as_torchs_own_kernel(case: dict) -> None:
    """Where a gradient cancels (rows of two or three keys), its relative error has no bound in any kernel."""
    qkv, starts = build(case, torch.bfloat16)
    found = value_and_gradients(attention, *qkv, starts, **options(case))
    copies = [x.detach().requires_grad_() for x in qkv]
    if case["soft_cap"] is None:
        with through("sdpa"):
            kernel = value_and_gradients(attention, *copies, starts, window=case["window"])
    else:  # it has none for soft caps, but its operators one after the other
        kernel = value_and_gradients(definition, *copies, starts, **options(case))
    exact = value_and_gradients(definition, *in_float64(qkv), starts, **options(case))
    for mine, its, truth in zip(found, kernel, exact, strict=True):
        assert mine.dtype == torch.bfloat16
        allowed = max(0.01 * truth.norm(), 3 * (its - truth).norm(), 2**-8 * truth.numel() ** 0.5)
        assert (mine - truth).norm() <= allowed


@settings(max_examples=40, deadline=None)
@given(case=cases, backend=st.sampled_from(["sdpa", "varlen"]))
def test_gradients_of_the_other_backends_equal_the_definition(
    flash_on_cpu: None, case: dict, backend: str
) -> None:
    qkv, starts = build(case)
    if backend == "varlen" and starts is None and case["window"] is None:
        starts = torch.zeros(
            case["batch"], case["length"], dtype=torch.int64
        )  # plain causal is never sent there
    with through(backend):
        found = value_and_gradients(attention, *qkv, starts, window=case["window"])
    exact = value_and_gradients(definition, *in_float64(qkv), starts, window=case["window"])
    for mine, truth in zip(found, exact, strict=True):
        assert (mine - truth).abs().max() <= 1e-5 * max(1, truth.abs().max())


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("length", "documents", "limits"),
    [
        (1, True, {}),
        (129, True, {"window": 30}),
        (200, True, {"window": 130, "soft_cap": 0.5}),
        (200, False, {"soft_cap": 3.0}),
    ],
)
def test_flex_attention_computes_the_definition(length: int, documents: bool, limits: dict) -> None:
    """Forward only: it has no backward pass on a CPU."""
    qkv = [x.detach() for x in random_qkv(2, 4, 2, length, 10)]
    starts = random_starts(2, length, 5) if documents else None
    with through("flex"):
        found = attention(*qkv, starts, **limits)
    assert (found - definition(*in_float64(qkv), starts, **limits)).abs().max() <= 1e-5


@settings(max_examples=25, deadline=None)
@given(case=cases)
def test_evaluation_agrees_with_training(case: dict) -> None:
    qkv, starts = build(case)
    with torch.no_grad():
        evaluated = attention(*qkv, starts, **options(case))
    assert (evaluated - attention(*qkv, starts, **options(case))).abs().max() <= 1e-5


@settings(max_examples=25, deadline=None)
@given(case=cases, new=st.integers(1, 300))
def test_newest_queries_over_cached_keys_give_the_last_rows_of_the_whole(case: dict, new: int) -> None:
    (q, k, v), _ = build(case)
    whole = definition(*in_float64([q, k, v]), **options(case))[:, :, -new:]
    found = cached_attention(q[:, :, -new:], k, v, **options(case))
    assert (found - whole).abs().max() <= 1e-5 * max(1, whole.abs().max())


# --- what must not be seen ---


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(2, 300),
    cut=st.floats(0, 1),
    window=st.sampled_from([None, 1, 5, 100, 250]),
    soft_cap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 100),
    backend=st.sampled_from(["block", "sdpa", "varlen", "evaluation"]),
)
def test_a_document_never_sees_another(
    flash_on_cpu: None,
    length: int,
    cut: float,
    window: int | None,
    soft_cap: float | None,
    seed: int,
    backend: str,
) -> None:
    border = 1 + int(cut * (length - 2))
    starts = document_starts_from_positions(
        torch.cat([torch.arange(border), torch.arange(length - border)]).expand(2, length)
    )
    qkv = random_qkv(2, 4, 2, length, 16, seed=seed)
    disturbed = [x.detach().clone() for x in qkv]
    for x in disturbed:
        x[:, :, :border] += 3 * torch.randn(x[:, :, :border].shape)
    disturbed = [x.requires_grad_() for x in disturbed]
    training = backend != "evaluation"
    limits = {"window": window, "soft_cap": soft_cap if backend in ("block", "evaluation") else None}
    chosen = through(backend) if training else mock.MagicMock()
    with chosen, torch.set_grad_enabled(training):
        before, after = attention(*qkv, starts, **limits), attention(*disturbed, starts, **limits)
    assert torch.equal(before[:, :, border:], after[:, :, border:])
    if training:
        gradients = torch.autograd.grad(after[:, :, border:].square().sum(), disturbed)
        assert all(not g[:, :, :border].any() for g in gradients)


@settings(max_examples=25, deadline=None)
@given(length=st.integers(2, 300), key=st.floats(0, 1), window=st.integers(1, 300), training=st.booleans())
def test_a_key_is_seen_by_as_many_queries_as_the_window_has_keys(
    length: int, key: float, window: int, training: bool
) -> None:
    changed = int(key * (length - 1))
    q, k, v = random_qkv(1, 2, 1, length, 8)
    other = v.detach().clone()
    other[:, :, changed] += 1
    with torch.set_grad_enabled(training):
        moved = attention(q, k, v, window=window) != attention(q, k, other, window=window)
    seers = moved.any(3).any(1)[0].nonzero().flatten().tolist()
    assert seers == list(range(changed, min(changed + window, length)))


# --- blocks, and what layers share ---


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3),
    length=st.one_of(st.integers(1, 300), st.integers(1, 1200)),
    window=st.one_of(st.none(), st.integers(1, 400)),
    seed=st.integers(0, 1000),
)
def test_blocks_cover_what_is_seen_and_fit_the_room_for_probabilities(
    batch: int, length: int, window: int | None, seed: int
) -> None:
    starts = random_starts(batch, length, seed)
    seen, uses = seen_by(starts, window), torch.zeros(batch, length, dtype=torch.int64)
    pairs = 0
    for block in blocks._blocks(starts.numpy().tobytes(), batch, length, window, torch.float32):
        size, keys = block.end - block.first, block.end - block.lo
        assert 1 <= size <= blocks.BLOCK and 0 <= block.lo <= block.first
        bias = torch.zeros(size, keys)
        for columns, part in block.biases:
            bias[:, columns] += part
        uses[block.rows, block.first : block.end] += 1
        for row in seen[block.rows]:
            assert torch.equal(row[block.first : block.end, block.lo : block.end], bias == 0)
            assert row[block.first : block.end].sum() == (bias == 0).sum()  # nothing seen lies outside
        own = starts[block.rows.start, block.first : block.end]
        assert own[0] == own[-1] or block.lo == block.first == own[0]  # several documents: whole ones
        assert window is None or keys < window + blocks.BLOCK
        pairs += (block.rows.stop - block.rows.start) * size * keys
    assert bool((uses == 1).all())
    assert pairs <= blocks._kept_numel(torch.empty(batch, 1, length, 1), window)


def test_layers_share_the_blocks_of_equal_documents_and_other_documents_get_their_own() -> None:
    blocks._blocks.cache_clear()
    starts = random_starts(2, 200, 1)
    first, second = random_qkv(2, 2, 2, 200, 8), random_qkv(2, 2, 2, 200, 8, seed=1)
    value_and_gradients(attention, *first, starts)
    value_and_gradients(attention, *second, starts.clone())
    assert blocks._blocks.cache_info().misses == 1
    starts.copy_(random_starts(2, 200, 2))  # the loader may fill the same memory again
    found, exact = attention(*first, starts), definition(*first, starts)
    assert (found - exact).abs().max() <= 1e-5


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", ["flex", "varlen"])
@pytest.mark.parametrize("inference", [False, True])
@torch.no_grad()
def test_accelerators_derive_from_a_batchs_documents_once_and_anew_when_they_change(
    flash_on_cpu: None, backend: str, inference: bool
) -> None:
    builder = {"flex": "_block_mask", "varlen": "_offsets"}[backend]
    with (
        torch.inference_mode(inference),
        through(backend),
        mock.patch.object(accelerator, builder, wraps=getattr(accelerator, builder)) as built,
    ):
        qkv, starts = [x.detach() for x in random_qkv(2, 2, 2, 40, 8)], random_starts(2, 40, 1)
        for _ in range(3):
            found = attention(*qkv, starts)
        assert (found - definition(*qkv, starts)).abs().max() <= 1e-5
        assert built.call_count == (3 if inference else 1)  # changes in inference mode leave no trace
        starts.copy_(random_starts(2, 40, 2))
        assert (attention(*qkv, starts) - definition(*qkv, starts)).abs().max() <= 1e-5
        narrow = attention(*qkv, starts, window=3)
        assert (narrow - definition(*qkv, starts, window=3)).abs().max() <= 1e-5
        other = random_starts(2, 40, 4)
        assert (attention(*qkv, other) - definition(*qkv, other)).abs().max() <= 1e-5


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", ["flex", "varlen"])
@torch.no_grad()
def test_what_accelerators_derived_is_gone_with_the_batch(flash_on_cpu: None, backend: str) -> None:
    starts = random_starts(2, 40, 1)
    with through(backend):
        attention(*(x.detach() for x in random_qkv(2, 2, 2, 40, 8)), starts)
    assert starts in accelerator._built
    watched = weakref.ref(starts)
    del starts
    gc.collect()
    assert watched() is None


@settings(max_examples=40, deadline=None)
@given(batch=st.integers(1, 4), length=st.integers(1, 60), seed=st.integers(0, 1000))
def test_sequence_offsets_are_the_documents_ends_in_the_flattened_batch(
    batch: int, length: int, seed: int
) -> None:
    positions = random_positions(batch, length, seed)
    expected = [i for i, position in enumerate(positions.flatten().tolist()) if position == 0]
    found = accelerator.sequence_offsets(document_starts_from_positions(positions))
    assert found.tolist() == [*expected, batch * length]
    assert found.dtype == torch.int32


# --- which backend ---

HALF, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "facts", "expected"),
    [
        ("cpu", FULL, 64, {"needs_grad": True}, "block"),
        ("cpu", FULL, 64, {"needs_grad": True, "documents": True}, "block"),
        ("cpu", FULL, 64, {}, "sdpa"),
        ("cpu", FULL, 64, {"documents": True}, "block"),
        ("cpu", FULL, 64, {"window": 8}, "block"),
        ("cpu", FULL, 64, {"soft_cap": 5.0}, "block"),
        ("cuda", HALF, 64, {"needs_grad": True}, "sdpa"),
        ("cuda", FULL, 64, {}, "sdpa"),
        ("cuda", HALF, 64, {"documents": True}, "varlen"),
        ("cuda", torch.float16, 256, {"window": 8, "needs_grad": True}, "varlen"),
        ("cuda", HALF, 64, {"documents": True, "flash": False}, "flex"),
        ("cuda", HALF, 60, {"documents": True}, "flex"),
        ("cuda", HALF, 264, {"documents": True}, "flex"),
        ("cuda", FULL, 64, {"documents": True}, "flex"),
        ("cuda", HALF, 64, {"documents": True, "soft_cap": 5.0}, "flex"),
        ("cuda", HALF, 64, {"soft_cap": 5.0}, "flex"),
        ("mps", HALF, 64, {"documents": True, "window": 8}, "sdpa"),
        ("meta", FULL, 64, {"needs_grad": True}, "sdpa"),
    ],
)
def test_the_backend_follows_from_device_precision_and_mask(device, dtype, head_dim, facts, expected) -> None:
    plain = {"needs_grad": False, "documents": False, "window": None, "soft_cap": None, "flash": True}
    assert choose_backend(device, dtype, head_dim, **(plain | facts)) == expected


def test_a_window_as_long_as_the_row_is_none() -> None:
    asked = []
    with mock.patch.object(module, "choose_backend", lambda *_, **facts: asked.append(facts) or "block"):
        for window in (19, 20, 21):
            attention(*random_qkv(1, 1, 1, 20, 8), window=window)
    assert [facts["window"] for facts in asked] == [19, None, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_are_bitwise_equal(dtype: torch.dtype) -> None:
    starts = random_starts(3, 300, 7)
    runs = [
        value_and_gradients(attention, *random_qkv(3, 4, 2, 300, 32, dtype=dtype), starts) for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_autocast_decides_the_dtype_and_gradients_return_in_the_inputs_dtype() -> None:
    q, k, v = random_qkv(1, 2, 1, 40, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v.to(torch.bfloat16))
    assert out.dtype == torch.bfloat16
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(out.float().sum(), (q, k)))
    assert (out - definition(q, k, v, None)).abs().max() <= 3e-2


@pytest.mark.parametrize("limits", [{}, {"window": 50, "soft_cap": 2.0}])
def test_compiled_gradients_are_exact_and_new_documents_do_not_recompile(limits: dict) -> None:
    torch.compiler.reset()
    batches = [random_starts(2, 200, seed) for seed in range(4)]

    def function(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        return attention(2 * q, k, v, starts, **limits)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    qkv = random_qkv(2, 4, 2, 200, 16)
    value_and_gradients(compiled, *qkv, batches[0])
    torch.compiler.set_stance("fail_on_recompile")
    try:
        for starts in batches:
            found = value_and_gradients(compiled, *qkv, starts)
            eager = value_and_gradients(function, *qkv, starts)
            assert all(torch.equal(a, b) for a, b in zip(found, eager, strict=True))
    finally:
        torch.compiler.set_stance("default")


def test_compiled_flash_attention_takes_any_number_of_documents_in_one_graph(flash_on_cpu: None) -> None:
    torch.compiler.reset()
    qkv = random_qkv(2, 4, 2, 40, 8)
    with through("varlen"):
        compiled = torch.compile(lambda *x: attention(*x, window=9), backend="aot_eager", fullgraph=True)
        value_and_gradients(compiled, *qkv, random_starts(2, 40, 0))
        torch.compiler.set_stance("fail_on_recompile")
        try:
            for seed in (1, 4):
                starts = random_starts(2, 40, seed)
                found = value_and_gradients(compiled, *qkv, starts)
                exact = value_and_gradients(definition, *qkv, starts, window=9)
                for mine, truth in zip(found, exact, strict=True):
                    assert (mine - truth).abs().max() <= 1e-5
        finally:
            torch.compiler.set_stance("default")


def test_the_ops_shapes_strides_and_autograd_are_what_the_compiler_is_told() -> None:
    starts, qkv = random_starts(2, 130, 3), random_qkv(2, 4, 2, 130, 8)
    # With documents or a window, the end of the kept probabilities is uninitialised and compares to nothing.
    for limits in ((None, None, None, True), (starts, None, None, False), (starts, 40, 2.0, False)):
        torch.library.opcheck(blocks._block_attention, (*qkv, *limits))
    torch.library.opcheck(accelerator.sequence_offsets, (starts,))


def test_an_accelerator_takes_the_library_kernel() -> None:
    qkv = [x.detach().to("meta").requires_grad_() for x in random_qkv(2, 4, 2, 20, 8)]
    starts = torch.zeros(2, 20, dtype=torch.int64, device="meta")
    with mock.patch.object(
        F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention
    ) as library:
        assert attention(*qkv).shape == attention(*qkv, starts).shape == (2, 4, 20, 8)
    assert library.call_count == 2


def test_only_trained_inputs_get_gradients() -> None:
    q, k, v = random_qkv(1, 2, 2, 20, 8)
    k, v = k.detach(), v.detach()
    attention(q, k, v).sum().backward()
    expected = torch.autograd.grad(definition(q, k, v, None).sum(), q)[0]
    assert k.grad is None and v.grad is None
    torch.testing.assert_close(
        torch.autograd.grad(attention(q, k, v).sum(), q)[0], expected, atol=1e-5, rtol=0
    )


def test_starts_from_positions_point_at_each_documents_first_token() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    assert document_starts_from_positions(positions).tolist() == [[0, 0, 0, 3, 3, 5], [0] * 6]


def test_misfits_are_named() -> None:
    q, k, v = random_qkv(1, 3, 2, 20, 8)
    with pytest.raises(ValueError, match="K divide H"):
        attention(q, k, v)
    with pytest.raises(ValueError, match=r"\[B, K, T, D\]"):
        attention(q, k, v[..., :4])
    with pytest.raises(ValueError, match="int64"):
        attention(q, k[:, :1], v[:, :1], torch.zeros(1, 20))
    with pytest.raises(ValueError, match="own index"):
        attention(q, k[:, :1], v[:, :1], torch.full((1, 20), 5))
    with pytest.raises(ValueError, match="own index"):
        attention(q, k[:, :1], v[:, :1], torch.tensor([[0, 0, 1, *range(3, 20)]]))
    for limits in ({"window": 0}, {"window": -3}, {"soft_cap": 0.0}, {"soft_cap": -1.0}):
        with pytest.raises(ValueError, match="or more"):
            attention(q, k[:, :1], v[:, :1], **limits)
    with pytest.raises(ValueError, match="integers"):
        document_starts_from_positions(torch.zeros(2, 3))
