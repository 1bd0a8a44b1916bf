"""A recipe that changed while its model is half trained: what each change means for the rest of the training.

The plan's decisions were frozen when training began. From the newest checkpoint on, a change

    takes effect            learning rate, guard, clipping, a longer budget ...
    is ignored              the moment that it decides has passed (a warm-up that is over)
    breaks the data order   seed, packing, mixture, batch: samples would be read twice or never; refused unless forced
    needs a new start       another model, tokenizer or text; refused

What took effect is kept in plan.json under `changes`, so the fingerprint of the result tells its whole history.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lavra import artifact
from lavra.errors import PreflightError
from lavra.schema import flatten

if TYPE_CHECKING:
    from lavra.pipeline import Run

Effect = Literal["takes effect", "is ignored", "breaks the data order", "needs a new start"]

# By recipe path or the beginning of one; the longest that fits counts.
_EFFECTS: dict[str, Effect] = {
    "": "takes effect",
    "seed": "breaks the data order",
    "corpus": "needs a new start",
    "corpus.workers": "takes effect",
    "tokenizer": "needs a new start",
    "tokens": "breaks the data order",
    "tokens.seq_len": "needs a new start",
    "model": "needs a new start",
    "train.batch_tokens": "breaks the data order",
    "train.batch_ramp": "breaks the data order",
    "train.optimizer": "needs a new start",
    "train.init_from": "needs a new start",
}

_WHOLE = ("tokens.mixture", "tokens.max_epochs")  # settings that are told in one line

# Files behind the settings, by name in the plan's inputs.
_CONTENTS: dict[str, Effect] = {
    "sources": "needs a new start",
    "token_sources": "breaks the data order",
    "tokenizer": "needs a new start",
    "init_from": "needs a new start",
}

# Settings that only watch: they never were part of the plan.
WATCHING = {
    "train": {"checkpoint_every", "keep_every", "log_every", "layers_every", "validations", "validation_tokens",
              "sample_tokens", "trackers", "profile"},
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """A setting that differs from the one that training began with.

    Attributes:
        path: `train.learning_rate` ...
        effect: what it means from here on.
        why: of an effect that depends on how far training is.
    """

    path: str
    old: Any
    new: Any
    effect: Effect
    why: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.old} -> {self.new} {self.effect}" + (f" ({self.why})" if self.why else "")


def find_changes(
    old: Mapping[str, Any], new: Mapping[str, Any], plan: Mapping[str, Any], step: int
) -> list[Change]:
    """What differs between two recipes, and what that means after `step` steps of `plan`."""
    before, after = flatten(old, whole=_WHOLE), flatten(new, whole=_WHOLE)
    paths = [p for p in {**before, **after} if before.get(p) != after.get(p)]
    return [Change(p, before.get(p), after.get(p), *_effect(p, after.get(p), plan, step)) for p in paths]


def _effect(path: str, value: Any, plan: Mapping[str, Any], step: int) -> tuple[Effect, str]:
    if path == "train.optimizer" and value in ("auto", plan["decisions"]["optimizer"]):
        return "is ignored", "the plan has chosen"
    horizon = plan["horizon"]
    by_time_decided = plan["budget"]["kind"] == "time" and horizon["decided"]
    if path == "train.warmup_fraction" and step >= plan["decisions"]["warmup_steps"]:
        return "is ignored", "the warm-up is over"
    if by_time_decided and (path == "train.decay_fraction" or path.startswith("budget.")):
        return "is ignored", "the decay has begun and fixed the last step"
    parts = path.split(".")
    return next(_EFFECTS[k] for n in range(len(parts), -1, -1) if (k := ".".join(parts[:n])) in _EFFECTS), ""


def training_step(run: Run) -> int:
    """Steps of the newest checkpoint of a training that has not ended; 0: none, or it has."""
    from lavra.checkpoint.store import checkpoint_step, latest_checkpoint

    folder = run.folder("pretrain")
    if not (folder / artifact.IN_PROGRESS).exists() or (folder / artifact.COMPLETE).exists():
        return 0
    checkpoint = latest_checkpoint(folder)
    return checkpoint_step(checkpoint) if checkpoint is not None else 0


def amend_plan(run: Run, inputs: Mapping[str, Any], step: int) -> list[Change]:
    """Take the recipe's changes into `run.plan`, whose decisions stay otherwise as they were.

    Args:
        inputs: what the plan would be made from now.
        step: steps trained so far.

    Raises:
        PreflightError: a change needs a new start, or breaks the data order and `run.force` is not set.
    """
    plan = run.plan
    changes = find_changes(plan["inputs"]["recipe"], inputs["recipe"], plan, step)
    for name, effect in _CONTENTS.items():
        if plan["inputs"][name] != inputs[name]:
            changes.append(Change(name, "as they were", "other content", effect))
    _refuse(run, changes, step)
    effective = {c.path: [c.old, c.new] for c in changes if c.effect != "is ignored"}
    _decide_again(run, effective, step)
    if effective:
        marker = artifact.read_json(run.folder("pretrain") / artifact.IN_PROGRESS)
        record = {"step": step, "settings": effective, "from": marker["fingerprint"]}
        plan["changes"] = [*plan.get("changes", []), record]
    plan |= {"inputs": dict(inputs), "fingerprint": artifact.fingerprint(inputs)}
    return changes


def _refuse(run: Run, changes: list[Change], step: int) -> None:
    fatal = [c for c in changes if c.effect == "needs a new start"]
    order = [c for c in changes if c.effect == "breaks the data order"]
    if not fatal and (run.force or not order):
        return
    told = "\n  ".join(str(c) for c in fatal + order)
    anew = "`lavra run RECIPE --from plan` trains anew and keeps the old checkpoints aside"
    hint = f"{anew}; train.init_from={run.dir} in another run directory goes on from these weights"
    if not fatal:
        hint = f"--force goes on from step {step} all the same; {anew}"
    raise PreflightError(f"settings changed after {step} steps of training:\n  {told}", hint=hint)


def _decide_again(run: Run, effective: Mapping[str, Any], step: int) -> None:
    """Decisions that follow from settings that took effect."""
    from lavra.plan.solve import peak_learning_rate, share_of_steps

    train, plan = run.recipe.train, run.plan
    decisions = plan["decisions"]
    if "train.learning_rate" in effective:
        decisions["learning_rate"] = peak_learning_rate(
            train.learning_rate, decisions["model"]["d_model"], decisions["optimizer"]
        )
    for name in ("precision", "compile"):
        if f"train.{name}" in effective and getattr(train, name) != "auto":
            decisions[name] = getattr(train, name)
    if "evaluate.max_bytes" in effective and run.recipe.evaluate.max_bytes != "auto":
        decisions["evaluate_max_bytes"] = run.recipe.evaluate.max_bytes
    if "train.batch_tokens" in effective and train.batch_tokens != "auto":
        decisions["batch_size"] = max(1, round(train.batch_tokens / decisions["seq_len"]))
        decisions["batch_tokens"] = decisions["batch_size"] * decisions["seq_len"]
    if "train.micro_batch_size" in effective and train.micro_batch_size != "auto":
        decisions["micro_batch_size"] = train.micro_batch_size
    decisions["micro_batch_size"] = min(decisions["micro_batch_size"], decisions["batch_size"])
    decisions["gradient_accumulation"] = math.ceil(decisions["batch_size"] / decisions["micro_batch_size"])
    if any(path.startswith("budget.") for path in effective):
        _move_horizon(run, effective, step)
    if "train.warmup_fraction" in effective:
        decisions["warmup_steps"] = share_of_steps(train.warmup_fraction, plan["horizon"]["steps"])
    if (horizon := plan["horizon"])["decided"] and plan["budget"]["kind"] != "time":
        horizon["decay"] = share_of_steps(train.decay_fraction, horizon["steps"])


def _move_horizon(run: Run, effective: Mapping[str, Any], step: int) -> None:
    """Another budget: another last step, or for a time budget other seconds."""
    from lavra.plan.solve import horizon_of

    budget, plan = run.recipe.budget, run.plan
    decisions, horizon = plan["decisions"], plan["horizon"]
    if budget.time is not None:
        old = effective["budget.time"][0]
        if old is None:
            raise PreflightError(
                "a budget in tokens or FLOPs cannot become one in time while training",
                where="budget",
                hint="give more or fewer tokens instead",
            )
        if horizon["seconds"] is not None:
            horizon["seconds"] = max(5.0, horizon["seconds"] + budget.time - old)
        plan["budget"] = {"kind": "time", "value": budget.time}
        return
    tokens = budget.tokens
    if tokens is None:
        assert budget.flops is not None
        tokens = int(budget.flops * horizon["tokens"] / plan["predictions"]["flops"])
    steps = math.ceil(tokens / decisions["batch_tokens"])
    if steps <= step:
        raise PreflightError(
            f"a budget of {tokens} tokens ends at step {steps}; training is past step {step}",
            where="budget",
            hint="a larger budget, or keep the old one",
        )
    kind = "tokens" if budget.tokens is not None else "flops"
    plan["budget"] = {"kind": kind, "value": float(getattr(budget, kind))}
    plan["horizon"] = horizon_of(steps, decisions["batch_tokens"], run.recipe.train.decay_fraction)
