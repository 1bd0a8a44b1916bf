"""Oracles: the trace file itself, read as JSON; the run without a profiler, bit for bit."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from lavra.objective.causal import causal_numerator
from lavra.train import loop, profiling
from lavra.train.config import GuardConfig, TrainConfig, profile_steps
from lavra.train.horizon import Horizon
from lavra.train.loop import train
from lavra.train.profiling import StepProfiler
from lavra.train.signals import StopRequest

STEPS = 12


def run(model, sampler, settings, folder, asked=None, *before, steps=STEPS):
    """Events of a run that profiles the steps `asked` for."""
    events: list[dict] = []
    horizon = Horizon(steps=steps, decay=4, decided=True)
    more = dict(run_dir=folder, stop=StopRequest(), on_event=events.append)
    if asked is None:
        train(model, sampler, settings, horizon, callbacks=before, **more)
    else:
        with StepProfiler(profile_steps(asked), folder / "profile", events.append) as profiler:
            train(model, sampler, settings, horizon, callbacks=[*before, profiler], **more)
    return events


def trace(folder: Path, steps: str) -> list[dict]:
    with gzip.open(folder / f"profile/steps-{steps}.trace.json.gz") as file:
        return json.load(file)["traceEvents"]


def names(events: list[dict]) -> set[str]:
    return {str(event.get("name")) for event in events}


def steps_in(events: list[dict]) -> list[int]:
    found = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep#")]
    return sorted(int(e["name"].split("#")[1]) for e in found)


def same_weights(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def nothing_is_recorded() -> bool:
    """Torch has one recorder a process: a new one can begin, and sees what is its own."""
    with torch.profiler.profile() as fresh:
        torch.ones(3).cumsum(0)
    return {e.key for e in fresh.key_averages()} >= {"aten::cumsum"}


def test_the_trace_holds_the_steps_asked_for_with_their_operators_and_allocations(
    tmp_path, tiny_model, sampler, settings
) -> None:
    events = run(tiny_model(), sampler, settings(micro_batch_size=6), tmp_path, 2)
    recorded = trace(tmp_path, "6-7")
    assert steps_in(recorded) == [6, 7]
    assert {"aten::mm", "[memory]"} <= names(recorded)
    assert any("Backward" in name for name in names(recorded)) and any("Adam" in n for n in names(recorded))
    assert [(e["step"], e["kind"], e["text"]) for e in events] == [
        (7, "profile", "steps 6 to 7 are in profile/")
    ]
    assert [p.name for p in sorted((tmp_path / "profile").iterdir())] == [
        "steps-6-7.operators.txt",
        "steps-6-7.trace.json.gz",
    ]


@pytest.mark.slow
def test_the_table_counts_the_matrix_products_of_these_steps(tmp_path, tiny_model, sampler, settings) -> None:
    run(tiny_model(), sampler, settings(micro_batch_size=6), tmp_path, 1)
    run(tiny_model(), sampler, settings(micro_batch_size=6), tmp_path / "more", 2)
    counts = []
    for file in (
        tmp_path / "profile/steps-6-6.operators.txt",
        tmp_path / "more/profile/steps-6-7.operators.txt",
    ):
        text = file.read_text()
        assert "resident" in text.splitlines()[1] and "CPU Mem" in text
        counts.append(
            int(next(line.split()[-1] for line in text.splitlines() if line.split()[:1] == ["aten::mm"]))
        )
    assert counts[0] > 10 and counts[1] == 2 * counts[0]


def test_profiling_changes_no_weight(tmp_path, tiny_model, sampler, settings) -> None:
    plain, profiled = tiny_model(), tiny_model()
    run(plain, sampler, settings(), tmp_path / "plain")
    run(profiled, sampler, settings(), tmp_path / "profiled", "3-3")
    assert same_weights(plain, profiled)
    assert steps_in(trace(tmp_path / "profiled", "3-3")) == [3]


@pytest.mark.parametrize("where", ["start", "step", "stop", "export_chrome_trace"])
def test_an_error_of_the_profiler_is_an_event_and_training_ends_with_the_same_bits(
    tmp_path, tiny_model, sampler, settings, monkeypatch, where: str
) -> None:
    plain, profiled = tiny_model(), tiny_model()
    run(plain, sampler, settings(), tmp_path / "plain")

    def fail(profiler, *path) -> None:
        for half in map(Path, path):
            half.write_bytes(b"half a trace")
        raise RuntimeError("no counters")

    with monkeypatch.context() as patched:
        patched.setattr(profiling.profile, where, fail)
        events = run(profiled, sampler, settings(), tmp_path / "profiled", 3)
    assert [e["kind"] for e in events] == ["profile"]
    assert "given up: RuntimeError: no counters" in events[0]["text"]
    assert same_weights(plain, profiled)
    assert not list((tmp_path / "profiled").glob("profile/*trace*"))
    if where in ("start", "step", "export_chrome_trace"):
        assert nothing_is_recorded()


def test_a_disk_that_takes_no_profile_is_an_event(tmp_path, tiny_model, sampler, settings) -> None:
    (tmp_path / "profile").write_text("in the way")
    events = run(tiny_model(), sampler, settings(), tmp_path, 3)
    assert "given up: FileExistsError" in events[0]["text"]
    assert nothing_is_recorded()


def test_a_resumed_run_profiles_only_steps_that_are_ahead(tmp_path, tiny_model, sampler, settings) -> None:
    run(tiny_model(), sampler, settings(), tmp_path, None, steps=8)
    events = run(tiny_model(), sampler, settings(), tmp_path, 3)
    assert not (tmp_path / "profile").exists()
    assert [e["text"] for e in events] == ["none: the steps asked for were not among those taken now"]
    run(tiny_model(), sampler, settings(micro_batch_size=6), tmp_path, "15-15", steps=18)
    assert steps_in(trace(tmp_path, "15-15")) == [15]


@pytest.mark.slow
def test_a_run_that_ends_before_the_last_step_asked_for_leaves_what_it_took(
    tmp_path, tiny_model, sampler, settings
) -> None:
    events = run(tiny_model(), sampler, settings(micro_batch_size=6), tmp_path, "11-40")
    assert steps_in(trace(tmp_path, "11-40")) == [11, 12]
    assert events[-1]["text"] == "steps 11 to 12 are in profile/"


@pytest.mark.slow
def test_an_interrupted_run_leaves_what_it_took(tmp_path, tiny_model, sampler, settings) -> None:
    def leave(facts) -> None:
        if facts.step == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tiny_model(), sampler, settings(), tmp_path, 5, leave)
    assert {6, 7} <= set(steps_in(trace(tmp_path, "6-10")))
    assert nothing_is_recorded()


@pytest.mark.slow
def test_a_rewind_while_profiling_leaves_a_whole_trace(
    tmp_path, tiny_model, sampler, settings, monkeypatch
) -> None:
    bad = set(range(6 * 29, 6 * 30))  # step 30

    def harmed(model, batch):
        loss = causal_numerator(model, batch)
        return loss + 40 * loss.detach() if bad & set(batch.sample_ids.tolist()) else loss

    monkeypatch.setattr(loop, "causal_numerator", harmed)
    config = settings(guard=GuardConfig(policy="rewind", rewind_steps=4), keep_every=10, micro_batch_size=6)
    events = run(tiny_model(), sampler, config, tmp_path, "29-31", steps=35)
    assert [e["kind"] for e in events].count("rewound") == 1
    assert len(steps_in(trace(tmp_path, "29-31"))) == 3


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_on_cuda_the_memory_snapshot_covers_the_steps_and_is_switched_off_after(
    tmp_path, monkeypatch
) -> None:
    """No GPU is needed: the calls to torch.cuda are what is looked at."""
    calls = []
    memory = SimpleNamespace(
        _record_memory_history=lambda enabled="all", **more: calls.append(("record", enabled)),
        _dump_snapshot=lambda path: (calls.append(("dump", None)), Path(path).write_bytes(b"snapshot")),
    )
    monkeypatch.setattr(profiling.torch.cuda, "memory", memory)
    monkeypatch.setattr(profiling.torch.cuda, "max_memory_allocated", lambda: 3 << 30)
    parameter = SimpleNamespace(device=torch.device("cuda"))
    model = SimpleNamespace(parameters=lambda: iter([parameter]))
    with StepProfiler(
        range(3, 5), tmp_path, lambda event: calls.append(("event", event["text"]))
    ) as profiler:
        for step in range(1, 7):
            calls.append(("step", step))
            torch.ones(4, 4) @ torch.ones(4, 4)
            profiler(SimpleNamespace(step=step, last=False, model=model))
    assert calls == [
        ("step", 1), ("record", "all"), ("step", 2), ("step", 3), ("step", 4), ("dump", None),
        ("event", "steps 3 to 4 are in " + tmp_path.name + "/"), ("record", None), ("step", 5), ("step", 6),
    ]  # fmt: skip
    assert (tmp_path / "steps-3-4.memory.pickle").read_bytes() == b"snapshot"
    assert "3.0 GiB allocated" in (tmp_path / "steps-3-4.operators.txt").read_text()


# --- the setting ---


@pytest.mark.parametrize(
    ("asked", "steps"),
    [(0, []), (1, [6]), ("3", [6, 7, 8]), ("3-4", [3, 4]), ("100-102", [100, 101, 102]), ("7-7", [7])],
)
def test_steps_are_a_number_or_the_first_and_the_last(asked, steps: list[int]) -> None:
    assert list(profile_steps(TrainConfig(profile=asked).profile)) == steps


@pytest.mark.parametrize("asked", [-1, "2-5", "9-8", "5-", "-5", "all", "1.5", 101, "10-110", "0-0"])
def test_other_steps_are_refused(asked) -> None:
    with pytest.raises(ValidationError, match=re.compile("profile")):
        TrainConfig(profile=asked)
