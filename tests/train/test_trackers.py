"""Oracles: metrics.jsonl, read back through TensorBoard's own reader and W&B's own records; the run without trackers."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from lavra import watch
from lavra.errors import PreflightError
from lavra.metrics import read_jsonl
from lavra.objective.causal import causal_numerator
from lavra.parallel.ranks import Ranks
from lavra.recipe import load_recipe
from lavra.stages import run_recipe
from lavra.train import loop, trackers
from lavra.train.config import GuardConfig
from lavra.train.horizon import Horizon
from lavra.train.layers import LayerStatistics
from lavra.train.loop import train
from lavra.train.signals import StopRequest
from lavra.train.state import StepFacts
from lavra.train.trackers import TensorBoard, Trackers, WandB, scalars, sinks

STEPS = 12


class PowerCut(BaseException):
    """Nothing may catch it."""


class Memory:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[tuple[int, dict, str]] = []
        self.calls: list[str] = []

    def open(self) -> None:
        self.calls.append("open")

    def write(self, step, values, sample) -> None:
        self.got.append((step, values, sample))

    def close(self) -> None:
        self.calls.append("close")

    def abandon(self) -> None:
        self.calls.append("abandon")

    @property
    def steps(self) -> list[int]:
        return [step for step, _, _ in self.got]


class Gated(Memory):
    """Opens when the gate does; a gate that nobody opens gives way at last, so that no test hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def open(self) -> None:
        self.gate.wait(60)
        super().open()


def run(model, sampler, settings, folder, sinks=None, *before, after=(), steps=STEPS, events=None, **options):
    events = [] if events is None else events
    with Trackers(sinks or {}, log_every=settings.log_every, on_event=events.append, **options) as tracked:
        train(
            model, sampler, settings, Horizon(steps=steps, decay=4, decided=True),
            run_dir=folder, stop=StopRequest(), callbacks=[*before, tracked, *after],
            observer=LayerStatistics(5, "fp32"), on_event=events.append,
        )  # fmt: skip
    return events


def at_step(step: int, act):
    def callback(facts) -> None:
        if facts.step == step:
            act()

    return callback


def cut() -> None:
    raise PowerCut


def truth(folder: Path) -> dict[int, dict[str, float]]:
    """metrics.jsonl as step -> scalars."""
    records = list(read_jsonl(folder / "metrics.jsonl"))
    return {record["step"]: dict(scalars(record)) for record in records}


def weights(model) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same_weights(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(weights(a), weights(b), strict=True))


# --- training never waits, never stops ---


def test_a_sink_gets_exactly_the_records_of_metrics_jsonl(tmp_path, tiny_model, sampler, settings) -> None:
    sink = Memory()
    run(tiny_model(), sampler, settings(log_every=5), tmp_path, {"memory": sink})
    assert {step: values for step, values, _ in sink.got} == truth(tmp_path)
    assert sink.steps == [1, 5, 10, 12]  # those with layer statistics and the last one, too
    assert sink.calls == ["open", "close"]


def test_names_of_nested_values_are_joined_and_what_is_no_number_is_left_out() -> None:
    record = {"step": 3, "tokens": 5, "train/loss": 0.5, "val/loss": None, "train/grad_norm": float("nan"),
              "layers": {"blocks.0": {"grad_norm": 2.0, "weight_rms": float("inf")}}, "ledger": {"books": 7}}  # fmt: skip
    assert dict(scalars(record)) == {
        "tokens": 5,
        "train/loss": 0.5,
        "layers/blocks.0/grad_norm": 2.0,
        "ledger/books": 7,
    }


@pytest.mark.parametrize("error", [RuntimeError("no disk"), SystemExit(3)], ids=["error", "exit"])
@pytest.mark.parametrize("where", ["open", "write", "close"])
def test_a_sink_that_fails_is_said_once_and_changes_neither_training_nor_the_other_sinks(
    tmp_path, tiny_model, sampler, settings, where: str, error: BaseException
) -> None:
    plain, tracked = tiny_model(), tiny_model()
    run(plain, sampler, settings(), tmp_path / "plain")
    bad, good = Memory(), Memory()
    with mock.patch.object(bad, where, side_effect=error):
        events = run(tracked, sampler, settings(), tmp_path / "tracked", {"bad": bad, "good": good})
    assert same_weights(plain, tracked)
    assert good.steps == list(range(1, STEPS + 1))
    assert [e["kind"] for e in events] == ["tracker"]
    assert "bad is left out" in events[0]["text"] and f"{type(error).__name__}: {error}" in events[0]["text"]
    assert bad.calls[-1] == "abandon"


