"""Number formats that do not suffice: one function each, History -> finding, None, or what was not recorded."""

from __future__ import annotations

from lavra import metrics as m
from lavra.train.diagnosis.findings import Answer, Finding, lower_rate, steps
from lavra.train.diagnosis.history import History


def loss_scale_collapse(h: History) -> Answer:
    """fp16 with a scale below 128 of 65536, or halved more than once in 100 steps (lavra's own; it doubles after 1000)."""
    scales, halved = h.series(m.LOSS_SCALE), h.series(m.OVERFLOWS)
    if not scales:
        return None
    early = scales[len(scales) // 10][0]  # the search for the first scale that fits is over
    settled = [p for p in halved if p[0] >= early]
    often = settled[-1][1] - settled[0][1] if settled else 0.0
    since = scales[-1][0] - early
    collapsed = scales[-1][1] < 128
    if not collapsed and not (often >= 5 and often > since / 100):
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
        f"{steps(len(events))} gave NaN or infinity, the last at step {int(last['step'])}; it appeared first in {layer}",
        "use a number format of larger range" if low else "lower the learning rate; weights that are not finite came so "
        "from train.init_from or a damaged checkpoint" if "(weights)" in str(layer) else "lower the learning rate",
        ("train.precision=bf16",) if low else (lower_rate(h),),
        (m.GRAD_NORM, m.TRAIN_LOSS),
    )  # fmt: skip
