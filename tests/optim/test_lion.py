"""Oracle: algorithm 2 of Chen et al. 2023 in numpy float64."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from lavra.optim.lion import Lion


def test_a_hundred_steps_equal_the_algorithm_as_published(assert_equal_over_100_steps) -> None:
    beta1, beta2 = 0.9, 0.99

    def update(theta, g, rate, decay, memory):
        average = memory.get("average", 0.0)
        memory["average"] = beta2 * average + (1 - beta2) * g
        return theta - rate * (np.sign(beta1 * average + (1 - beta1) * g) + decay * theta)

    assert_equal_over_100_steps(
        lambda groups: Lion(groups, betas=(beta1, beta2)), update, decay=0.5, rate=0.01
    )


def test_a_parameter_without_gradient_stays_where_it_is() -> None:
    moved, still, alone = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = Lion([{"params": [moved, still], "weight_decay": 0.1}, {"params": [alone]}])
    moved.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(still, torch.ones(2)) and torch.equal(alone, torch.ones(2))
    assert not optimizer.state[still] and moved[0] < 1
