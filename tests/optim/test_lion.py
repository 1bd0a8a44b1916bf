"""Oracle: algorithm 2 of Chen et al. 2023 in numpy float64."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from lavra.optim.lion import Lion


def test_a_hundred_steps_equal_the_algorithm_as_published() -> None:
    beta1, beta2 = 0.9, 0.99
    random = np.random.default_rng(0)
    start = {"decay": random.normal(size=(6, 5)), "no_decay": random.normal(size=4)}
    decay = {"decay": 0.5, "no_decay": 0.0}
    parameters = {k: nn.Parameter(torch.tensor(v, dtype=torch.float32)) for k, v in start.items()}
    groups = [{"params": [p], "weight_decay": decay[k]} for k, p in parameters.items()]
    optimizer = Lion(groups, betas=(beta1, beta2))
    average = {k: np.zeros_like(v) for k, v in start.items()}
    for step in range(100):
        rate = 0.01 * (1 + math.cos(step / 10))
        for group in optimizer.param_groups:
            group["lr"] = rate
        for key, theta in start.items():
            g = random.normal(size=theta.shape).astype(np.float32)
            parameters[key].grad = torch.tensor(g)
            update = np.sign(beta1 * average[key] + (1 - beta1) * g)
            theta -= rate * (update + decay[key] * theta)
            average[key] = beta2 * average[key] + (1 - beta2) * g
        optimizer.step()
    for key, theta in start.items():
        found = parameters[key].detach().double().numpy()
        assert np.linalg.norm(found - theta) <= 1e-5 * np.linalg.norm(theta)


def test_a_parameter_without_gradient_stays_where_it_is() -> None:
    moved, still, alone = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = Lion([{"params": [moved, still], "weight_decay": 0.1}, {"params": [alone]}])
    moved.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(still, torch.ones(2)) and torch.equal(alone, torch.ones(2))
    assert not optimizer.state[still] and moved[0] < 1
