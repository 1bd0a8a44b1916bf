"""What is done with a step that the guard rejects: warn, skip, rewind or stop, each recorded with its documents.

A batch is left out by its sample numbers; the samples that follow take its place, in every process and after every
resume alike.
"""

from __future__ import annotations

from typing import Any

from lavra.batch import Batch
from lavra.checkpoint.store import checkpoint_step, complete_checkpoints, remove_after
from lavra.tokens.ramps import StepSamples, first_left, leave_out
from lavra.tokens.sampler import Sampler
from lavra.train.blame import Describe, blame, event_text
from lavra.train.guard import Verdict
from lavra.train.session import Session


def recover(
    session: Session,
    sampler: Sampler,
    verdict: Verdict,
    batch: Batch,
    shape: StepSamples,
    describe: Describe,
) -> bool:
    """Record the verdict and act on it; True: take the step all the same.

    Raises:
        DivergedError: the policy is to stop, patience is over, or there is nothing to rewind to.
    """
    settings, guard = session.settings, session.guard
    found = blame(
        session.model,
        batch,
        sampler,
        micro_batch_size=session.state.micro_batch_size,
        seq_len=shape.seq_len,
        precision=settings.precision,
        non_finite=verdict.kind == "non_finite",
        usual_loss=guard.usual_loss(),
        describe=describe,
        ranks=session.ranks,
    )
    policy = settings.guard.policy
    act = "skip" if policy == "warn" and verdict.kind == "non_finite" else policy
    first = first_left(shape, session.state.skipped)
    text = event_text(str(verdict), found)
    session.event(verdict.kind, text, act=act, value=verdict.value, limit=verdict.limit, first_sample=first,
                  samples=shape.count, **found)  # fmt: skip
    if act == "warn":
        return True
    session.optimizer.zero_grad(set_to_none=True)
    if guard.reject() or act == "stop":
        step = session.state.step
        session.give_up(
            f"{text} at step {step + 1}; weights are unchanged since step {step}",
            _advice(found, guard.rejected),
        )
    if act == "rewind":
        _rewind(session, shape)
    else:
        session.state.skipped.append([first, shape.count])
    return False


def _rewind(session: Session, shape: StepSamples) -> None:
    """Back to the newest checkpoint before the batches that are left out; the decision is saved with it."""
    state, settings = session.state, session.settings
    at, rejected = state.step, session.guard.rejected
    rewinds = state.rewinds + 1 if at <= state.rewound_from else 1
    farthest = max(at, state.rewound_from)
    if rewinds > settings.guard.patience:
        session.give_up(
            f"{rewinds - 1} rewinds did not get past step {farthest + 1}",
            "it is not the data: lower train.learning_rate or lengthen train.warmup_fraction",
        )
    oldest = max(0, at - settings.guard.rewind_steps + 1)
    session.saver.wait()
    session.ranks.gather(None)  # nobody looks before rank 0 has written
    complete = complete_checkpoints(session.folder)
    before = [c for c in complete if checkpoint_step(c) <= oldest] or complete[:1]
    if not before:
        session.give_up(
            f"no checkpoint to rewind to at step {at + 1}",
            "lower train.learning_rate or train.checkpoint_every",
        )
    start = max(oldest, checkpoint_step(before[-1]))
    first = first_left(settings.steps.at(start), state.skipped)
    count = first_left(shape, state.skipped) + shape.count - first
    skipped = leave_out(state.skipped, first, count)
    session.load(before[-1])
    state.skipped, session.guard.rejected = skipped, rejected
    state.rewinds, state.rewound_from = rewinds, farthest
    session.log.reopen_after(state.step)
    if session.ranks.rank == 0:
        remove_after(session.folder, state.step)  # a resume must find the decision, not what came before it
    session.event(
        "rewound", f"from step {at} to step {state.step}; samples {first} to {first + count - 1} left out"
    )
    session.save()


def _advice(found: dict[str, Any], rejected: int) -> str:
    if found["cause"] == "data":
        return "look at these documents; train.guard.policy=skip leaves such batches out"
    again = f"{rejected} steps in a row were rejected, so it is not one batch: " if rejected > 1 else ""
    return (
        again + "lower train.learning_rate, lengthen train.warmup_fraction, or set train.guard.policy=rewind"
    )
