"""What a training in a run directory is watched with: events, validation and samples, trackers, a profile, progress."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lavra import artifact, console, metrics
from lavra.pipeline import Run

if TYPE_CHECKING:
    from lavra.tokenizer.bpe import Tokenizer
    from lavra.tokens.sampler import DocumentSpan, Sampler
    from lavra.tokens.windows import Windows
    from lavra.train.horizon import Horizon
    from lavra.train.state import Callback, StepFacts
    from lavra.train.trackers import Trackers

EXCERPT_TOKENS = 48


class EventLog:
    """events.jsonl, and a line for people; an event that a resumed run meets again is written once."""

    def __init__(self, path: Path) -> None:
        self._seen = {self._key(e) for e in metrics.read_jsonl(path)}
        self._writer = metrics.JsonlWriter(path)

    @staticmethod
    def _key(event: dict[str, Any]) -> tuple[Any, ...]:
        return event["step"], event["kind"], event.get("first_sample"), event["text"]

    def __call__(self, event: dict[str, Any]) -> None:
        """Record `event` (`step`, `kind`, `text` and facts)."""
        if self._key(event) not in self._seen:
            self._seen.add(self._key(event))
            self._writer.write(event)
        console.say(f"  step {event['step']}: {event['kind']}: {event['text']}")

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def describer(run: Run, sampler: Sampler, tokenizer: Tokenizer) -> Callable[[DocumentSpan], dict[str, Any]]:
    """A document span -> id, source, path, place and excerpt, for events."""
    from lavra.corpus.store import find_document
    from lavra.tokens.importing import Origins

    store, origins = sampler.windows.store, Origins(run.folder("tokens"))

    def describe(span: DocumentSpan) -> dict[str, Any]:
        stop = min(span.tokens + EXCERPT_TOKENS, span.tokens + span.stop - span.start)
        if origin := origins.find(span.part, span.id):
            place = {"path": origin, "url": ""}
        else:
            place = find_document(run.artifacts["corpus"].path, "train", span.part, span.id)
        return {
            "id": span.id,
            "source": span.source,
            "path": place["path"],
            "url": place["url"],
            "tokens": [span.start, span.stop],
            "excerpt": tokenizer.decode(store.read(span.tokens, stop).tolist()),
        }

    return describe


def validator(run: Run, windows: Windows, tokenizer: Tokenizer, horizon: Horizon) -> Callback:
    """Validation loss and text samples at a few moments of the run, the last step included."""
    import numpy as np

    from lavra.generate.decode import generate_text
    from lavra.generate.sampling import Sampling
    from lavra.train.step import validation_loss

    config, decisions = run.recipe.train, run.plan["decisions"]
    count = min(windows.count, max(1, config.validation_tokens // decisions["seq_len"]))
    chosen = np.linspace(0, windows.count - 1, count).astype(np.int64)
    batches = windows.batch(chosen, chosen).split(decisions["micro_batch_size"])
    bytes_per_token = windows.store.n_bytes / windows.store.n_tokens
    interval = (horizon.seconds or 0) / config.validations
    sampling = Sampling(temperature=0.8, top_p=0.95, seed=run.recipe.seed)
    last = {"time": time.monotonic()}

    def due(facts: StepFacts) -> bool:
        if facts.last or facts.step == 1:
            return True
        if horizon.seconds is not None:
            return time.monotonic() - last["time"] >= interval
        return facts.step % max(1, horizon.steps // config.validations) == 0

    def callback(facts: StepFacts) -> None:
        if not due(facts):
            return
        last["time"] = time.monotonic()
        with facts.ema.applied() if facts.ema is not None else contextlib.nullcontext():
            loss = validation_loss(facts.model, batches, precision=decisions["precision"])
            pieces = generate_text(
                facts.model, tokenizer, "", max_tokens=config.sample_tokens, sampling=sampling
            )
            sample = "".join(pieces) if config.sample_tokens else ""
        facts.metrics[metrics.VALIDATION_LOSS] = loss
        facts.metrics[metrics.VALIDATION_BPB] = loss / math.log(2) / bytes_per_token
        facts.sample = sample
        if config.sample_tokens:
            text = f"step {facts.step}, validation loss {loss:.3f}\n\n{sample}\n"
            artifact.write_bytes(run.dir / f"samples/step-{facts.step:08d}.md", text.encode())

    return callback


@contextlib.contextmanager
def profiler(run: Run, events: EventLog) -> Iterator[list[Callback]]:
    """The profiler of the recipe's steps on the first process, in a list; else an empty one."""
    from lavra.parallel.ranks import Ranks
    from lavra.train.config import profile_steps
    from lavra.train.profiling import StepProfiler

    steps = profile_steps(run.recipe.train.profile)
    if not steps or Ranks.current().rank > 0:
        yield []
        return
    with StepProfiler(steps, run.dir / "profile", events) as profiler:
        yield [profiler]


def trackers(run: Run, events: EventLog, fingerprint: str) -> Trackers:
    """The recipe's trackers; only the first process has any.

    Args:
        fingerprint: of what is trained.
    """
    from lavra.parallel.ranks import Ranks
    from lavra.train.trackers import Trackers, sinks

    config = run.recipe.train
    opened = sinks(
        config.trackers if Ranks.current().rank == 0 else (),
        run.dir,
        fingerprint=fingerprint,
        settings={"recipe": run.recipe.model_dump(mode="json"), "decisions": run.plan["decisions"]},
    )
    return Trackers(opened, log_every=config.log_every, on_event=events)


class Bar:
    """Progress of training: by steps, or by time while the horizon is open."""

    def __init__(self, horizon: Horizon) -> None:
        self.horizon = horizon
        self.context = console.progress("  training", horizon.seconds or horizon.steps)
        self.done = 0.0

    def __enter__(self) -> Bar:
        self.bar = self.context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)

    def __call__(self, facts: StepFacts) -> None:
        """A step was taken."""
        m = facts.metrics
        now = m["time"] if self.horizon.seconds is not None else float(facts.step)
        loss = f"step {facts.step} loss {m[metrics.TRAIN_LOSS]:.3f}"
        if metrics.VALIDATION_LOSS in m:
            loss += f" val {m[metrics.VALIDATION_LOSS]:.3f} ({m[metrics.VALIDATION_BPB]:.2f} bits/byte)"
        speed = f"lr {m[metrics.LEARNING_RATE]:.1e} {m[metrics.TOKENS_PER_SECOND]:,.0f} tok/s mfu {m.get(metrics.MFU, 0):.0%}"
        self.bar.advance(now - self.done, f"{loss} {speed}")
        self.done = now
