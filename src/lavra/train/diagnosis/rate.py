"""Learning rate and warm-up: one function each, History -> finding, None, or what was not recorded."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from lavra import metrics as m
from lavra.metrics import number
from lavra.train.diagnosis.findings import (
    MOST_ACTIVATION,
    MOST_LOGIT,
    Answer,
    Finding,
    NotRecorded,
    largest_lately,
    lower_rate,
    median_over_blocks,
    steps,
)
from lavra.train.diagnosis.history import History, layer_metric, mapping


def learning_rate_too_high(h: History) -> Answer:
    """One strong sign or two weak ones (lavra's own): one alone has other explanations."""
    if not h.series(m.TRAIN_LOSS):
        return NotRecorded("no training losses were recorded")
    signs = [sign for look in _RATE_SIGNS if (sign := look(h))]
    if sum(sign.weight for sign in signs) < 2:
        return None
    ended = h.diverged and any(sign.metric == m.GRAD_NORM and sign.weight == 2 for sign in signs)
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
    text = f"at {steps(len(worse))} the loss was above that of guessing, ln {vocabulary:.0f} = {guessing:.2f} ({highest:.2f} at step {step})"
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
        f"{steps(len(late))} were rejected with every sequence bad, the last at step {int(late[-1]['step'])}"
    )
    return _Sign(text, m.GRAD_NORM, 2 if h.diverged and late[-1] is h.rejections[-1] else 1)


def _large_updates(h: History) -> _Sign | None:
    """About 1e-3 of the weights a step is usual (notes of Stanford CS231n); healthy small runs reached 0.02 (lavra's own).

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
    name, level = largest_lately(h, "activation_rms")
    if level <= MOST_ACTIVATION:
        return None
    return _Sign(f"activations of {name} grew to an RMS of {level:.3g}", layer_metric(name, "activation_rms"))


def _large_logits(h: History) -> _Sign | None:
    name, level = largest_lately(h, "attention_logit")
    if level <= MOST_LOGIT:
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
        f"warm-up of {steps(h.warmup)}: " + "; ".join(signs),
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


def _changes_on_purpose(h: History) -> bool:
    """Whether the recipe itself makes the loss jump: other data, other lengths, rising learning rates."""
    return bool(
        h.setting("tokens.curriculum")
        or h.setting("tokens.seq_len_ramp")
        or h.setting("tokens.max_epochs")
        or h.setting("train.schedule") == "cyclic"
    )


def _middle_block(h: History) -> str:
    names = list(h.blocks("update_ratio"))
    return names[len(names) // 2]
