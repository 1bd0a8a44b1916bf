"""Number formats of training: which a machine can do, and the loss scale that fp16 needs.

fp32   everything in float32
tf32   float32 storage, matrix products on NVIDIA's TensorFloat-32 units (8-bit exponent, 10-bit mantissa)
bf16   matrix products in bfloat16 under autocast, weights, moments and sums in float32
fp16   the same in float16, with a dynamic loss scale (Micikevicius et al. 2018, arXiv:1710.03740)
fp8    linear layers of the blocks in float8 (e4m3 forward, e5m2 gradients), the rest as bf16
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from lavra.errors import PreflightError

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager:
    """The region that a forward pass runs in."""
    if precision in _AUTOCAST:
        return torch.autocast(device.type, _AUTOCAST[precision])
    return contextlib.nullcontext()


def check_precision(precision: str, device: torch.device) -> str:
    """Whether this machine can train in `precision`; returns what the user should know, or "".

    Raises:
        PreflightError: it cannot, and why.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    needed = {"tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9)}.get(precision)
    if capability is not None and needed is not None and capability < needed:
        raise PreflightError(
            f"{precision} needs compute capability {needed[0]}.{needed[1]}; this {torch.cuda.get_device_name(device)} "
            f"has {capability[0]}.{capability[1]}",
            where="train.precision",
            hint="use fp16, which it has, or fp32",
        )
    if precision == "tf32" and capability is None:
        raise PreflightError(
            "tf32 exists only on NVIDIA GPUs since Ampere; training runs on the CPU here",
            where="train.precision",
            hint="use fp32",
        )
    if precision == "fp8" and capability is None:
        return "fp8 is emulated on the CPU: its rounding, not its speed"
    return ""


def apply_precision(model: nn.Module, precision: str, device: torch.device) -> None:
    """Prepare a model and this process for `precision`; parameter names stay.

    Raises:
        PreflightError: fp8 without torchao.
    """
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    if precision != "fp8":
        return
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise PreflightError(
            "fp8 training needs torchao", where="train.precision", hint='pip install "lavra[fp8]"'
        ) from error
    config = Float8LinearConfig(emulate=device.type != "cuda")
    splits = {name: module.splits for name, module in model.named_modules() if hasattr(module, "splits")}
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: "blocks." in name)
    for name, rows in splits.items():  # the layers are new objects; Muon reads it from them
        model.get_submodule(name).splits = rows


@dataclass
class LossScale:
    """Dynamic loss scale. Gradients are those of scale x loss until they are divided by it again.

    An overflow (gradients not finite) halves the scale and the step is computed again on the same samples, so that
    no data is lost; after `interval` good steps in a row the scale doubles. A scale of 1 and off is no scaling.

    Attributes:
        scale: factor now in force.
        good: steps without overflow since the last change.
        overflows: how often it was halved.
    """

    enabled: bool
    scale: float = 65536.0
    good: int = 0
    overflows: int = 0
    interval: int = 1000

    def __post_init__(self) -> None:
        if not self.enabled:
            self.scale = 1.0

    def overflowed(self) -> bool:
        """Halve the scale; False when it cannot fall any more: then the overflow is not the scale's fault."""
        if not self.enabled or self.scale <= 1.0:
            return False
        self.scale, self.good, self.overflows = self.scale / 2, 0, self.overflows + 1
        return True

    def stepped(self) -> None:
        """A step was taken."""
        if not self.enabled:
            return
        self.good += 1
        if self.good >= self.interval:
            self.scale, self.good = min(self.scale * 2, 2.0**24), 0

    def state(self) -> dict[str, Any]:
        """JSON-able state."""
        return asdict(self)
