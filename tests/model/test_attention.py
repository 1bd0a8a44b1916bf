"""Oracle: the definition, written out in float64 with a boolean mask."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lavra.model import attention as module
from lavra.model.attention import attention, document_starts_from_positions, visible_keys


def definition(q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None) -> Tensor:
    groups, length = q.shape[1] // k.shape[1], q.shape[2]
    if document_starts is None:
        document_starts = torch.zeros(q.shape[0], length, dtype=torch.int64)
    scores = q @ k.repeat_interleave(groups, 1).transpose(-1, -2) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~visible_keys(document_starts)[:, None], -torch.inf)
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
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, length, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    tokens_first = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [x.transpose(1, 2).requires_grad_() for x in tokens_first]  # strided as a projection leaves them


def random_positions(batch: int, length: int, seed: int) -> Tensor:
    """Documents of 1 to ~length tokens in each row."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.rand(batch, length, generator=generator) < torch.rand(batch, 1, generator=generator) ** 4
    first[:, 0] = True
    index = torch.arange(length)
    return index - torch.where(first, index, 0).cummax(1).values


def value_and_gradients(function, q: Tensor, k: Tensor, v: Tensor, *args) -> list[Tensor]:
    out = function(q, k, v, *args)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).cos().to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), (q, k, v))]


layouts = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 3),
        "kv_heads": st.integers(1, 2),
        "groups": st.integers(1, 3),
        "head_dim": st.sampled_from([2, 10, 64]),
        "length": st.one_of(st.integers(1, 40), st.sampled_from([127, 128, 129, 256, 300])),
        "documents": st.booleans(),
        "recompute": st.booleans(),
        "seed": st.integers(0, 1000),
    }
)


def build(layout: dict, dtype: torch.dtype) -> tuple[list[Tensor], Tensor | None]:
    qkv = random_qkv(
        layout["batch"],
        layout["kv_heads"] * layout["groups"],
        layout["kv_heads"],
        layout["length"],
        layout["head_dim"],
        dtype=dtype,
        seed=layout["seed"],
    )
    positions = random_positions(layout["batch"], layout["length"], layout["seed"])
    return qkv, document_starts_from_positions(positions) if layout["documents"] else None


@settings(max_examples=40, deadline=None)
@given(layout=layouts)
def test_float32_values_and_gradients_equal_the_definition(layout: dict) -> None:
    qkv, starts = build(layout, torch.float32)
    with mock.patch.object(module, "LONGEST_KEPT", 16 if layout["recompute"] else 1024):
        found = value_and_gradients(attention, *qkv, starts)
    exact = value_and_gradients(definition, *(x.detach().double().requires_grad_() for x in qkv), starts)
    for mine, truth in zip(found, exact, strict=True):
        assert (mine - truth).abs().max() <= 1e-5 * max(1, truth.abs().max())


@settings(max_examples=25, deadline=None)
@given(layout=layouts)
def test_bfloat16_is_as_close_to_the_definition_as_torchs_own_kernel(layout: dict) -> None:
    """Where a gradient cancels (rows of two or three keys), its relative error has no bound in any kernel."""
    qkv, starts = build(layout, torch.bfloat16)
    found = value_and_gradients(attention, *qkv, starts)
    kernel = value_and_gradients(module._sdpa, *(x.detach().requires_grad_() for x in qkv), starts)
    exact = value_and_gradients(definition, *(x.detach().double().requires_grad_() for x in qkv), starts)
    for mine, its, truth in zip(found, kernel, exact, strict=True):
        assert mine.dtype == torch.bfloat16
        allowed = max(0.01 * truth.norm(), 3 * (its - truth).norm(), 2**-8 * truth.numel() ** 0.5)
        assert (mine - truth).norm() <= allowed


@settings(max_examples=25, deadline=None)
@given(layout=layouts)
def test_evaluation_agrees_with_training(layout: dict) -> None:
    qkv, starts = build(layout, torch.float32)
    with torch.no_grad():
        evaluated = attention(*qkv, starts)
    assert (evaluated - attention(*qkv, starts)).abs().max() <= 1e-5


@settings(max_examples=25, deadline=None)
@given(length=st.integers(2, 300), cut=st.floats(0, 1), seed=st.integers(0, 100), training=st.booleans())
def test_a_document_never_sees_another(length: int, cut: float, seed: int, training: bool) -> None:
    border = 1 + int(cut * (length - 2))
    starts = document_starts_from_positions(
        torch.cat([torch.arange(border), torch.arange(length - border)]).expand(2, length)
    )
    qkv = random_qkv(2, 4, 2, length, 16, seed=seed)
    disturbed = [x.detach().clone() for x in qkv]
    for x in disturbed:
        x[:, :, :border] += 3 * torch.randn(x[:, :, :border].shape)
    disturbed = [x.requires_grad_() for x in disturbed]
    with torch.set_grad_enabled(training):
        before, after = attention(*qkv, starts), attention(*disturbed, starts)
    assert torch.equal(before[:, :, border:], after[:, :, border:])
    if training:
        gradients = torch.autograd.grad(after[:, :, border:].square().sum(), disturbed)
        assert all(not g[:, :, :border].any() for g in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_are_bitwise_equal(dtype: torch.dtype) -> None:
    starts = document_starts_from_positions(random_positions(3, 300, 7))
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


def test_compiled_gradients_are_exact_and_new_documents_do_not_recompile() -> None:
    torch.compiler.reset()
    batches = [document_starts_from_positions(random_positions(2, 200, seed)) for seed in range(4)]
    compiled = torch.compile(
        lambda q, k, v, s: attention(2 * q, k, v, s), backend="aot_eager", fullgraph=True
    )
    qkv = random_qkv(2, 4, 2, 200, 16)
    value_and_gradients(compiled, *qkv, batches[0])
    torch.compiler.set_stance("fail_on_recompile")
    try:
        for starts in batches:
            found = value_and_gradients(compiled, *qkv, starts)
            eager = value_and_gradients(lambda q, k, v, s: attention(2 * q, k, v, s), *qkv, starts)
            assert all(torch.equal(a, b) for a, b in zip(found, eager, strict=True))
    finally:
        torch.compiler.set_stance("default")


def test_the_ops_shapes_strides_and_autograd_are_what_the_compiler_is_told() -> None:
    starts = document_starts_from_positions(random_positions(2, 130, 3))
    for documents in (None, starts):
        torch.library.opcheck(module._block_attention, (*random_qkv(2, 4, 2, 130, 8), documents))


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
    with pytest.raises(ValueError, match="integers"):
        document_starts_from_positions(torch.zeros(2, 3))
