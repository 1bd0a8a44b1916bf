"""Oracles: `numel` of the built model; `FlopCounterMode` over attention that computes the causal half only."""

from __future__ import annotations

from itertools import pairwise
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lavra.errors import UsageError
from lavra.model import decoder as decoder_module
from lavra.model.config import ModelConfig, ModelShape, shape_for
from lavra.model.decoder import Decoder, build_decoder

shapes = st.builds(
    lambda vocab, groups, kv, half, layers, d_ff, tied, window: ModelShape(
        vocab_size=vocab,
        d_model=groups * kv * 2 * half,
        n_layers=layers,
        n_heads=groups * kv,
        n_kv_heads=kv,
        d_ff=d_ff,
        seq_len=8,
        tie_embeddings=tied,
        attention_window=window,
    ),
    st.integers(1, 300),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 90),
    st.booleans(),
    st.sampled_from([0, 0, 1, 3, 7, 8, 20]),
)


@settings(max_examples=12, deadline=None)
@given(shape=shapes)
def test_parameter_count_is_the_number_of_weights_of_the_built_model(shape: ModelShape) -> None:
    with torch.device("meta"):
        model = Decoder(shape)
    assert shape.parameter_count() == sum(p.numel() for p in model.parameters())
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()  # no buffer is saved