def test_a_sink_that_fails_is_said_while_training_goes_on(tmp_path, tiny_model, sampler, settings) -> None:
    bad, events, said = Memory(), [], []
    with mock.patch.object(bad, "open", side_effect=ImportError("half installed")):

        def wait(facts) -> None:
            for thread in threading.enumerate():
                if thread.name == "tracker bad":
                    thread.join()

        run(tiny_model(), sampler, settings(), tmp_path, {"bad": bad}, wait,
            after=[at_step(2, lambda: said.extend(events))], events=events)  # fmt: skip
    assert "ImportError: half installed" in said[0]["text"]


def test_a_sink_that_hangs_for_ever_is_left_behind_and_the_others_lose_nothing(
    tmp_path, tiny_model, sampler, settings
) -> None:
    plain, tracked = tiny_model(), tiny_model()
    run(plain, sampler, settings(), tmp_path / "plain")
    hanging, good = Gated(), Memory()
    sinks = {"hanging": hanging, "good": good}
    events = run(tracked, sampler, settings(), tmp_path / "tracked", sinks, patience=0.2)
    assert "open" not in hanging.calls  # it hangs still, and closing did not wait for it
    assert good.steps == list(range(1, STEPS + 1)) and good.calls == ["open", "close"]
    assert len(events) == 1 and "hanging is left out" in events[0]["text"]
    assert f"{STEPS} records are not written" in events[0]["text"]
    assert hanging.calls == ["abandon"]
    assert same_weights(plain, tracked)
    hanging.gate.set()
    for thread in threading.enumerate():
        if thread.name == "tracker hanging":
            thread.join()
    assert hanging.got == []  # nothing is written behind the back of what comes after training


def test_a_slow_sink_loses_nothing_while_its_queue_has_room(tmp_path, tiny_model, sampler, settings) -> None:
    slow = Gated()
    events = run(
        tiny_model(), sampler, settings(), tmp_path, {"slow": slow},
        after=[at_step(STEPS, slow.gate.set)], capacity=STEPS,
    )  # fmt: skip
    assert slow.steps == list(range(1, STEPS + 1)) and events == []


def test_records_that_find_the_queue_full_are_lost_and_counted(
    tmp_path, tiny_model, sampler, settings
) -> None:
    slow = Gated()
    events = run(
        tiny_model(), sampler, settings(), tmp_path, {"slow": slow},
        after=[at_step(STEPS, slow.gate.set)], capacity=5,
    )  # fmt: skip
    assert slow.steps == [1, 2, 3, 4, 5]
    assert len(events) == 1 and f"missed {STEPS - 5} records" in events[0]["text"]


def test_sinks_are_closed_when_training_ends_by_an_error(tmp_path, tiny_model, sampler, settings) -> None:
    sink = Memory()
    with pytest.raises(PowerCut):
        run(tiny_model(), sampler, settings(), tmp_path, {"memory": sink}, after=[at_step(4, cut)])
    assert sink.steps == [1, 2, 3, 4] and sink.calls[-1] == "close"


# --- packages ---


