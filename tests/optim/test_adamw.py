"""Oracle: AdamW written out from the paper's algorithm 2, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lavra.optim.adamw import build_adamw, clip_grad_norm, describe_groups, parameter_groups


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_in_one_group_and_only_matrices_of_layers_decay(tiny_model, tied: bool) -> None:
    model = tiny_model(tie_embeddings=tied)
    groups = {g["name"]: g for g in parameter_groups(model, 0.1)}
    names = [n for g in groups.values() for n in g["param_names"]]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters())
    decaying = {n for n, _ in model.named_parameters() if "norm" not in n and "embedding" not in n}
    assert set(groups["decay"]["param_names"]) == decaying
    assert ("head.weight" in decaying) is not tied
    assert groups["decay"]["weight_decay"] == 0.1 and groups["no_decay"]["weight_decay"] == 0.0
    own = dict(model.named_parameters())
    for group in groups.values():
        assert all(own[n] is p for n, p in zip(group["param_names"], group["params"], strict=True))
    text = describe_groups(list(groups.values()))
    assert f"{sum(p.numel() for p in groups['decay']['params']):,}" in text


def test_biases_and_foreign_embeddings_do_not_decay() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.LayerNorm(3))
    groups = {g["name"]: g["param_names"] for g in parameter_groups(model, 0.1)}
    assert groups == {"decay": ["1.weight"], "no_decay": ["0.weight", "1.bias", "2.weight", "2.bias"]}


def test_fifty_steps_equal_the_algorithm_as_published() -> None:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5))
    groups = parameter_groups(model, 0.1)
    optimizer = build_adamw(groups, learning_rate=1e-2, betas=(0.9, 0.95))
    reference = {n: p.detach().double().clone() for n, p in model.named_parameters()}
    first = {n: torch.zeros_like(p) for n, p in reference.items()}
    second = {n: torch.zeros_like(p) for n, p in reference.items()}
    decay = {n: g["weight_decay"] for g in groups for n in g["param_names"]}
    for step in range(1, 51):
        rate = 1e-2 * (1 + math.cos(step / 10)) / 2  # the loop moves it every step
        for group in optimizer.param_groups:
            group["lr"] = rate
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 10 ** (step % 5 - 3)
            g, theta = parameter.grad.double(), reference[name]
            theta -= rate * decay[name] * theta
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.95 * second[name] + 0.05 * g * g
            m, v = first[name] / (1 - 0.9**step), second[name] / (1 - 0.95**step)
            theta -= rate * m / (v.sqrt() + 1e-8)
        optimizer.step()
    for name, parameter in model.named_parameters():
        error = (parameter.double() - reference[name]).norm() / reference[name].norm()
        assert float(error.detach()) <= 1e-5


def test_a_parameter_without_gradient_stays_where_it_is() -> None:
    model = nn.Linear(3, 3)
    optimizer = build_adamw(parameter_groups(model, 0.1), learning_rate=0.1, betas=(0.9, 0.95))
    before = model.bias.detach().clone()
    model.weight.grad = torch.ones(3, 3)
    optimizer.step()
    assert torch.equal(model.bias, before)


@pytest.mark.parametrize("as_generator", [True, False])
def test_clipping_clips_what_a_generator_yields(as_generator: bool) -> None:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.full((3,), 3.0), torch.full((2, 2), -4.0)
    expected = math.sqrt(3 * 9 + 4 * 16)
    before = clip_grad_norm((p for p in parameters) if as_generator else parameters, 1.0)
    assert float(before) == pytest.approx(expected)
    clipped = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    assert 0.999 <= float(clipped.norm()) <= 1.0
    torch.testing.assert_close(clipped, torch.tensor([3.0] * 3 + [-4.0] * 4) / expected)


def test_small_gradients_are_left_alone_and_bad_ones_show_in_the_norm() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 0.1)
    assert float(clip_grad_norm([parameter], 1.0)) == pytest.approx(0.2)
    assert torch.equal(parameter.grad, torch.full((4,), 0.1))
    parameter.grad[1] = math.nan
    assert math.isnan(float(clip_grad_norm([parameter], 1.0)))
