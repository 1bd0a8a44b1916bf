"""Data that is bad, too little or too slow: one function each, History -> finding, None, or what was not recorded."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lavra import metrics as m
from lavra.metrics import number
from lavra.train.diagnosis.findings import Answer, Finding, NotRecorded, steps
from lavra.train.diagnosis.history import History, mapping
from lavra.units import format_count


def poisoned_data(h: History) -> Answer:
    """Steps that the guard rejected for some of their sequences, with the documents in them.

    A gradient that spikes while the loss does not is nothing unusual: a healthy run of 1M parameters had two in 293
    steps, one of them with cause `data`. Such steps count from three on, and where they are more than one in a hundred (lavra's own).
    """
    events = [e for e in h.rejections if e.get("cause") == "data"]
    spikes = [e for e in events if e["kind"] == "grad_spike" and e.get("act") != "stop"]
    if len(spikes) < 3 or len(spikes) <= h.last_step / 100:
        events = [e for e in events if e not in spikes]
    if not events:
        return None
    names = [
        f"{d.get('path') or ''} {str(d.get('id', ''))[:12]} ({d.get('source', '')})".strip()
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
        f"{steps(len(events))} ({', '.join(str(int(e['step'])) for e in events[:5])}) were spoilt by a few of their "
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


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