def test_a_tracker_that_is_not_installed_is_said_before_anything_is_built(
    tmp_path, write_project, monkeypatch
) -> None:
    recipe = load_recipe(str(write_project(tmp_path, documents=1)), ["train.trackers=[wandb]"], {})
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PreflightError, match="wandb is not installed") as error:
        run_recipe(recipe)
    assert 'pip install "lavra[trackers]"' in error.value.hint
    assert not (recipe.run_dir / "plan.json").exists()


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tracker_whose_import_fails_is_left_out(
    tmp_path, tiny_model, sampler, settings, monkeypatch, name: str
) -> None:
    for module in [m for m in sys.modules if m.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise RuntimeError('built for another machine')")
    monkeypatch.syspath_prepend(str(tmp_path))
    trackers.check_installed([name])
    broken = sinks([name], tmp_path / "run", fingerprint="0" * 16, settings={})
    events = run(tiny_model(), sampler, settings(), tmp_path / "run", broken)
    assert len(events) == 1 and "RuntimeError: built for another machine" in events[0]["text"]
    assert len(truth(tmp_path / "run")) == STEPS


# --- TensorBoard ---


@pytest.fixture
def event_files(monkeypatch):
    """TensorBoard reads files by name: second, process, count. Within one second ten counts would sort wrongly."""
    writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    monkeypatch.setattr(writer, "_global_uid", writer.AtomicCounter(0))


def board(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    return accumulator.Reload()


def shown(folder: Path) -> dict[int, dict[str, float]]:
    """What TensorBoard shows: step -> scalars. A step shown twice is a failure."""
    accumulator, found = board(folder), {}
    for name in accumulator.Tags()["scalars"]:
        for event in accumulator.Scalars(name):
            assert name not in found.setdefault(event.step, {}), (name, event.step)
            found[event.step][name] = event.value
    return found


def restarts(folder: Path) -> list[int]:
    """Steps that a mark of a restart was written before."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    events = [e for file in sorted(folder.iterdir()) for e in LegacyEventFileLoader(str(file)).Load()]
    return [event.step for event in events if event.HasField("session_log")]


def in_single(records: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    return {step: {k: float(np.float32(v)) for k, v in values.items()} for step, values in records.items()}


def test_tensorboard_shows_metrics_jsonl(tmp_path, tiny_model, sampler, settings, event_files) -> None:
    run(tiny_model(), sampler, settings(), tmp_path, {"tensorboard": TensorBoard(tmp_path / "tensorboard")})
    assert shown(tmp_path / "tensorboard") == in_single(truth(tmp_path))
    assert "layers/blocks.0/grad_norm" in shown(tmp_path / "tensorboard")[5]


def test_tensorboard_shows_each_step_once_after_a_kill_and_a_resume(
    tmp_path, tiny_model, sampler, settings, event_files
) -> None:
    """Killed in step 10, resumed from step 6; the steps done again are another sampler's, so that they differ."""
    config, folder = settings(keep_every=6), tmp_path / "tensorboard"
    with pytest.raises(PowerCut):
        run(tiny_model(), sampler, config, tmp_path, {"tensorboard": TensorBoard(folder)}, at_step(10, cut))
    assert max(shown(folder)) == 9
    other = type(sampler)(sampler.windows, sampler.seed + 1)
    run(tiny_model(), other, config, tmp_path, {"tensorboard": TensorBoard(folder)})
    assert shown(folder) == in_single(truth(tmp_path))
    assert sorted(shown(folder)) == list(range(1, STEPS + 1))
    assert restarts(folder) == [1, 7]


def test_tensorboard_shows_each_step_once_after_a_rewind(
    tmp_path, tiny_model, sampler, settings, monkeypatch, event_files
) -> None:
    bad = set(range(6 * 29, 6 * 30))  # step 30

    def harmed(model, batch):
        loss = causal_numerator(model, batch)
        return loss + 40 * loss.detach() if bad & set(batch.sample_ids.tolist()) else loss

    monkeypatch.setattr(loop, "causal_numerator", harmed)
    config = settings(guard=GuardConfig(policy="rewind", rewind_steps=4), keep_every=10)
    sink = Memory()
    both = {"tensorboard": TensorBoard(tmp_path / "tensorboard"), "memory": sink}
    run(tiny_model(), sampler, config, tmp_path, both, steps=40)
    assert len(sink.steps) > len(set(sink.steps)) == 40  # it did go back
    assert shown(tmp_path / "tensorboard") == in_single(truth(tmp_path))


def test_samples_are_texts(tmp_path, event_files) -> None:
    with Trackers({"tensorboard": TensorBoard(tmp_path)}, log_every=1, on_event=print) as tracked:
        for step, sample in ((1, "once"), (2, ""), (3, "upon <a> time")):
            tracked(StepFacts(step, False, None, metrics={"train/loss": 1.0}, sample=sample))
    texts = board(tmp_path).Tensors("sample")
    assert [(t.step, t.tensor_proto.string_val[0].decode()) for t in texts] == [
        (1, "once"),
        (3, "upon <a> time"),
    ]


def test_only_the_first_process_tracks(tmp_path, trained, monkeypatch, event_files) -> None:
    recipe = trained.dir.parent.parent / "tiny.yaml"
    asked = [f"run_dir={tmp_path}/run", "train.trackers=[tensorboard]"]
    run = dataclasses.replace(trained, loaded=load_recipe(str(recipe), asked, {}))
    for rank in (1, 0):
        monkeypatch.setattr(Ranks, "current", staticmethod(lambda rank=rank: Ranks(rank, 2)))
        with watch.trackers(run, print, "0" * 16) as tracked:
            tracked(StepFacts(1, True, None, metrics={"train/loss": 1.0}, sample=""))
        assert (tmp_path / "run/tensorboard").exists() == (rank == 0)


# --- W&B ---


def wandb_records(folder: Path) -> Iterator:
    """Records of an offline run: LevelDB's log format around protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    [file] = folder.glob("*.wandb")
    data, at, whole = file.read_bytes(), 7, b""
    while at < len(data):
        if 32768 - at % 32768 < 7:  # no room for a header: the block is padded
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, last
            yield Record.FromString(whole)
            whole = b""


def logged(folder: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for record in wandb_records(folder):
        if record.HasField("history"):
            items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            step = items["_step"]
            assert step not in found
            found[step] = {k: v for k, v in items.items() if not k.startswith(("_", "sample"))}
    return found


@pytest.fixture
def no_account(monkeypatch, tmp_path) -> None:
    pytest.importorskip("wandb")
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.mark.slow
def test_wandb_keeps_one_offline_run_that_has_each_step_once_over_a_kill_and_a_resume(
    tmp_path, tiny_model, sampler, settings, no_account
) -> None:
    config, events = settings(keep_every=6), []
    facts = {"recipe": {"seed": 5}}

    def wandb() -> dict:
        return {"wandb": WandB(tmp_path, "0123456789abcdef", facts)}

    with pytest.raises(PowerCut):
        run(tiny_model(), sampler, config, tmp_path, wandb(), at_step(10, cut), events=events, patience=60)
    before = truth(tmp_path)
    run(tiny_model(), sampler, config, tmp_path, wandb(), events=events, patience=60)
    assert events == []
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    first, second = map(logged, folders)
    assert first == before and list(first) == list(range(1, 10))
    assert second == {step: values for step, values in truth(tmp_path).items() if step > 9}
    runs = [next(r.run for r in wandb_records(folder) if r.HasField("run")) for folder in folders]
    assert runs[0].run_id == runs[1].run_id and runs[0].project == "lavra"
    assert '{"seed":5}' in [item.value_json for item in runs[0].config.update]


@pytest.mark.slow
def test_wandb_begins_another_run_when_other_settings_are_trained(tmp_path, no_account) -> None:
    for fingerprint in ("a" * 16, "b" * 16):
        sink = WandB(tmp_path, fingerprint, {})
        sink.open()
        sink.write(1, {"train/loss": 1.0}, "a sample")
        sink.close()
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert sorted(f.name.split("-")[-1][:8] for f in folders) == ["a" * 8, "b" * 8]
    assert all(list(logged(folder)) == [1] for folder in folders)


SCRIPT = """
import sys
from pathlib import Path
from lavra.train.state import StepFacts
from lavra.train.trackers import Trackers, sinks
wandb = sinks(["wandb"], Path(sys.argv[1]), fingerprint="0" * 16, settings={})
with Trackers(wandb, log_every=1, on_event=lambda event: print(event["text"]), patience=float(sys.argv[2])) as tracked:
    tracked(StepFacts(1, True, None, metrics={"train/loss": 1.0}, sample=""))
"""


@pytest.mark.slow
def test_an_unreachable_wandb_server_holds_up_neither_training_nor_the_exit(tmp_path, no_account) -> None:
    account = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), "6"],
        env=os.environ | account, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "wandb is left out" in done.stdout and "Traceback" not in done.stderr
    log = (tmp_path / "wandb/debug-internal.log").read_text()
    assert (
        "retrying" in log and "failed to init run" not in log
    )  # W&B had not given up when the process ended


@pytest.mark.slow
def test_wandb_without_a_key_stays_offline_and_asks_nothing_at_a_terminal(tmp_path, no_account) -> None:
    terminal, stdin = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), "60"],
        env=os.environ | {"WANDB_MODE": "online"}, stdin=stdin, stdout=stdin, stderr=stdin, check=True,
    )  # fmt: skip
    os.close(stdin)
    os.close(terminal)
    assert done.returncode == 0 and len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1
