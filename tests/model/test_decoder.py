"""Oracles: perturbation, the document alone, rotation of complex numbers, gradients of an untied twin."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lavra.checkpoint.store import load_model, save_checkpoint, take_snapshot
from lavra.model.decoder import Decoder, RotaryTable, build_decoder, initialize, rotate
from lavra.optim.build import OptimizerSettings, build_optimizer


def random_tokens(batch: int, length: int, vocab: int = 48, seed: int = 0) -> torch.Tensor:
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


@settings(max_examples=12, deadline=None)
@given(changed=st.integers(1, 15), training=st.booleans())
def test_a_later_token_never_moves_an_earlier_logit(tiny_model, changed: int, training: bool) -> None:
    model = tiny_model(scale=5)
    tokens, positions = random_tokens(2, 16), torch.arange(16).expand(2, -1)
    disturbed = tokens.clone()
    disturbed[:, changed] = (disturbed[:, changed] + 1) % 48
    with torch.set_grad_enabled(training):
        before, after = model(tokens, positions), model(disturbed, positions)
    torch.testing.assert_close(before[:, :changed], after[:, :changed], atol=1e-6, rtol=0)
    assert not torch.equal(before[:, changed], after[:, changed])


@settings(max_examples=16, deadline=None)
@given(
    border=st.integers(1, 15),
    training=st.booleans(),
    window=st.sampled_from([0, 3, 8]),
    soft_cap=st.sampled_from([0, 2.0]),
)
def test_packed_documents_never_see_one_another(
    tiny_model, border: int, training: bool, window: int, soft_cap: float
) -> None:
    model = tiny_model(scale=5, attention_window=window, attention_soft_cap=soft_cap)
    tokens = random_tokens(2, 16)
    positions = torch.cat([torch.arange(border), torch.arange(16 - border)]).expand(2, -1)
    disturbed = tokens.clone()
    disturbed[:, :border] = (disturbed[:, :border] + 1) % 48
    with torch.set_grad_enabled(training):
        packed, other = model(tokens, positions), model(disturbed, positions)
        alone = model(tokens[:, border:], torch.arange(16 - border).expand(2, -1))
    assert torch.equal(packed[:, border:], other[:, border:])
    torch.testing.assert_close(packed[:, border:], alone, atol=1e-5, rtol=1e-5)


def test_windows_and_soft_caps_of_the_shape_reach_the_logits(tiny_model) -> None:
    tokens, positions = random_tokens(2, 16), torch.arange(16).expand(2, -1)
    full, windowed, capped = (
        tiny_model(scale=8, **limits)(tokens, positions)
        for limits in ({}, {"attention_window": 4}, {"attention_soft_cap": 1.0})
    )
    torch.testing.assert_close(full[:, :4], windowed[:, :4], atol=1e-5, rtol=0)
    assert bool(((full[:, 4:] - windowed[:, 4:]).abs().amax(2) > 1e-3).all())
    assert bool(((full[:, 1:] - capped[:, 1:]).abs().amax(2) > 1e-3).all())


def test_the_compiled_model_is_the_model_and_new_documents_do_not_recompile(tiny_model) -> None:
    torch.compiler.reset()
    model = tiny_model(scale=5, attention_window=5, attention_soft_cap=2.0)
    tokens = random_tokens(2, 16)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for number, border in enumerate((3, 9, 12)):
        positions = torch.cat([torch.arange(border), torch.arange(16 - border)]).expand(2, -1)
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            found = compiled(tokens, positions)
        expected = model(tokens, positions)
        assert torch.equal(found, expected)
        gradients = (torch.autograd.grad(x.square().sum(), [*model.parameters()]) for x in (found, expected))
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("compiled", [False, True])
def test_another_first_document_changes_no_bit_of_the_second_documents_logits_and_gradients(
    tiny_model, compiled: bool
) -> None:
    """torchtitan#4801: positions that restart without a mask still leak. Blocks compiled as training compiles them."""
    model = tiny_model(scale=5, n_layers=1 if compiled else 3)
    if compiled:
        torch.compiler.reset()
        for block in model.blocks:
            block.compile(backend="aot_eager")
    positions = torch.cat([torch.arange(6), torch.arange(10)]).expand(2, -1)
    found = []
    for seed in (0, 1):
        tokens = torch.cat([random_tokens(2, 6, seed=seed), random_tokens(2, 10, seed=9)], 1)
        logits = model(tokens, positions)[:, 6:]
        found.append(
            [
                logits.detach(),
                *torch.autograd.grad(logits.logsumexp(-1).sum(), list(model.blocks.parameters())),
            ]
        )
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_rope_turns_pairs_like_complex_numbers() -> None:
    table, head_dim, theta = RotaryTable(40, 6, 10_000.0), 6, 10_000.0
    x = torch.randn(1, 1, 40, 6, generator=torch.Generator().manual_seed(0))
    found = rotate(x, *table(torch.arange(40)[None]))[0, 0]
    for position in range(40):
        for pair in range(3):
            turn = complex(x[0, 0, position, pair], x[0, 0, position, pair + 3])
            angle = position * theta ** (-2 * pair / head_dim)
            turn *= complex(math.cos(angle), math.sin(angle))
            assert float(found[position, pair]) == pytest.approx(turn.real, abs=1e-5)
            assert float(found[position, pair + 3]) == pytest.approx(turn.imag, abs=1e-5)


