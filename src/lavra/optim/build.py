"""From settings to an optimizer: its parameter groups, peak learning rates and algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import nn

from lavra.errors import PreflightError
from lavra.optim.config import OptimizerName
from lavra.optim.groups import muon_groups, parameter_groups
from lavra.optim.lion import Lion
from lavra.optim.muon import Muon
from lavra.optim.sgd import DecoupledSGD


@dataclass(frozen=True)
class OptimizerSettings:
    """What `build_optimizer` needs to know; which fields an optimizer reads is said there.

    Attributes:
        learning_rate: peak; a schedule multiplies it.
        weight_decay: a step shrinks a decaying weight by `lr * weight_decay` of itself; `adam`: the L2
            coefficient that adds to the gradient instead.
        betas: decays of the first and second moment, a step.
        momentum: decay of the momentum buffer, a step.
        eps: added to the root of the second moment.
        matrix_learning_rate: peak of the matrices that Muon orthogonalises; None: `learning_rate`.
    """

    name: OptimizerName = "adamw"
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    momentum: float = 0.95
    eps: float = 1e-8
    matrix_learning_rate: float | None = None


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """An optimizer over the named groups of `model`; each group has its `peak_lr` and starts there.

    Its state is plain tensors by parameter, so that a checkpoint can hold it by name. Weight decay is
    decoupled (Loshchilov & Hutter 2019), except in `adam`.

    - `sgd`, `momentum`, `nesterov`: see `DecoupledSGD`; reads momentum (not `sgd`).
    - `adam`: Kingma & Ba 2015 with the classic L2 penalty in the gradient; reads betas, eps.
    - `adamw`: Loshchilov & Hutter 2019, algorithm 2; reads betas, eps.
    - `adafactor`: Shazeer & Stern 2018 as in torch, whose learning rate is relative to the root mean
      square of each tensor and at most 1/sqrt(step).
    - `lion`: Chen et al. 2023; reads betas.
    - `muon`: see `Muon`; reads momentum and matrix_learning_rate, and betas and eps for its AdamW.
    - `adamw8bit`: AdamW with 8-bit moments, see `eight_bit.AdamW8bit`; reads betas, eps.

    Raises:
        PreflightError: `adamw8bit` without bitsandbytes.
        ValueError: Muon, and a layer's `splits` do not add up to its rows.
    """
    groups = optimizer_groups(model, settings)
    match settings.name:
        case "sgd":
            return DecoupledSGD(groups)
        case "momentum" | "nesterov":
            nesterov = settings.name == "nesterov"
            return DecoupledSGD(groups, momentum=settings.momentum, nesterov=nesterov)
        case "adam":
            return torch.optim.Adam(groups, betas=settings.betas, eps=settings.eps, fused=True)
        case "adamw":
            return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, fused=True)
        case "adafactor":
            return torch.optim.Adafactor(groups)
        case "lion":
            return Lion(groups, betas=settings.betas)
        case "muon":
            return Muon(groups, momentum=settings.momentum, betas=settings.betas, eps=settings.eps)
        case "adamw8bit":
            return _adamw8bit(groups, settings)
        case _:
            assert_never(settings.name)


def optimizer_groups(model: nn.Module, settings: OptimizerSettings) -> list[dict]:
    """The named groups that `build_optimizer` trains, each with its `peak_lr`."""
    make_groups = muon_groups if settings.name == "muon" else parameter_groups
    groups = make_groups(model, settings.weight_decay)
    for group in groups:
        peak = settings.matrix_learning_rate if group.get("algorithm") == "muon" else None
        group["lr"] = group["peak_lr"] = settings.learning_rate if peak is None else peak
    return groups


def set_learning_rate(optimizer: torch.optim.Optimizer, multiplier: float) -> None:
    """Set every group to `multiplier` (0 to 1, see `lr_multiplier`) times its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * multiplier


def _adamw8bit(groups: list[dict], settings: OptimizerSettings) -> torch.optim.Optimizer:
    try:
        from lavra.optim.eight_bit import AdamW8bit
    except ImportError as error:
        raise PreflightError(
            "the optimizer adamw8bit needs bitsandbytes", hint='pip install "lavra[8bit]"'
        ) from error
    return AdamW8bit(groups, betas=settings.betas, eps=settings.eps)
