"""Layers that explode, die or attend to one key: one function each, History -> finding, None, or what was not recorded."""

from __future__ import annotations

import statistics

from lavra import metrics as m
from lavra.train.diagnosis.findings import (
    DIVERGING_LOGIT,
    MOST_ACTIVATION,
    MOST_LOGIT,
    NO_LAYERS,
    Answer,
    Finding,
    NotRecorded,
    largest_lately,
    lately,
    lower_rate,
)
from lavra.train.diagnosis.history import History, layer_metric


def attention_logit_growth(h: History) -> Answer:
    """Softmax close to one-hot: Dehghani et al. 2023 (arXiv:2302.05442), Wortsman et al. 2023, Kimi Team 2025."""
    if not h.blocks("attention_logit"):
        return NO_LAYERS
    name, level = largest_lately(h, "attention_logit")
    if level <= MOST_LOGIT:
        return None
    return Finding(
        "attention_logit_growth",
        "harmful" if level > DIVERGING_LOGIT else "worth trying",
        "Attention logits have grown",
        f"the largest |q k| / sqrt(head width) in {name} went {_path(h, name, 'attention_logit')}; "
        f"some large runs clip at {MOST_LOGIT:.0f}, and about {DIVERGING_LOGIT:.0f} runs have diverged",
        "lower the learning rate: the logits grow with it",
        (lower_rate(h),),
        (layer_metric(name, "attention_logit"), m.TRAIN_LOSS),
    )


def exploding_activations(h: History) -> Answer:
    """Residual stream of an RMS above 100, or a hundred times larger after the last block than after the first."""
    streams = h.blocks("activation_rms")
    if not streams:
        return NO_LAYERS
    name, level = largest_lately(h, "activation_rms")
    names = list(streams)
    growth = lately(streams[names[-1]]) / max(lately(streams[names[0]]), 1e-30)
    if level <= MOST_ACTIVATION and growth <= 100:
        return None
    deep = f"; {growth:.3g} times as large after {names[-1]} as after {names[0]}" if growth > 100 else ""
    return Finding(
        "exploding_activations",
        "harmful",
        "Activations explode",
        f"the RMS of the residual stream after {name} went {_path(h, name, 'activation_rms')}{deep}",
        "lower the learning rate; what the embedding says is lost beside such values",
        (lower_rate(h),),
        (layer_metric(name, "activation_rms"), layer_metric(names[0], "activation_rms")),
    )


def exploding_gradients(h: History) -> Answer:
    """Gradient norms of the last tenth 30 times those after the warm-up (lavra's own; healthy runs: up to 7)."""
    norms = [(s, v) for s, v in h.series(m.GRAD_NORM) if s > h.warmup]
    tenth = len(norms) // 10
    if tenth < 5:
        return NotRecorded("fewer than 50 steps with a gradient norm after the warm-up")
    before, now = (statistics.median(v for _, v in part) for part in (norms[:tenth], norms[-tenth:]))
    if now <= 30 * before:
        return None
    return Finding(
        "exploding_gradients",
        "harmful",
        "Gradients explode",
        f"the median gradient norm went from {before:.3g} after the warm-up to {now:.3g} up to step {norms[-1][0]}",
        "lower the learning rate",
        (lower_rate(h),),
        (m.GRAD_NORM, m.TRAIN_LOSS),
    )


def dead_blocks(h: History) -> Answer:
    """A block that adds less than 0.1 % to the stream, or whose gradients are 1000 times smaller than the median block's.

    Both in the last two observations (lavra's own; healthy blocks: 3 % and more, a third and more).
    """
    added, gradients = h.blocks("contribution"), h.blocks("grad_norm")
    if max(map(len, [*added.values(), *gradients.values()]), default=0) < 2:
        return NO_LAYERS if not added and not gradients else NotRecorded("layers were looked at only once")
    found = []
    for name in dict.fromkeys([*added, *gradients]):
        last = added.get(name, [])[-2:]
        if len(last) == 2 and all(v < 1e-3 for _, v in last):
            found.append((name, "contribution", f"adds {last[-1][1]:.1g} of the stream"))
            continue
        last = gradients.get(name, [])[-2:]
        usual = [statistics.median(dict(p).get(s, 0.0) for p in gradients.values()) for s, _ in last]
        if len(last) == 2 and all(v < 1e-3 * u for (_, v), u in zip(last, usual, strict=True)):
            found.append(
                (
                    name,
                    "grad_norm",
                    f"has a gradient norm of {last[-1][1]:.1g}, the median block {usual[-1]:.2g}",
                )
            )
    if not found:
        return None
    name, value, _ = found[0]
    step = h.series(layer_metric(name, value))[-1][0]
    return Finding(
        "dead_blocks",
        "harmful",
        "A block is dead" if len(found) == 1 else f"{len(found)} blocks are dead",
        f"at step {step}: " + "; ".join(f"{name} {text}" for name, _, text in found),
        "a block that died in training wants a lower learning rate; one that was dead from the start came so from "
        "its weights: look at train.init_from",
        (lower_rate(h),),
        tuple(layer_metric(name, value) for name, value, _ in found[:4]),
    )


def _path(h: History, name: str, value: str) -> str:
    points = h.series(layer_metric(name, value))
    return f"from {points[0][1]:.3g} at step {points[0][0]} to {points[-1][1]:.3g} at step {points[-1][0]}"