@settings(max_examples=30, deadline=None)
@given(first=st.integers(0, 90), second=st.integers(0, 90), shift=st.integers(0, 900))
def test_rope_scores_depend_on_the_distance_only(first: int, second: int, shift: int) -> None:
    table = RotaryTable(1000, 16, 10_000.0)
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(1))

    def score(m: int, n: int) -> torch.Tensor:
        return (rotate(q, *table(torch.tensor([[m]]))) * rotate(k, *table(torch.tensor([[n]])))).sum()

    torch.testing.assert_close(score(first, second), score(first + shift, second + shift), atol=2e-4, rtol=0)
    assert (score(first, second) - score(first, second + 5)).abs() > 1e-3


def test_the_tied_embedding_gets_the_gradients_of_both_uses(tiny_model) -> None:
    tied, untied = tiny_model(), tiny_model(tie_embeddings=False)
    untied.load_state_dict(tied.state_dict() | {"head.weight": tied.embedding.weight.detach()})
    tokens, positions = random_tokens(2, 16), torch.arange(16).expand(2, -1)
    for model in (tied, untied):
        model(tokens, positions).log_softmax(-1)[..., 3].sum().backward()
    as_input, as_head = untied.embedding.weight.grad, untied.head.weight.grad
    assert as_input.any() and as_head.any()
    torch.testing.assert_close(tied.embedding.weight.grad, as_input + as_head)


def test_initial_values_depend_on_the_seed_and_the_name_only(tiny_shape) -> None:
    torch.manual_seed(1)
    small = dict(build_decoder(tiny_shape(), seed=3).named_parameters())
    torch.manual_seed(2)
    torch.rand(7)
    larger = dict(build_decoder(tiny_shape(n_layers=4, tie_embeddings=False), seed=3).named_parameters())
    for name, value in small.items():
        # Residual outputs are scaled by the depth, on purpose.
        factor = math.sqrt(2) if name.endswith("out.weight") else 1
        torch.testing.assert_close(value, larger[name] * factor, atol=1e-8, rtol=1e-6)
    reseeded = dict(build_decoder(tiny_shape(), seed=4).named_parameters())
    matrices = [name for name in small if small[name].ndim > 1]
    assert all(not torch.equal(small[name], reseeded[name]) for name in matrices)
    assert not torch.equal(small["blocks.0.attention.qkv.weight"], small["blocks.1.attention.qkv.weight"])


def test_initial_values_do_not_depend_on_the_order_of_construction(tiny_shape) -> None:
    class Backwards(Decoder):
        def __init__(self, shape) -> None:
            super().__init__(shape)
            children = dict(reversed(self._modules.items()))
            self._modules.clear()
            self._modules.update(children)

    model = Backwards(tiny_shape(tie_embeddings=False))
    initialize(model, 0)
    expected = dict(build_decoder(tiny_shape(tie_embeddings=False), seed=0).named_parameters())
    assert list(dict(model.named_parameters())) != list(expected)
    for name, value in model.named_parameters():
        assert torch.equal(value, expected[name])


def test_initial_spread_is_that_of_gpt_2(tiny_model) -> None:
    model = tiny_model(d_model=128, d_ff=256, vocab_size=512)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            assert bool((parameter == 1).all())
        else:
            expected = 0.02 / (math.sqrt(4) if name.endswith("out.weight") else 1)
            assert parameter.std().item() == pytest.approx(expected, rel=0.05)
            assert abs(parameter.mean().item()) < 0.002


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_materialised_from_meta_is_the_model_built_directly(tiny_shape, tied: bool) -> None:
    shape = tiny_shape(tie_embeddings=tied)
    with torch.device("meta"):
        model = Decoder(shape)
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        nn.init.constant_(tensor, math.nan)  # what memory may hold
    initialize(model, 5)
    tokens, positions = random_tokens(2, 16), torch.arange(16).expand(2, -1)
    assert torch.equal(model(tokens, positions), build_decoder(shape, seed=5)(tokens, positions))


def test_tied_weights_stay_tied_through_materialising_moving_training_and_loading(
    tiny_shape, tiny_model, tmp_path
) -> None:
    """torchtitan#2252, accelerate#3154: `to_empty` gives each of two tied parameters memory of its own."""
    tokens, positions = random_tokens(2, 16), torch.arange(16).expand(2, -1)

    def tied(model: Decoder) -> bool:
        """Input and output both follow the one weight."""
        outside = [name for name, _ in model.named_parameters() if not name.startswith("blocks.")]
        with torch.no_grad():
            before = model.embedding.weight.clone()
            model.embedding.weight.zero_()
            silent = not model(tokens, positions).any()
            model.embedding.weight.copy_(before)
        return silent and outside == ["embedding.weight", "norm.weight"]

    with torch.device("meta"):
        model = Decoder(tiny_shape())
    model.to_empty(device="cpu")
    initialize(model, 5)
    assert tied(model)
    assert tied(model.to(torch.float64).to("cpu").to(torch.float32))
    optimizer = build_optimizer(model, OptimizerSettings())
    model(tokens, positions).logsumexp(-1).sum().backward()
    optimizer.step()
    assert tied(model)
    saved = save_checkpoint(tmp_path, 1, take_snapshot(model, optimizer, {}))
    loaded = tiny_model(seed=9)
    load_model(saved, loaded)
    assert torch.equal(model(tokens, positions), loaded(tokens, positions)) and tied(loaded)
