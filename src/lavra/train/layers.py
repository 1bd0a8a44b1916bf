"""Statistics of every layer, every so many steps: what `lavra diagnose` reads.

Gradients and updates are those of the step itself. Activations and attention logits come from one more forward pass
of one sequence, so that a compiled training graph stays as it is; at the default interval that is under 1 % of the time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lavra.batch import Batch
from lavra.model.attention import document_starts_from_positions, visible_keys
from lavra.model.decoder import Attention, Block, Decoder
from lavra.train.precision import autocast


class LayerStatistics:
    """Watches the steps whose number is a multiple of `every`, and the first.

    The values of a layer (`embedding`, `blocks.0` ..., `norm`, `head`):
        grad_norm: L2 norm of its gradients, after clipping.
        weight_rms: root mean square of its weights.
        update_ratio: L2 norm of the step's change / L2 norm of the weights.
    and of a block:
        activation_rms, activation_max: of its output, the residual stream.
        contribution: RMS of what it adds to the stream / RMS of the stream.
        attention_logit: largest |q k| / sqrt(head_dim) among visible keys, before any soft cap.
    """

    def __init__(self, every: int, precision: str) -> None:
        self.every, self.precision = every, precision
        self._held: dict[str, list[Tensor]] = {}
        self._found: dict[str, dict[str, float]] = {}

    def due(self, step: int) -> bool:
        """Whether step `step` = 1, 2, ... is watched."""
        return bool(self.every) and (step == 1 or step % self.every == 0)

    @torch.no_grad()
    def before(self, step: int, model: Decoder, batch: Batch) -> None:
        """Gradients are there, clipped; the optimizer has not moved."""
        if not self.due(step) or not len(batch):
            return
        layers = _layers(model)
        self._found = {name: {} for name in layers}
        self._held = {name: [p.detach().clone() for p in parameters] for name, parameters in layers.items()}
        for name, parameters in layers.items():
            gradients = [p.grad for p in parameters if p.grad is not None]
            if gradients:
                self._found[name]["grad_norm"] = float(nn.utils.get_total_norm(gradients))
        for name, values in activation_statistics(model, batch.split(1)[0], self.precision).items():
            self._found[name] |= values

    @torch.no_grad()
    def after(self, step: int, model: Decoder) -> dict[str, Any]:
        """The optimizer moved; `{"layers": {layer: {name: value}}}`, or nothing at other steps."""
        if not self.due(step) or not self._held:
            return {}
        for name, parameters in _layers(model).items():
            held = self._held[name]
            change = nn.utils.get_total_norm([p.detach() - h for p, h in zip(parameters, held, strict=True)])
            norm = nn.utils.get_total_norm(held)
            count = sum(h.numel() for h in held)
            self._found[name] |= {
                "weight_rms": float(norm) / count**0.5,
                "update_ratio": float(change) / max(float(norm), 1e-30),
            }
        self._held = {}
        return {"layers": {n: {k: float(f"{v:.5g}") for k, v in s.items()} for n, s in self._found.items()}}


def _layers(model: Decoder) -> dict[str, list[nn.Parameter]]:
    """Parameters by layer: `blocks.3`, `embedding`, ..."""
    layers: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        layers.setdefault(".".join(parts[:2]) if parts[0] == "blocks" else parts[0], []).append(parameter)
    return layers


@torch.no_grad()
def activation_statistics(model: Decoder, one: Batch, precision: str) -> dict[str, dict[str, float]]:
    """`activation_*`, `contribution` and `attention_logit` of each block on one sequence."""
    device = next(model.parameters()).device
    one = one.to(device)
    found: dict[str, dict[str, float]] = {}
    starts = document_starts_from_positions(one.positions)
    visible = visible_keys(starts, model.shape.attention_window or None)[:, None]

    with autocast(device, precision), torch.compiler.set_stance("force_eager"):
        stream = model.embedding(one.tokens)
        rope = model.rotary(one.positions)
        for number, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            logit = _largest_logit(block.attention, block.attention_norm(stream), rope, visible)
            output = block(stream, rope, starts)
            found[f"blocks.{number}"] = {"attention_logit": logit, **_stream(stream.float(), output.float())}
            stream = output
    return found


def _largest_logit(
    attention: Attention, inputs: Tensor, rope: tuple[Tensor, Tensor], visible: Tensor
) -> float:
    q, k, _ = attention.project(inputs, rope)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = (q.float() @ k.float().transpose(2, 3)).abs() / attention.head_dim**0.5
    return float(scores.masked_fill(~visible, 0.0).max())


def _stream(before: Tensor, after: Tensor) -> dict[str, float]:
    """The residual stream after a block, and what the block added to it."""
    return {
        "activation_rms": float(_rms(after)),
        "activation_max": float(after.abs().max()),
        "contribution": float(_rms(after - before) / _rms(before).clamp(min=1e-30)),
    }


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()
