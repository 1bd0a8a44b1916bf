"""What went wrong, or could go better, in a training run: its records in, findings out. Pure, no torch.

    diagnose(records, events, plan, recipe) -> Diagnosis

Each cause is a function of the files beside this one, with its thresholds and their source. What the records cannot tell is said, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lavra.train.diagnosis import data, formats, layers, rate
from lavra.train.diagnosis.findings import SEVERITIES, Answer, Finding, NotRecorded
from lavra.train.diagnosis.history import History


@dataclass(frozen=True)
class Cause:
    """What is looked for, in words, and how."""

    name: str
    look: Callable[[History], Answer]


CAUSES: tuple[Cause, ...] = (
    Cause("a learning rate that is too high", rate.learning_rate_too_high),
    Cause("a warm-up that is too short", rate.warmup_too_short),
    Cause("values that are not finite", formats.non_finite_values),
    Cause("growing attention logits", layers.attention_logit_growth),
    Cause("exploding activations", layers.exploding_activations),
    Cause("exploding gradients", layers.exploding_gradients),
    Cause("dead blocks", layers.dead_blocks),
    Cause("a collapsing loss scale", formats.loss_scale_collapse),
    Cause("documents that disturb training", data.poisoned_data),
    Cause("text read too often", data.repeated_data),
    Cause("overfitting", data.overfitting),
    Cause("waiting for data", data.data_bound),
)


@dataclass(frozen=True)
class Diagnosis:
    """Result of all causes.

    Attributes:
        findings: most severe first.
        clear: causes that were looked for and not found.
        unknown: causes that could not be judged, and why.
    """

    findings: tuple[Finding, ...]
    clear: tuple[str, ...]
    unknown: tuple[tuple[str, str], ...]


def diagnose(
    records: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]] = (),
    plan: Mapping[str, Any] | None = None,
    recipe: Mapping[str, Any] | None = None,
    *,
    source_tokens: Mapping[str, int] | None = None,
    diverged: bool = False,
) -> Diagnosis:
    """Look for every cause in a run that ended or is still training.

    Args:
        records: of metrics.jsonl.
        events: of events.jsonl.
        plan: content of plan.json.
        recipe: content of recipe.resolved.yaml.
        source_tokens: training tokens of each source, once through.
        diverged: the guard ended the run.
    """
    return judge(History(records, events, plan or {}, recipe or {}, source_tokens or {}, diverged))


def judge(history: History) -> Diagnosis:
    """The same for a history."""
    answers = [(cause.name, cause.look(history)) for cause in CAUSES]
    findings = [answer for _, answer in answers if isinstance(answer, Finding)]
    return Diagnosis(
        tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))),
        tuple(name for name, answer in answers if answer is None),
        tuple((name, answer.why) for name, answer in answers if isinstance(answer, NotRecorded)),
    )
