"""The data-parallel processes of a run: each reads its share of every global step, all hold the same weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among `size`; with one process every method is the identity."""

    rank: int = 0
    size: int = 1

    @staticmethod
    def current() -> Ranks:
        """The default process group of `torch.distributed`, or a single process."""
        if dist.is_available() and dist.is_initialized():
            return Ranks(dist.get_rank(), dist.get_world_size())
        return Ranks()

    def share(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """This process's part of a step's samples: together the parts are the whole, in order, for any size."""
        return np.array_split(samples, self.size)[self.rank]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over the processes, element by element, in float64."""
        if self.size == 1:
            return [float(v) for v in values]
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace each gradient by its sum over the processes; called once a step, after all micro-batches.

        Nothing is divided: the loss was divided by the targets of the global step before it went backward (law 1).
        """
        if self.size == 1:
            return
        trained = [p for p in parameters if p.requires_grad]
        for p in trained:
            if p.grad is None:  # a process without samples in this step
                p.grad = torch.zeros_like(p)
        gradients = [p.grad for p in trained if p.grad is not None]
        flat = _flatten_dense_tensors(gradients)
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
            gradient.copy_(part)

    def gather(self, value: T) -> list[T]:
        """Every process's value, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


ALONE = Ranks()
