"""A fixed sequence of gradients: an optimizer against its update written out in numpy float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

Memory = dict[str, NDArray]
Update = Callable[[NDArray, NDArray, float, float, Memory], NDArray]


@pytest.fixture
def assert_equal_over_100_steps() -> Callable[..., None]:
    """`check(make_optimizer, update, decay=, rate=)`: two tensors, one of them decaying, under a rate that moves.

    `update(theta, gradient, rate, decay, memory)` returns the new theta and keeps what it needs in `memory`, which
    starts empty for each tensor.
    """

    def check(
        make: Callable[[list[dict]], torch.optim.Optimizer], update: Update, *, decay: float, rate: float
    ) -> None:
        random = np.random.default_rng(0)
        start = {"decay": random.normal(size=(6, 5)), "no_decay": random.normal(size=4)}
        decays = {"decay": decay, "no_decay": 0.0}
        memory: dict[str, Memory] = {name: {} for name in start}
        parameters = {k: nn.Parameter(torch.tensor(v, dtype=torch.float32)) for k, v in start.items()}
        optimizer = make([{"params": [p], "weight_decay": decays[k]} for k, p in parameters.items()])
        for step in range(100):
            now = rate * (1 + math.cos(step / 10))
            for group in optimizer.param_groups:
                group["lr"] = now
            for key, theta in start.items():
                g = random.normal(size=theta.shape).astype(np.float32)
                parameters[key].grad = torch.tensor(g)
                start[key] = update(theta, g, now, decays[key], memory[key])
            optimizer.step()
        for key, theta in start.items():
            found = parameters[key].detach().double().numpy()
            assert np.linalg.norm(found - theta) <= 1e-5 * np.linalg.norm(theta)

    return check
