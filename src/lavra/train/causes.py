"""Causes of a bad training run: one function each, History -> finding, None, or what was not recorded. No torch.

A false alarm is worse than silence. Thresholds are the published ones where there are any; where it says "lavra's
own", they lie well outside of what healthy runs of 10 k to 5 M parameters showed (docs/lab-log.md).
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lavra import metrics as m
from lavra.metrics import number
from lavra.train.history import History, Point, layer_metric, mapping
from lavra.units import format_count

Severity = Literal["stopped the run", "harmful", "worth trying"]
SEVERITIES: tuple[Severity, ...] = ("stopped the run", "harmful", "worth trying")


@dataclass(frozen=True)
class Finding:
    """Something that went wrong or could go better.

    Attributes:
        kind: stable name of the cause, for programs.
        title: the cause in a few words.
        evidence: the numbers and steps that show it.
        advice: what to do.
        overrides: the same as settings of the recipe, e.g. `train.learning_rate=3e-4`.
        metrics: series that show it, as `History.series` reads them.
    """

    kind: str
    severity: Severity
    title: str
    evidence: str
    advice: str
    overrides: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotRecorded:
    """The records cannot tell."""

    why: str


Answer = Finding | NotRecorded | None
NO_LAYERS = NotRecorded("no statistics of the layers were recorded (train.layers_every)")
_MOST_LOGIT = 100.0  # Kimi K2 clips queries and keys there (Kimi Team 2025, arXiv:2507.20534)
_DIVERGING_LOGIT = 1e4  # beyond it every run of Wortsman et al. 2023 (arXiv:2309.14322) diverged
_MOST_ACTIVATION = 100.0  # RMS of the residual stream; healthy runs stayed below 5 (lavra's own)


# --- the optimizer ---


def learning_rate_too_high(h: History) -> Answer:
    """One strong sign or two weak ones (lavra's own): one alone has other explanations."""
    if not h.series(m.TRAIN_LOSS):
        return NotRecorded("no training losses were recorded")
    signs = [sign for look in _RATE_SIGNS if (sign := look(h))]
    if sum(sign.weight for sign in signs) < 2:
        return None
    ended = h.diverged and any(sign.metric == m.GRAD_NORM for sign in signs)
    return Finding(
        "learning_rate_too_high",
        "stopped the run" if ended else "harmful",
        "The learning rate is too high",
        f"with a learning rate of {h.peak:.2g}: " + "; ".join(sign.text for sign in signs),
        "lower the peak to a third; if that helps, once more",
        (lower_rate(h),),
        tuple(dict.fromkeys([m.TRAIN_LOSS, *(sign.metric for sign in signs), m.LEARNING_RATE])),
    )


@dataclass(frozen=True)
class _Sign:
    text: str
    metric: str
    weight: int = 1  # 2: strong


def _worse_than_guessing(h: History) -> _Sign | None:
    """A loss above that of equal probabilities for all tokens, which a fresh model starts at."""
    vocabulary = number(mapping(mapping(h.plan.get("decisions")).get("model")).get("vocab_size"))
    losses = h.series(m.TRAIN_LOSS)
    if not vocabulary or losses[0][0] != 1 or h.setting("train.init_from"):
        return None
    guessing, judged = math.log(vocabulary), {number(e.get("step")) for e in h.rejections}
    worse = [(s, v) for s, v in losses[1:] if v > guessing + 0.1 and s not in judged]  # 0.1: lavra's own
    if not worse:
        return None
    step, highest = max(worse, key=lambda point: point[1])
    text = f"at {_steps(len(worse))} the loss was above that of guessing, ln {vocabulary:.0f} = {guessing:.2f} ({highest:.2f} at step {step})"
    return _Sign(text, m.TRAIN_LOSS, 2 if len(worse) >= 3 else 1)


def _loss_rose(h: History) -> _Sign | None:
    """At full rate; half a nat that was not made up for is strong."""
    if _changes_on_purpose(h):
        return None
    risen = [r for r in h.rises if r.start > h.warmup and h.at_full_rate([(r.top, 0.0)])]
    if not risen:
        return None
    worst = max(risen, key=lambda r: r.height)
    text = f"the smoothed loss rose by {worst.height:.2f} nats from step {worst.start} to {worst.top}"
    lasting = worst.recovered is None and worst.height > 0.5
    return _Sign(text + (", and did not come back" if lasting else ""), m.TRAIN_LOSS, 2 if lasting else 1)


def _rejected_at_rate(h: History) -> _Sign | None:
    """Batches that were bad as a whole. Three may be; a run that ended on them is strong."""
    bad = [e for e in h.rejections if e.get("cause") == "weights" and e.get("kind") != "non_finite"]
    late = [e for e in bad if (h.rate_at(int(e["step"])) or 0.0) >= (h.peak or 0.0) / 2]
    if len(late) < 3:
        return None
    text = (
        f"{_steps(len(late))} were rejected with every sequence bad, the last at step {int(late[-1]['step'])}"
    )
    return _Sign(text, m.GRAD_NORM, 2 if h.diverged and late[-1] is h.rejections[-1] else 1)


def _large_updates(h: History) -> _Sign | None:
    """About 1e-3 of the weights a step is usual (Karpathy 2019); healthy small runs reached 0.02 (lavra's own).

    Not in the steps that a warm-up is for.
    """
    median = median_over_blocks(h, "update_ratio")
    large = [(s, v) for s, v in h.at_full_rate(median) if v > 0.05 and s > _enough_warmup(h)]
    if not large:
        return None
    step, ratio = max(large, key=lambda point: point[1])
    text = f"a step changed the blocks by {100 * ratio:.0f} % of their weights (step {step}; 0.1 % to 1 % is usual)"
    return _Sign(text, layer_metric(_middle_block(h), "update_ratio"), 2 if ratio > 0.2 else 1)


def _large_activations(h: History) -> _Sign | None:
    name, level = _largest_lately(h, "activation_rms")
    if level <= _MOST_ACTIVATION:
        return None
    return _Sign(f"activations of {name} grew to an RMS of {level:.3g}", layer_metric(name, "activation_rms"))


def _large_logits(h: History) -> _Sign | None:
    name, level = _largest_lately(h, "attention_logit")
    if level <= _MOST_LOGIT:
        return None
    return _Sign(f"attention logits of {name} grew to {level:.3g}", layer_metric(name, "attention_logit"))


_RATE_SIGNS = (
    _worse_than_guessing,
    _loss_rose,
    _rejected_at_rate,
    _large_updates,
    _large_activations,
    _large_logits,
)


def warmup_too_short(h: History) -> Answer:
    """Disturbed at the beginning, calm later; below 2 / (1 - beta2) steps (Ma & Yarats 2021, arXiv:1910.04209).

    Adam's first steps have the size of the learning rate whatever the gradient. Disturbed: a first step of more than
    10 % of the weights together with a gradient norm that surges to four times its start, or a smoothed loss that rose
    (both lavra's own).
    """
    norms, enough = h.series(m.GRAD_NORM), _enough_warmup(h)
    if not norms:
        return NotRecorded("no gradient norms were recorded")
    if h.warmup >= enough or isinstance(learning_rate_too_high(h), Finding):
        return None
    early = max(16, 2 * h.warmup)
    signs = []
    first = [v for s, v in median_over_blocks(h, "update_ratio") if s == 1]
    step, surge = max((p for p in norms if p[0] <= early), key=lambda p: p[1], default=norms[0])
    usual = statistics.median([v for s, v in norms if s <= 3 * early])
    if first and first[0] > 0.1 and surge > 4 * usual and surge > 4 * norms[0][1]:
        signs.append(
            f"the first step changed the blocks by {100 * first[0]:.0f} % of their weights, and the gradient norm "
            f"surged to {surge:.3g} at step {step} (then about {usual:.3g})"
        )
    risen = [] if _changes_on_purpose(h) else h.rises
    if risen and all(r.start <= early and r.recovered is not None for r in risen):
        signs.append(
            f"the smoothed loss rose by {risen[0].height:.2f} nats by step {risen[0].top}, and came back"
        )
    if not signs:
        return None
    return Finding(
        "warmup_too_short",
        "worth trying",
        "The warm-up is too short",
        f"warm-up of {_steps(h.warmup)}: " + "; ".join(signs),
        f"warm up over {enough} steps or more",
        (_longer_warmup(h, enough),),
        (m.GRAD_NORM, m.TRAIN_LOSS, m.LEARNING_RATE),
    )


def _enough_warmup(h: History) -> int:
    betas = h.setting("train.betas")
    beta2 = number(betas[1]) if isinstance(betas, (list, tuple)) and len(betas) == 2 else None
    return round(2 / (1 - min(0.95 if beta2 is None else beta2, 0.999)))


def _longer_warmup(h: History, enough: int) -> str:
    fraction = (
        max(enough / h.horizon, number(h.setting("train.warmup_fraction")) or 0.0) if h.horizon else 0.1
    )
    return f"train.warmup_fraction={min(0.3, fraction):.2g}"


# --- the layers ---


def attention_logit_growth(h: History) -> Answer:
    """Softmax close to one-hot: Dehghani et al. 2023 (arXiv:2302.05442), Wortsman et al. 2023, Kimi Team 2025."""
    if not h.blocks("attention_logit"):
        return NO_LAYERS
    name, level = _largest_lately(h, "attention_logit")
    if level <= _MOST_LOGIT:
        return None
    return Finding(
        "attention_logit_growth",
        "harmful" if level > _DIVERGING_LOGIT else "worth trying",
        "Attention logits have grown",
        f"the largest |q k| / sqrt(head width) in {name} went {_path(h, name, 'attention_logit')}; "
        f"large runs clip at {_MOST_LOGIT:.0f} and diverge beyond {_DIVERGING_LOGIT:.0f}",
        "lower the learning rate: the logits grow with it",
        (lower_rate(h),),
        (layer_metric(name, "attention_logit"), m.TRAIN_LOSS),
    )


def exploding_activations(h: History) -> Answer:
    """Residual stream of an RMS above 100, or a hundred times larger after the last block than after the first."""
    streams = h.blocks("activation_rms")
    if not streams:
        return NO_LAYERS
    name, level = _largest_lately(h, "activation_rms")
    names = list(streams)
    growth = _lately(streams[names[-1]]) / max(_lately(streams[names[0]]), 1e-30)
    if level <= _MOST_ACTIVATION and growth <= 100:
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


# --- number formats ---


def loss_scale_collapse(h: History) -> Answer:
    """fp16 with a scale below 128 of 65536, or halved more than once in 100 steps (lavra's own; it doubles after 1000)."""
    scales, halved = h.series(m.LOSS_SCALE), h.series(m.OVERFLOWS)
    if not scales:
        return None
    early = scales[len(scales) // 10][0]  # the search for the first scale that fits is over
    settled = [p for p in halved if p[0] >= early]
    often = settled[-1][1] - settled[0][1] if settled else 0.0
    steps = scales[-1][0] - early
    collapsed = scales[-1][1] < 128
    if not collapsed and not (often >= 5 and often > steps / 100):
        return None
    return Finding(
        "loss_scale_collapse",
        "harmful",
        "The fp16 loss scale collapses" if collapsed else "The fp16 loss scale overflows again and again",
        f"the scale is {scales[-1][1]:.4g} at step {scales[-1][0]}, after {scales[0][1]:.4g} at step {scales[0][0]}; "
        f"{often:.0f} overflows since step {early}, each computed twice",
        "bf16 has the range of fp32 and needs no scale; without hardware for it, fp32",
        ("train.precision=bf16",),
        (m.LOSS_SCALE, m.OVERFLOWS),
    )


def non_finite_values(h: History) -> Answer:
    """NaN or infinity that is not one batch's fault: with the layer where it appeared first."""
    events = [e for e in h.rejections if e["kind"] == "non_finite" and e.get("cause") != "data"]
    if not events:
        return None
    last = events[-1]
    layer = last.get("layer") or "a layer that was not recorded"
    ended = h.diverged and h.rejections[-1] is last
    low = h.setting("train.precision") in ("fp16", "fp8")
    return Finding(
        "non_finite_values",
        "stopped the run" if ended else "harmful",
        "Values that are not finite",
        f"{_steps(len(events))} gave NaN or infinity, the last at step {int(last['step'])}; it appeared first in {layer}",
        "use a number format of larger range" if low else "lower the learning rate; weights that are not finite came so "
        "from train.init_from or a damaged checkpoint" if "(weights)" in str(layer) else "lower the learning rate",
        ("train.precision=bf16",) if low else (lower_rate(h),),
        (m.GRAD_NORM, m.TRAIN_LOSS),
    )  # fmt: skip


# --- the data ---


def poisoned_data(h: History) -> Answer:
    """Steps that the guard rejected for some of their sequences, with the documents in them."""
    events = [e for e in h.rejections if e.get("cause") == "data"]
    if not events:
        return None
    names = [
        f"{d.get('path') or str(d.get('id', ''))[:12]} ({d.get('source', '')})"
        for e in events
        for s in _objects(e.get("sequences"))
        for d in _objects(s.get("documents"))
    ]
    shown = list(dict.fromkeys(names))
    more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
    taken = [e for e in events if e.get("act") == "warn"]
    ended = h.diverged and h.rejections[-1] is events[-1]
    return Finding(
        "poisoned_data",
        "stopped the run" if ended else "harmful" if taken else "worth trying",
        "Documents that disturb training",
        f"{_steps(len(events))} ({', '.join(str(int(e['step'])) for e in events[:5])}) were spoilt by a few of their "
        f"sequences; in them: {', '.join(shown[:5]) or 'documents that were not recorded'}{more}",
        "read these documents (events.jsonl has excerpts) and take the bad ones out of corpus.sources; until then "
        + ("leave such batches out" if taken or ended else "such batches stay left out, as they were"),
        ("train.guard.policy=skip",) if taken or ended else (),
        (m.TRAIN_LOSS, m.GRAD_NORM),
    )


def repeated_data(h: History) -> Answer:
    """More than four epochs: repeats teach little beyond (Muennighoff et al. 2023, arXiv:2305.16264)."""
    if not h.source_tokens:
        return NotRecorded("the sizes of the sources are not known (no tokens/ in the run)")
    epochs = epochs_by_source(h)
    many = {name: e for name, e in epochs.items() if e > 4}
    if not many:
        return None
    named = ", ".join(
        f"{name} {e:.1f} times ({format_count(h.source_tokens[name])} tokens)" for name, e in many.items()
    )
    return Finding(
        "repeated_data",
        "worth trying",
        "Text was read too often",
        f"up to step {h.last_step}: {named}; beyond four times a repeat teaches little",
        "add text; or stop after four times, and spend the rest on a larger model",
        _fewer_repeats(h, list(many)),
        (m.TRAIN_LOSS, m.VALIDATION_LOSS),
    )


def epochs_by_source(h: History) -> dict[str, float]:
    """How often each source was read so far."""
    sizes = {name: size for name, size in h.source_tokens.items() if size > 0}
    ledgers = [mapping(r.get("ledger")) for r in h.records if r.get("ledger")]
    if len(sizes) == 1 and not ledgers:
        tokens = [v for _, v in h.series("tokens")]
        return {name: (tokens[-1] if tokens else 0.0) / size for name, size in sizes.items()}
    ledger = ledgers[-1] if ledgers else {}
    return {name: (number(ledger.get(name)) or 0.0) / size for name, size in sizes.items()}


def _fewer_repeats(h: History, names: Sequence[str]) -> tuple[str, ...]:
    if h.setting("tokens.mixture"):
        given = mapping(h.setting("tokens.max_epochs"))
        return (f"tokens.max_epochs={json.dumps({**given, **dict.fromkeys(names, 4)})}",)
    return _budget(h, 4 * sum(h.source_tokens.values()))


def _budget(h: History, tokens: int) -> tuple[str, ...]:
    """A budget in tokens instead of the one that the recipe gives."""
    others = [f"budget.{kind}=null" for kind in ("time", "flops") if h.setting(f"budget.{kind}") is not None]
    return (*others, f"budget.tokens={tokens}")


def overfitting(h: History) -> Answer:
    """The validation loss rose twice in a row, 0.02 nats or more, while the training loss fell (lavra's own)."""
    validation, training = h.series(m.VALIDATION_LOSS), h.series(m.TRAIN_LOSS)
    if len(validation) < 4:
        return NotRecorded(f"{len(validation)} validation losses were recorded, too few to see them turn")
    step, best = min(validation, key=lambda p: p[1])
    after = [p for p in validation if p[0] > step]
    if len(after) < 2 or any(v < best + 0.02 for _, v in after[-2:]) or after[-1][1] < after[-2][1] - 0.02:
        return None
    width = max(5, len(training) // 20)
    before = statistics.median([v for s, v in training if s <= step][-width:])
    now = statistics.median([v for _, v in training][-width:])
    if now > before - 0.02:
        return None
    tokens = dict(h.series("tokens")).get(step)
    return Finding(
        "overfitting",
        "harmful",
        "The model learns its text by heart",
        f"the validation loss was lowest at step {step} ({best:.3f}) and is {after[-1][1]:.3f} at step {after[-1][0]}, "
        f"while the training loss fell from {before:.3f} to {now:.3f}",
        "add text, or stop where the validation loss was lowest",
        _budget(h, int(tokens)) if tokens else (),
        (m.VALIDATION_LOSS, m.TRAIN_LOSS),
    )


def data_bound(h: History) -> Answer:
    """More than a tenth of the time waiting for batches, median after the first ten records (lavra's own)."""
    waits = [v for _, v in h.series(m.DATA_WAIT)][10:]
    if len(waits) < 10:
        return NotRecorded("fewer than 20 steps with a waiting time")
    wait = statistics.median(waits)
    if wait <= 0.1:
        return None
    packed = h.setting("tokens.packing") in ("best_fit", "pad")
    return Finding(
        "data_bound",
        "worth trying",
        "Training waits for data",
        f"{100 * wait:.0f} % of the time of a step (median) went by waiting for its batch",
        "put the run directory on a local disk, and leave a core to the loader"
        + ("; rows of packing concat are read in one piece" if packed else ""),
        ("tokens.packing=concat",) if packed else (),
        (m.DATA_WAIT, m.TOKENS_PER_SECOND),
    )


# --- shared ---


def lower_rate(h: History) -> str:
    """A third of the peak."""
    return f"train.learning_rate={(h.peak or 1e-3) / 3:.2g}"


def median_over_blocks(h: History, value: str) -> list[Point]:
    """Median over the blocks at each step that was looked at."""
    by_step: dict[int, list[float]] = {}
    for points in h.blocks(value).values():
        for step, v in points:
            by_step.setdefault(step, []).append(v)
    return [(step, statistics.median(values)) for step, values in sorted(by_step.items())]


def _middle_block(h: History) -> str:
    names = list(h.blocks("update_ratio"))
    return names[len(names) // 2]


def _lately(points: Sequence[Point]) -> float:
    """Median of the last three; 0 of none."""
    return statistics.median([v for _, v in points][-3:]) if points else 0.0


def _largest_lately(h: History, value: str) -> tuple[str, float]:
    """The block with the largest recent value; ("", 0) where nothing was recorded."""
    found = [(_lately(points), name) for name, points in h.blocks(value).items()]
    level, name = max(found, key=lambda pair: pair[0], default=(0.0, ""))
    return name, level


def _path(h: History, name: str, value: str) -> str:
    points = h.series(layer_metric(name, value))
    return f"from {points[0][1]:.3g} at step {points[0][0]} to {points[-1][1]:.3g} at step {points[-1][0]}"


def _changes_on_purpose(h: History) -> bool:
    """Whether the recipe itself makes the loss jump: other data, other lengths, rising learning rates."""
    return bool(
        h.setting("tokens.curriculum")
        or h.setting("tokens.seq_len_ramp")
        or h.setting("tokens.max_epochs")
        or h.setting("train.schedule") == "cyclic"
    )


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class Cause:
    """What is looked for, in words, and how."""

    name: str
    look: Callable[[History], Answer]


CAUSES: tuple[Cause, ...] = (
    Cause("a learning rate that is too high", learning_rate_too_high),
    Cause("a warm-up that is too short", warmup_too_short),
    Cause("values that are not finite", non_finite_values),
    Cause("growing attention logits", attention_logit_growth),
    Cause("exploding activations", exploding_activations),
    Cause("exploding gradients", exploding_gradients),
    Cause("dead blocks", dead_blocks),
    Cause("a collapsing loss scale", loss_scale_collapse),
    Cause("documents that disturb training", poisoned_data),
    Cause("text read too often", repeated_data),
    Cause("overfitting", overfitting),
    Cause("waiting for data", data_bound),
)
