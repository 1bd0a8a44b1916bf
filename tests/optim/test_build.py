"""What all optimizers have in common: groups, peaks, decay, a state that a checkpoint can hold, resume."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from lavra.optim.build import OptimizerName, OptimizerSettings, build_optimizer, set_learning_rate
from lavra.optim.groups import parameter_groups


@pytest.fixture(params=get_args(OptimizerName))
def name(request) -> OptimizerName:
    if request.param == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    return request.param


@pytest.fixture
def model(tiny_model) -> nn.Module:
    """Some tensors are above the 4096 elements from which bitsandbytes codes in 8 bits; one weight is stacked."""
    made = tiny_model(vocab_size=100, d_model=48, d_ff=64, tie_embeddings=False)
    made.blocks[0].feed_forward.gate_up.splits = (64, 64)
    return made


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def test_one_step_on_zero_gradients_shrinks_matrices_and_nothing_else(model, name: OptimizerName) -> None:
    """Norms, biases and embeddings never decay (torchtitan#2599)."""
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = build_optimizer(model, OptimizerSettings(name, learning_rate=0.1, weight_decay=0.5))
    step(model, optimizer, 0, scale=0.0)
    for parameter_name, parameter in model.named_parameters():
        kept = "norm" in parameter_name or "embedding" in parameter_name
        if kept:
            assert torch.equal(parameter, before[parameter_name])
        elif name == "adam":  # classic: the decay is a gradient, and the first step follows its sign
            gradient = 0.5 * before[parameter_name]
            moved = 0.1 * gradient / (gradient.abs() + 1e-8)
            torch.testing.assert_close(parameter.detach(), before[parameter_name] - moved)
        else:
            torch.testing.assert_close(parameter.detach(), before[parameter_name] * (1 - 0.1 * 0.5))


def test_every_group_starts_at_its_peak_and_follows_the_multiplier(model, name: OptimizerName) -> None:
    settings = OptimizerSettings(name, learning_rate=0.01, matrix_learning_rate=0.02)
    optimizer = build_optimizer(model, settings)
    peaks = {g["name"]: g["peak_lr"] for g in optimizer.param_groups}
    assert peaks == {"decay": 0.01, "no_decay": 0.01} | ({"matrices": 0.02} if name == "muon" else {})
    assert all(g["lr"] == g["peak_lr"] for g in optimizer.param_groups)
    for _ in range(2):  # from the peak each time, not from the rate before
        set_learning_rate(optimizer, 0.25)
        assert {g["name"]: g["lr"] for g in optimizer.param_groups} == {k: v / 4 for k, v in peaks.items()}


READS = {
    "sgd": set(),
    "momentum": {"momentum"},
    "nesterov": {"momentum"},
    "adam": {"betas", "eps"},
    "adamw": {"betas", "eps"},
    "adafactor": set(),
    "lion": {"betas"},
    "muon": {"momentum", "betas", "eps"},
    "adamw8bit": {"betas", "eps"},
}


def test_an_optimizer_reads_the_settings_it_says_and_takes_steps_of_its_own(tiny_model, name) -> None:
    def two_steps(**settings) -> torch.Tensor:
        model = tiny_model()
        optimizer = build_optimizer(model, OptimizerSettings(**{"name": name, **settings}))
        for number in range(2):
            step(model, optimizer, number)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    usual = two_steps()
    changes = {"momentum": 0.5, "betas": (0.5, 0.5), "eps": 0.1}
    read = {k for k, v in changes.items() if not torch.equal(two_steps(**{k: v}), usual)}
    assert read == READS[name]
    others = set(READS) - {name, "adamw8bit"}
    assert not any(torch.equal(two_steps(name=other), usual) for other in others)


def test_the_peak_of_muon_matrices_is_the_common_one_unless_given(model) -> None:
    optimizer = build_optimizer(model, OptimizerSettings("muon", learning_rate=0.03))
    assert {g["peak_lr"] for g in optimizer.param_groups} == {0.03}


def test_a_step_at_rate_zero_moves_nothing_and_a_twice_larger_rate_moves_twice(model, name) -> None:
    before = [p.detach().clone() for p in model.parameters()]
    moved = []
    for rate in (0.0, 1e-4, 2e-4):
        with torch.no_grad():
            for parameter, start in zip(model.parameters(), before, strict=True):
                parameter.copy_(start)
        optimizer = build_optimizer(model, OptimizerSettings(name, learning_rate=1.0, weight_decay=0.0))
        set_learning_rate(optimizer, rate)
        step(model, optimizer, 1)
        moved.append(
            torch.cat([(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])
        )
    assert not moved[0].any()
    assert float((moved[2] - 2 * moved[1]).norm() / moved[2].norm()) < 1e-2


def test_step_counts_go_up_by_one_a_step_and_not_where_there_is_no_gradient(model, name) -> None:
    """A counter that stands still makes Adam's correction wrong for ever (OLMo-core PR#309)."""
    optimizer = build_optimizer(model, OptimizerSettings(name))
    for number in range(3):
        step(model, optimizer, number)
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    counts = {int(s["step"]) for s in optimizer.state.values() if "step" in s}
    assert counts == (set() if name in ("sgd", "momentum", "nesterov", "lion") else {3})


def test_the_state_is_plain_tensors_by_parameter(model, name: OptimizerName) -> None:
    optimizer = build_optimizer(model, OptimizerSettings(name))
    step(model, optimizer, 0)
    assert optimizer.state.keys() <= set(model.parameters())
    assert bool(optimizer.state) is (name != "sgd")
    assert {type(v) for s in optimizer.state.values() for v in s.values()} <= {torch.Tensor}


def test_state_put_back_by_name_continues_bitwise(tiny_model, model, name: OptimizerName) -> None:
    """Through safetensors, which also refuses tensors that share memory; the new peak rate takes effect."""
    optimizer = build_optimizer(model, OptimizerSettings(name, learning_rate=1e-2))
    for number in range(3):
        step(model, optimizer, number)
    names = {p: n for n, p in model.named_parameters()}
    written = save({f"{slot}/{names[p]}": v for p, s in optimizer.state.items() for slot, v in s.items()})

    other = tiny_model(vocab_size=100, d_model=48, d_ff=64, tie_embeddings=False)
    other.load_state_dict(model.state_dict())
    other.blocks[0].feed_forward.gate_up.splits = (64, 64)
    resumed = build_optimizer(other, OptimizerSettings(name, learning_rate=2e-2))
    parameters = dict(other.named_parameters())
    for key, value in load(written).items():
        slot, _, parameter_name = key.partition("/")
        resumed.state[parameters[parameter_name]][slot] = value
    set_learning_rate(optimizer, 0.5)
    set_learning_rate(resumed, 0.25)
    for number in range(3, 6):
        step(model, optimizer, number)
        step(other, resumed, number)
    assert all(torch.equal(p, parameters[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_hundred_steps_of_adam_equal_the_algorithms_as_published(decoupled: bool) -> None:
    """AdamW by algorithm 2 of Loshchilov & Hutter 2019; Adam with the penalty's gradient added to g."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5))
    settings = OptimizerSettings("adamw" if decoupled else "adam", learning_rate=1e-2, weight_decay=0.1)
    optimizer = build_optimizer(model, settings)
    decay = {n: g["weight_decay"] for g in parameter_groups(model, 0.1) for n in g["param_names"]}
    reference = {n: p.detach().double().clone() for n, p in model.named_parameters()}
    first = {n: torch.zeros_like(p) for n, p in reference.items()}
    second = {n: torch.zeros_like(p) for n, p in reference.items()}
    for number in range(1, 101):
        rate = 1e-2 * (1 + math.cos(number / 10)) / 2  # the loop moves it every step
        set_learning_rate(optimizer, rate / 1e-2)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 10 ** (number % 5 - 3)
            g, theta = parameter.grad.double(), reference[name]
            if decoupled:
                theta -= rate * decay[name] * theta
            else:
                g = g + decay[name] * theta
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.95 * second[name] + 0.05 * g * g
            m, v = first[name] / (1 - 0.9**number), second[name] / (1 - 0.95**number)
            theta -= rate * m / (v.sqrt() + 1e-8)
        optimizer.step()
    for name, parameter in model.named_parameters():
        error = (parameter.double() - reference[name]).norm() / reference[name].norm()
        assert float(error.detach()) <= 1e-5
