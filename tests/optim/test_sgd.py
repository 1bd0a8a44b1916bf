"""Oracle: the three updates and a decoupled decay written out in numpy float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lavra.optim.sgd import DecoupledSGD


@pytest.mark.parametrize("kind", ["plain", "momentum", "nesterov"])
def test_a_hundred_steps_equal_the_written_out_update(kind: str, assert_equal_over_100_steps) -> None:
    momentum = 0.0 if kind == "plain" else 0.9

    def update(p, g, rate, decay, memory):
        buffer = memory["buffer"] = momentum * memory.get("buffer", 0.0) + g
        decayed = p - rate * decay * p
        return decayed - rate * (g + momentum * buffer if kind == "nesterov" else buffer)

    assert_equal_over_100_steps(
        lambda groups: DecoupledSGD(groups, momentum=momentum, nesterov=kind == "nesterov"),
        update,
        decay=0.1,
        rate=0.05,
    )


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