def useful_work(
    q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor, *, window: int | None, soft_cap: float | None
) -> Tensor:
    """Each query against the keys it may see and no other: its matmuls are exactly the useful work."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    rows = []
    for i in range(q.shape[2]):
        seen = slice(max(0, i + 1 - (window or i + 1)), i + 1)
        rows.append((q[:, :, i : i + 1] @ k[:, :, seen].transpose(-1, -2)).softmax(-1) @ v[:, :, seen])
    return torch.cat(rows, 2)


@settings(max_examples=12, deadline=None)
@given(shape=shapes)
def test_flops_per_token_are_those_of_a_forward_and_backward_pass(shape: ModelShape) -> None:
    model = build_decoder(shape, seed=0)
    tokens = torch.zeros(2, shape.seq_len, dtype=torch.long)
    positions = torch.arange(shape.seq_len).expand(2, -1)
    with (
        mock.patch.object(decoder_module, "attention", useful_work),
        FlopCounterMode(display=False) as counter,
    ):
        model(tokens, positions).sum().backward()
    # w s - w(w-1)/2 pairs of query and key, w = s without a window; the w s - w^2/2 of the convention, s^2/2
    # without one, leaves half of a diagonal of length w out.
    window = min(shape.attention_window or shape.seq_len, shape.seq_len)
    diagonal = 6 * shape.n_layers * shape.d_model * window / shape.seq_len
    expected = tokens.numel() * (shape.flops_per_token() + diagonal)
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-12)


def test_the_flops_of_a_large_model_are_counted_without_its_memory() -> None:
    """On the meta device, forward and backward, with the library's attention: that computes all of s^2, not half."""
    shape = shape_for(ModelConfig(), 1_000_000_000, vocab_size=32_768, seq_len=256)
    with torch.device("meta"):
        model = Decoder(shape)
        tokens = torch.zeros(2, shape.seq_len, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(tokens, tokens).sum().backward()
    other_half = 6 * shape.n_layers * shape.d_model * shape.seq_len
    assert counter.get_total_flops() == tokens.numel() * (shape.flops_per_token() + other_half)


def test_flops_of_llama_3_8b_equal_the_published_figure() -> None:
    """5.147e10 a token at 8192: 6 (N - input embedding) + 6 L d s, the convention of Megatron-Bridge's tables."""
    shape = ModelShape(
        vocab_size=128_256,
        d_model=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        d_ff=14_336,
        seq_len=8192,
        tie_embeddings=False,
    )
    assert shape.parameter_count() == 8_030_261_248
    assert shape.flops_per_token() == pytest.approx(5.147e10, rel=2e-3)


def test_a_shape_written_before_windows_and_soft_caps_has_neither(tiny_shape) -> None:
    old = tiny_shape().model_dump(exclude={"attention_window", "attention_soft_cap"})
    assert ModelShape(**old) == tiny_shape(attention_window=0, attention_soft_cap=0)


def test_negative_windows_and_soft_caps_are_refused() -> None:
    for limits in ({"attention_window": -1}, {"attention_soft_cap": -0.5}):
        with pytest.raises(ValueError, match=next(iter(limits))):
            ModelConfig(**limits)


def vocabulary(size: int) -> int:
    return 4096 if size < 10_000_000 else 8192 if size < 60_000_000 else 32_768


def test_the_dial_is_met_within_a_tenth_from_5m_to_7b() -> None:
    for size in (5_000_000, 10**7, 3 * 10**7, 10**8, 3 * 10**8, 10**9, 3 * 10**9, 7 * 10**9):
        shape = shape_for(ModelConfig(), size, vocab_size=vocabulary(size), seq_len=512)
        assert shape.parameter_count() == pytest.approx(size, rel=0.1)
        assert 32 <= shape.head_dim <= 128
        assert 32 <= shape.d_model / shape.n_layers <= 160


def test_a_few_million_parameters_are_met_within_a_third_because_width_moves_in_steps_of_64() -> None:
    for size in (1_000_000, 1_300_000, 1_700_000, 2_200_000, 3_000_000):
        shape = shape_for(ModelConfig(), size, vocab_size=4096, seq_len=512)
        assert shape.parameter_count() == pytest.approx(size, rel=0.34)


@pytest.mark.parametrize("vocab_size", [300, 4096, 32_768])
def test_a_larger_dial_never_gives_a_smaller_model(vocab_size: int) -> None:
    # One side of 500M, where `tie_embeddings: auto` changes what a parameter buys.
    sizes = [int(10 ** (6 + i / 12)) for i in range(32)]
    found = [shape_for(ModelConfig(), n, vocab_size=vocab_size, seq_len=64).parameter_count() for n in sizes]
    assert all(a <= b for a, b in pairwise(found))


@settings(max_examples=25, deadline=None)
@given(
    d_model=st.sampled_from(["auto", 8, 96, 200, 256, 1024]),
    n_layers=st.sampled_from(["auto", 1, 5]),
    n_heads=st.sampled_from(["auto", 1, 4, 6]),
    n_kv_heads=st.sampled_from(["auto", 1, 2]),
    d_ff=st.sampled_from(["auto", 10]),
    tie_embeddings=st.sampled_from(["auto", True, False]),
    size=st.sampled_from([1_000_000, 20_000_000, 600_000_000]),
)
def test_every_override_is_kept_and_the_rest_is_made_to_fit(size: int, **overrides: object) -> None:
    config = ModelConfig(**overrides)
    try:
        shape = shape_for(config, size, vocab_size=1000, seq_len=64)
    except UsageError:
        # Only when no decoder exists at all (brute force).
        widths = range(64, 1025, 64) if config.d_model == "auto" else [config.d_model]
        assert not any(
            width % (2 * heads) == 0
            and config.n_heads in ("auto", heads)
            and (config.n_kv_heads == "auto" or heads % config.n_kv_heads == 0)
            for width in widths
            for heads in range(1, width + 1)
        )
        return
    for name, value in overrides.items():
        assert value in ("auto", getattr(shape, name))
    assert shape.d_ff > 0


@pytest.mark.parametrize(
    "overrides",
    [{"d_model": 64, "n_heads": 3}, {"n_heads": 4, "n_kv_heads": 3}, {"d_model": 63}],
)
def test_overrides_that_no_decoder_has_are_a_mistake_of_the_recipe(overrides: dict) -> None:
    with pytest.raises(UsageError, match="no decoder has") as error:
        shape_for(ModelConfig(**overrides), 1_000_000, vocab_size=1000, seq_len=64)
    assert all(name in str(error.value) for name in overrides)
