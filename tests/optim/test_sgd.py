"""Oracle: the three updates and a decoupled decay written out in numpy float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from lavra.optim.sgd import DecoupledSGD


@pytest.mark.parametrize("kind", ["plain", "momentum", "nesterov"])
def test_a_hundred_steps_equal_the_written_out_update(kind: str) -> None:
    momentum = 0.0 if kind == "plain" else 0.9
    random = np.random.default_rng(0)
    start = {"decay": random.normal(size=(6, 5)), "no_decay": random.normal(size=4)}
    decay = {"decay": 0.1, "no_decay": 0.0}
    parameters = {k: nn.Parameter(torch.tensor(v, dtype=torch.float32)) for k, v in start.items()}
    groups = [{"params": [p], "weight_decay": decay[k]} for k, p in parameters.items()]
    optimizer = DecoupledSGD(groups, momentum=momentum, nesterov=kind == "nesterov")
    buffer = {k: np.zeros_like(v) for k, v in start.items()}
    for step in range(100):
        rate = 0.05 * (1 + math.cos(step / 10))
        for group in optimizer.param_groups:
            group["lr"] = rate
        for key, p in start.items():
            g = random.normal(size=p.shape).astype(np.float32)
            parameters[key].grad = torch.tensor(g)
            p -= rate * decay[key] * p
            buffer[key] = momentum * buffer[key] + g
            p -= rate * (g + momentum * buffer[key] if kind == "nesterov" else buffer[key])
        optimizer.step()
    for key, p in start.items():
        found = parameters[key].detach().double().numpy()
        assert np.linalg.norm(found - p) <= 1e-5 * np.linalg.norm(p)


def test_the_decay_does_not_enter_the_momentum() -> None:
    parameter = nn.Parameter(torch.ones(3))
    groups = [{"params": [parameter], "weight_decay": 0.5, "lr": 0.1}]
    optimizer = DecoupledSGD(groups, momentum=0.9)
    for _ in range(2):
        parameter.grad = torch.zeros(3)
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((3,), 0.95**2))
    assert not optimizer.state[parameter]["momentum_buffer"].any()


def test_a_parameter_may_get_its_first_gradient_late() -> None:
    early, late = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))
    groups = [{"params": [early, late], "weight_decay": 0.1, "lr": 0.5}]
    optimizer = DecoupledSGD(groups, momentum=0.9)
    early.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(late, torch.ones(2))
    late.grad = torch.ones(2)
    optimizer.step()
    torch.testing.assert_close(late.detach(), torch.full((2,), 0.95 - 0.5))
