"""Why a step was rejected: the sequences, the documents in them, and the first layer that is not finite.

Looked at only after a rejection, on the rejected batch and the weights as they were: it costs a forward pass for every
sequence, and a backward pass of one micro-batch when something is not finite.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lavra.batch import Batch
from lavra.model.decoder import Decoder
from lavra.objective.causal import causal_normalizer, causal_numerator
from lavra.parallel.ranks import ALONE, Ranks
from lavra.tokens.sampler import DocumentSpan, Sampler
from lavra.train.guard import robust_deviation
from lavra.train.precision import autocast

Cause = Literal["data", "weights", "unclear"]
Describe = Callable[[DocumentSpan], dict[str, Any]]

WORST = 3  # sequences that an event names
_STANDS_OUT = 4.0  # robust standard deviations above the batch's other sequences


def blame(
    model: Decoder,
    batch: Batch,
    sampler: Sampler,
    *,
    micro_batch_size: int,
    seq_len: int,
    precision: str,
    non_finite: bool,
    usual_loss: float | None = None,
    describe: Describe = DocumentSpan._asdict,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """The worst sequences of a rejected step over all processes, each with rank, micro-batch, loss and documents.

    Args:
        batch: this process's part of the step.
        seq_len: what its sequences are cut to.
        usual_loss: nats per target of the steps before, which tells how far the batch as a whole is off; None: unknown.
        describe: a document span -> what an event says of it (adds an excerpt).

    Returns:
        JSON-able: `cause` (`data`: some sequences stand out from the batch; `weights`: all of it is bad),
        `sequences`, and `layer` where something was not finite.
    """
    parts = [one.cut(seq_len) for one in batch.split(1)]
    losses = [_loss(model, one, precision) for one in parts]
    mine: list[dict[str, Any]] = [
        {"rank": ranks.rank, "micro_batch": place // micro_batch_size, "sample": int(sample), "loss": loss}
        for place, (sample, loss) in enumerate(zip(batch.sample_ids.tolist(), losses, strict=True))
    ]
    everyone = [facts for part in ranks.gather(mine) for facts in part]
    everyone.sort(key=lambda facts: -math.inf if math.isnan(facts["loss"]) else -facts["loss"])
    outliers = _outliers([facts["loss"] for facts in everyone], usual_loss)
    worst = everyone[: max(1, min(outliers, WORST))]
    for facts in worst:
        facts["documents"] = [describe(span) for span in sampler.documents(facts["sample"])]
    found: dict[str, Any] = {"cause": _cause(outliers, len(everyone)), "sequences": worst}
    if non_finite:
        layers = ranks.gather(_first_non_finite(model, parts, losses, precision))
        found["layer"] = next((layer for layer in layers if layer), "none: it did not happen again")
    return found


@torch.no_grad()
def _loss(model: Decoder, one: Batch, precision: str) -> float:
    """Nats per target; 0 without targets."""
    device = next(model.parameters()).device
    with autocast(device, precision):
        total = float(causal_numerator(model, one.to(device)))
    return total / max(causal_normalizer(one), 1)


def _outliers(losses: list[float], usual: float | None) -> int:
    """How many of the losses (highest first) are too high for a sequence.

    How far the good ones lie below the usual loss tells how far above it is still good; where none does, all are bad.
    """
    bad = sum(not math.isfinite(x) for x in losses)
    finite = [x for x in losses if math.isfinite(x)]
    if bad or len(finite) < 3:
        return bad
    middle = statistics.median(finite) if usual is None else usual
    below = [middle - x for x in finite if x <= middle]
    spread = robust_deviation(below) if below else 0.0
    return sum(x > middle + _STANDS_OUT * max(spread, 0.05) for x in finite)


def _cause(outliers: int, sequences: int) -> Cause:
    if outliers == 0:
        return "unclear" if sequences < 3 else "weights"
    return "data" if outliers < sequences else "weights"


def _first_non_finite(model: Decoder, parts: list[Batch], losses: list[float], precision: str) -> str:
    """Where the first value that is not finite appears: weights, then the forward pass, then the backward pass."""
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f"{name} (weights)"
    device = next(model.parameters()).device
    for place in sorted(range(len(parts)), key=lambda i: math.isfinite(losses[i])):  # suspects first
        if found := _watch(model, parts[place].to(device), device, precision):
            return found
    return ""


def _watch(model: Decoder, one: Batch, device: torch.device, precision: str) -> str:
    found: list[str] = []

    def look(name: str, values: Any, direction: str) -> None:
        tensors = values if isinstance(values, tuple) else (values,)
        if any(isinstance(t, Tensor) and not bool(t.isfinite().all()) for t in tensors):
            found.append(f"{name} ({direction})")

    def on_forward(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        look(name, output, "forward")

    def on_backward(name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        look(name, (*inputs, *outputs), "backward")  # gradients that leave it and that come to it

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if any(True for _ in module.children()) or not name:
                continue
            forward = module.register_forward_hook(partial(on_forward, name))
            hooks.callback(forward.remove)
            if isinstance(module, (nn.Linear, nn.RMSNorm)):
                backward = module.register_full_backward_hook(partial(on_backward, name))
                hooks.callback(backward.remove)
        kept = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)  # a backward pass adds to what is there
        with autocast(device, precision):
            loss = causal_numerator(model, one)
        if not found:
            loss.backward()
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            parameter.grad = gradient
    return found[0] if found else ""


def event_text(verdict: str, found: dict[str, Any]) -> str:
    """One line for people."""
    names = [
        f"{d.get('path') or d['id'][:12]} ({d['source']})" for s in found["sequences"] for d in s["documents"]
    ]
    shown = ", ".join(dict.fromkeys(names[:4]))
    layer = f"; first non-finite: {found['layer']}" if "layer" in found else ""
    return f"{verdict}; cause: {found['cause']}{layer}; documents: {shown}"
