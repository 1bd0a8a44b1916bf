"""Trainings that are made ill on purpose, records written by hand where that is not cheap, and healthy runs."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from lavra.errors import DivergedError
from lavra.metrics import read_jsonl
from lavra.objective.causal import causal_numerator
from lavra.optim.build import OptimizerSettings
from lavra.recipe import load_recipe
from lavra.train import blame, loop
from lavra.train.config import GuardConfig
from lavra.train.diagnosis.findings import Finding
from lavra.train.diagnosis.history import History, rises
from lavra.train.diagnosis.judge import CAUSES, Diagnosis, diagnose
from lavra.train.horizon import Horizon
from lavra.train.layers import LayerStatistics
from lavra.train.loop import train
from lavra.train.signals import StopRequest


def kinds(found: Diagnosis) -> list[str]:
    return [finding.kind for finding in found.findings]


def only(found: Diagnosis, kind: str) -> Finding:
    (finding,) = [finding for finding in found.findings if finding.kind == kind]
    return finding


def assert_advice_is_a_recipe(found: Diagnosis, *overrides: str) -> None:
    for finding in found.findings:
        assert finding.evidence and finding.advice and finding.title
        load_recipe("", [*overrides, *finding.overrides], environment={})


# --- trainings ---


@pytest.fixture
def trained_run(tmp_path, tiny_model, sampler, settings):
    """`trained_run(learning_rate, ...)` -> diagnosis of a training of three tiny blocks."""

    def run(
        learning_rate=1e-2, *, warmup=3, steps=40, seed=0, layers_every=10, model=None, callbacks=(), **other
    ):
        model = tiny_model(seed=seed, n_layers=3) if model is None else model
        options = settings(optimizer=OptimizerSettings(learning_rate=learning_rate), warmup=warmup, **other)
        events: list[dict[str, Any]] = []
        diverged = False
        try:
            train(
                model, sampler, options, Horizon(steps=steps, decay=steps // 3, decided=True),
                run_dir=tmp_path, stop=StopRequest(), callbacks=callbacks, on_event=events.append,
                observer=LayerStatistics(layers_every, options.precision),
            )  # fmt: skip
        except DivergedError:
            diverged = True
        decisions = {
            "learning_rate": learning_rate,
            "warmup_steps": warmup,
            "model": model.shape.model_dump(),
        }
        plan = {"decisions": decisions, "horizon": {"steps": steps}}
        found = diagnose(
            list(read_jsonl(tmp_path / "metrics.jsonl")), events, plan, {"train": {"precision": options.precision}},
            source_tokens={"text": sampler.windows.store.n_tokens}, diverged=diverged,
        )  # fmt: skip
        assert_advice_is_a_recipe(found)
        return found

    return run


@pytest.mark.parametrize(("learning_rate", "seed"), [(1e-2, 0), (1e-2, 1), (3e-3, 2), (3e-2, 3)])
def test_a_healthy_training_is_left_in_peace(trained_run, learning_rate: float, seed: int) -> None:
    found = trained_run(learning_rate, seed=seed)
    assert found.findings == ()
    assert set(dict(found.unknown)) == {"overfitting", "exploding gradients"}  # too few steps and validations
    assert {*found.clear, *dict(found.unknown)} == {cause.name for cause in CAUSES}


@pytest.mark.parametrize("layers_every", [10, 0])
def test_a_learning_rate_a_hundred_times_too_high_is_found_with_or_without_the_layers(
    trained_run, layers_every
) -> None:
    found = trained_run(1.0, layers_every=layers_every)
    finding = only(found, "learning_rate_too_high")
    assert finding.severity == "harmful" and finding.overrides == ("train.learning_rate=0.33",)
    assert "ln 48 = 3.87" in finding.evidence and "train/loss" in finding.metrics
    if layers_every:
        assert {"exploding_activations", "attention_logit_growth"} <= set(kinds(found))
        assert "RMS" in finding.evidence
    else:
        assert dict(found.unknown)["dead blocks"].startswith("no statistics of the layers")


@pytest.mark.parametrize("seed", [0, 2])
def test_a_warm_up_that_is_too_short_is_found(trained_run, seed: int) -> None:
    found = trained_run(0.1, warmup=8, steps=100, seed=seed)
    finding = only(found, "warmup_too_short")
    assert finding.overrides == ("train.warmup_fraction=0.3",)
    assert "warm-up of 8 steps" in finding.evidence and "learning_rate_too_high" not in kinds(found)


def test_a_warm_up_that_is_long_enough_is_not_blamed(trained_run) -> None:
    assert "warmup_too_short" not in kinds(trained_run(0.1, warmup=40, steps=60))


def test_fp16_overflows_that_never_end_are_a_collapsing_scale(trained_run, monkeypatch) -> None:
    def overflowing(model, batch):
        loss = causal_numerator(model, batch)
        loss.register_hook(lambda g: g * math.inf if g.abs() * 96 > 2**6 * 1.5 else g)
        return loss

    monkeypatch.setattr(loop, "causal_numerator", overflowing)
    found = trained_run(precision="fp16", steps=12)
    finding = only(found, "loss_scale_collapse")
    assert finding.overrides == ("train.precision=bf16",) and "the scale is 64 at step 12" in finding.evidence


def test_a_block_that_adds_nothing_is_dead(trained_run, tiny_model) -> None:
    model = tiny_model(n_layers=3)
    model.blocks[1].register_forward_hook(lambda module, inputs, output: inputs[0])
    finding = only(trained_run(model=model), "dead_blocks")
    assert "blocks.1 adds 0" in finding.evidence and "blocks.0" not in finding.evidence
    assert finding.metrics == ("layers/blocks.1/contribution",)


def test_documents_that_disturb_training_are_named(trained_run, sampler, monkeypatch) -> None:
    culprit = 6 * 24 + 2

    def numerator(model, batch):
        loss = causal_numerator(model, batch)
        return loss + 90 * loss.detach() if culprit in batch.sample_ids.tolist() else loss

    monkeypatch.setattr(loop, "causal_numerator", numerator)
    monkeypatch.setattr(blame, "causal_numerator", numerator)
    found = trained_run()
    finding = only(found, "poisoned_data")
    assert finding.severity == "worth trying" and "1 step (25)" in finding.evidence
    assert all(d.id[:12] in finding.evidence for d in sampler.documents(culprit)[:5])
    assert kinds(found) == ["poisoned_data"]


def test_a_run_that_ended_on_batches_bad_as_a_whole_had_too_high_a_rate(trained_run, monkeypatch) -> None:
    def numerator(model, batch):
        loss = causal_numerator(model, batch)
        return loss * 40 if int(batch.sample_ids.max()) >= 150 else loss

    monkeypatch.setattr(loop, "causal_numerator", numerator)
    finding = only(trained_run(guard=GuardConfig(patience=3), steps=60), "learning_rate_too_high")
    assert finding.severity == "stopped the run" and "3 steps were rejected" in finding.evidence


def test_values_that_are_not_finite_are_found_with_their_layer(trained_run, tiny_model) -> None:
    model = tiny_model(n_layers=3)

    def damage(facts) -> None:
        if facts.step == 20:
            with torch.no_grad():
                facts.model.blocks[2].feed_forward.out.weight[0, 0] = math.nan

    finding = only(trained_run(model=model, callbacks=[damage]), "non_finite_values")
    assert finding.severity == "stopped the run"
    assert "blocks.2.feed_forward.out.weight (weights)" in finding.evidence and "step 21" in finding.evidence


# --- records by hand ---

RECIPE = {
    "train": {"layers_every": 5, "betas": [0.9, 0.95]},
    "tokens": {"packing": "concat"},
    "budget": {"time": 300.0},
}
STEPS = 200


def healthy() -> dict[str, Any]:
    """What `diagnose` takes, of a run that learns well."""
    noise = random.Random(3)
    records = []
    for step in range(1, STEPS + 1):
        loss = 2.5 + 4.4 / (1 + step / 30) + noise.gauss(0, 0.05)
        record: dict[str, Any] = {
            "step": step,
            "tokens": 1000 * step,
            "train/loss": loss,
            "train/lr": 1e-3 * min(1.0, step / 50),
            "train/grad_norm": 0.5 + abs(noise.gauss(0, 0.05)),
            "perf/data_wait_frac": 0.001,
        }
        if step % 20 == 0:
            record["val/loss"] = loss + 0.1
        if step == 1 or step % 5 == 0:
            record["layers"] = {
                f"blocks.{b}": {
                    "grad_norm": 0.1 + 0.01 * b,
                    "update_ratio": 0.005,
                    "activation_rms": 1.0 + b,
                    "contribution": 0.3,
                    "attention_logit": 5.0,
                }
                for b in range(12)
            }
        records.append(record)
    plan = {
        "decisions": {"learning_rate": 1e-3, "warmup_steps": 50, "model": {"vocab_size": 1000}},
        "horizon": {"steps": STEPS},
    }
    return {
        "records": records,
        "events": [],
        "plan": plan,
        "recipe": copy.deepcopy(RECIPE),
        "source_tokens": {"a": 10**6},
    }


def each(run: dict[str, Any], name: str, change, *, first: int = 1) -> dict[str, Any]:
    """Change a metric, or a statistic `blocks.2/grad_norm`, from a step on: `change(step, value)`."""
    for record in run["records"]:
        if record["step"] < first:
            continue
        if "/" in name and name.startswith("blocks"):
            layer, _, value = name.partition("/")
            if "layers" in record:
                record["layers"][layer][value] = change(record["step"], record["layers"][layer][value])
        elif name in record:
            record[name] = change(record["step"], record[name])
    return run


def found_in(run: dict[str, Any], *overrides: str) -> Diagnosis:
    found = diagnose(run.pop("records"), run.pop("events"), **run)
    assert_advice_is_a_recipe(found, *overrides)
    return found


def test_a_healthy_record_gives_nothing_and_everything_could_be_judged() -> None:
    found = found_in(healthy())
    assert found.findings == () and found.unknown == () and len(found.clear) == len(CAUSES)


def test_a_loss_that_rises_at_full_rate_and_stays_is_the_rates_fault() -> None:
    found = found_in(each(healthy(), "train/loss", lambda s, v: v + min(2.0, 0.05 * (s - 120)), first=120))
    finding = only(found, "learning_rate_too_high")
    assert "did not come back" in finding.evidence and kinds(found) == ["learning_rate_too_high"]


def test_a_rise_of_the_loss_that_the_recipe_itself_makes_is_not_blamed_on_the_rate() -> None:
    run = each(healthy(), "train/loss", lambda s, v: v + min(2.0, 0.05 * (s - 120)), first=120)
    run["recipe"]["tokens"]["curriculum"] = [{"start": 120_000, "mixture": {"a": 1}}]
    assert kinds(found_in(run)) == []


def test_one_weak_sign_of_a_high_rate_is_not_enough_and_two_are() -> None:
    hump = lambda s, v: v + (0.8 if 120 <= s < 150 else 0.0)  # noqa: E731
    assert kinds(found_in(each(healthy(), "train/loss", hump))) == []
    run = each(healthy(), "train/loss", hump)
    for b in range(12):
        each(run, f"blocks.{b}/update_ratio", lambda s, v: 0.06, first=100)
    finding = only(found_in(run), "learning_rate_too_high")
    assert "6 % of their weights" in finding.evidence and "rose by" in finding.evidence


def test_large_updates_alone_are_enough_when_they_are_absurd() -> None:
    run = healthy()
    for b in range(12):
        each(run, f"blocks.{b}/update_ratio", lambda s, v: 0.5, first=100)
    assert kinds(found_in(run)) == ["learning_rate_too_high"]


def test_an_early_disturbance_that_settles_is_a_short_warm_up() -> None:
    run = each(healthy(), "train/loss", lambda s, v: v + (0.9 if 10 <= s < 30 else 0.0))
    run["plan"]["decisions"]["warmup_steps"] = 10
    finding = only(found_in(run), "warmup_too_short")
    assert finding.overrides == ("train.warmup_fraction=0.2",) and "warm-up of 10 steps" in finding.evidence
    run = each(healthy(), "train/loss", lambda s, v: v + (0.9 if 10 <= s < 30 else 0.0))
    assert kinds(found_in(run)) == []  # 50 steps of warm-up are not too few


@pytest.mark.parametrize(("largest", "severity"), [(99.0, ""), (150.0, "worth trying"), (2e4, "harmful")])
def test_attention_logits_are_judged_by_the_published_limits(largest: float, severity: str) -> None:
    found = found_in(
        each(healthy(), "blocks.7/attention_logit", lambda s, v: largest * s / STEPS if s < 180 else largest)
    )
    assert [(f.kind, f.severity) for f in found.findings] == (
        [("attention_logit_growth", severity)] if severity else []
    )
    if severity:
        assert (
            found.findings[0].metrics[0] == "layers/blocks.7/attention_logit"
            and "blocks.7" in found.findings[0].evidence
        )


def test_activations_that_explode_in_time_or_depth_are_found() -> None:
    in_time = found_in(each(healthy(), "blocks.4/activation_rms", lambda s, v: v * 1.05**s))
    assert kinds(in_time) == ["exploding_activations"] and "after blocks.4" in in_time.findings[0].evidence
    run = healthy()
    for b in range(12):
        each(run, f"blocks.{b}/activation_rms", lambda s, v, b=b: 0.05 * 1.8**b)
    in_depth = found_in(run)
    assert (
        kinds(in_depth) == ["exploding_activations"]
        and "as large after blocks.11 as after blocks.0" in in_depth.findings[0].evidence
    )


def test_gradients_that_explode_are_found() -> None:
    found = found_in(each(healthy(), "train/grad_norm", lambda s, v: v * math.exp((s - 120) / 15), first=120))
    assert kinds(found) == ["exploding_gradients"]


def test_a_block_with_a_thousandth_of_the_others_gradient_is_dead_but_not_after_one_look() -> None:
    found = found_in(each(healthy(), "blocks.10/grad_norm", lambda s, v: 1e-5, first=100))
    assert kinds(found) == ["dead_blocks"] and "blocks.10 has a gradient norm" in found.findings[0].evidence
    assert kinds(found_in(each(healthy(), "blocks.10/grad_norm", lambda s, v: 1e-5, first=200))) == []


def test_a_scale_that_overflows_again_and_again_is_found_and_its_search_at_the_start_is_not() -> None:
    def scaled(overflows) -> dict[str, Any]:
        run = healthy()
        for record in run["records"]:
            record |= {"train/loss_scale": 4096.0, "train/overflows": overflows(record["step"])}
        return run

    assert kinds(found_in(scaled(lambda s: min(s, 4)))) == []
    finding = only(found_in(scaled(lambda s: s // 10)), "loss_scale_collapse")
    assert "again and again" in finding.title and "18 overflows since step 21" in finding.evidence


def test_text_read_more_than_four_times_is_found_from_the_ledger_by_source() -> None:
    run = healthy() | {"source_tokens": {"a": 10**6, "b": 20_000}}
    for record in run["records"]:
        record["ledger"] = {"a": 500 * record["step"], "b": 500 * record["step"]}
    finding = only(found_in(run), "repeated_data")
    assert (
        "b 5.0 times (20k tokens)" in finding.evidence
        and "a " not in finding.evidence.split(";")[0].split(": ")[1]
    )
    assert finding.overrides == ("budget.time=null", "budget.tokens=4080000")
    mixed = healthy() | {"source_tokens": {"a": 10**6, "b": 20_000}}
    mixed["recipe"]["tokens"] |= {"mixture": {"a": 0.5, "b": 0.5}, "max_epochs": {"a": 2.0}}
    mixed["records"] = [
        r | {"ledger": {"a": 500 * r["step"], "b": 500 * r["step"]}} for r in mixed["records"]
    ]
    finding = only(found_in(mixed, 'tokens.mixture={"a": 0.5, "b": 0.5}'), "repeated_data")
    assert finding.overrides == ('tokens.max_epochs={"a": 2.0, "b": 4}',)


def test_one_source_needs_no_ledger_and_unknown_sizes_are_said() -> None:
    assert (
        "text 8.0 times"
        in only(found_in(healthy() | {"source_tokens": {"text": 25_000}}), "repeated_data").evidence
    )
    assert kinds(found_in(healthy() | {"source_tokens": {"text": 50_001}})) == []
    assert dict(found_in(healthy() | {"source_tokens": {}}).unknown)["text read too often"].startswith(
        "the sizes"
    )


def test_validation_that_rises_while_training_falls_is_overfitting() -> None:
    found = found_in(each(healthy(), "val/loss", lambda s, v: v + 0.01 * (s - 120), first=120))
    finding = only(found, "overfitting")
    assert kinds(found) == ["overfitting"] and "lowest at step 120" in finding.evidence
    assert finding.overrides == ("budget.time=null", "budget.tokens=120000")


def test_validation_that_rises_together_with_training_is_not_overfitting() -> None:
    run = each(healthy(), "val/loss", lambda s, v: v + 0.01 * (s - 120), first=120)
    each(run, "train/loss", lambda s, v: v + 0.01 * (s - 120), first=120)
    assert "overfitting" not in kinds(found_in(run))


def test_a_median_wait_of_more_than_a_tenth_is_found_and_a_slow_first_batch_is_not() -> None:
    assert kinds(found_in(each(healthy(), "perf/data_wait_frac", lambda s, v: 0.9 if s < 80 else v))) == []
    run = each(healthy(), "perf/data_wait_frac", lambda s, v: 0.25)
    run["recipe"]["tokens"]["packing"] = "best_fit"
    finding = only(found_in(run), "data_bound")
    assert "25 %" in finding.evidence and finding.overrides == ("tokens.packing=concat",)


@pytest.mark.parametrize("act", ["warn", "skip"])
def test_bad_documents_are_worse_where_the_step_was_taken(act: str) -> None:
    documents = [{"id": "f" * 32, "source": "web", "path": "dump.txt"}]
    event = {
        "step": 90,
        "kind": "loss_spike",
        "act": act,
        "cause": "data",
        "sequences": [{"documents": documents}],
    }
    finding = only(found_in(healthy() | {"events": [event]}), "poisoned_data")
    assert "dump.txt ffffffffffff (web)" in finding.evidence
    assert (finding.severity, finding.overrides) == {
        "warn": ("harmful", ("train.guard.policy=skip",)),
        "skip": ("worth trying", ()),
    }[act]


@pytest.mark.parametrize(("count", "found"), [(1, []), (2, []), (4, ["poisoned_data"])])
def test_a_gradient_that_spikes_now_and_then_is_no_matter_of_the_documents(count: int, found: list) -> None:
    event = {"kind": "grad_spike", "act": "skip", "cause": "data", "sequences": []}
    events = [{**event, "step": 50 + 20 * i} for i in range(count)]
    assert kinds(found_in(healthy() | {"events": events})) == found
    assert kinds(diagnose([{"step": 1000, "train/loss": 3.0}], events)) == []  # few among so many steps
    assert kinds(diagnose([{"step": 100, "train/loss": 3.0}], events[:2])) == []  # too few to count


def test_the_most_severe_finding_comes_first() -> None:
    run = each(healthy(), "blocks.3/attention_logit", lambda s, v: 150.0)
    bad = {"step": 201, "kind": "non_finite", "cause": "weights", "layer": "norm (forward)"}
    run |= {"events": [bad], "diverged": True}
    each(run, "train/grad_norm", lambda s, v: v * math.exp((s - 120) / 15), first=120)
    assert kinds(found_in(run)) == ["non_finite_values", "exploding_gradients", "attention_logit_growth"]


def test_large_updates_in_the_steps_of_a_warm_up_or_at_a_low_rate_are_no_sign() -> None:
    early, late = healthy(), healthy()
    early["plan"]["decisions"]["warmup_steps"] = 2
    each(early, "train/lr", lambda s, v: 1e-3)
    each(late, "train/lr", lambda s, v: 1e-4, first=150)
    for b in range(12):
        each(early, f"blocks.{b}/update_ratio", lambda s, v: 0.5 if s <= 40 else v)
        each(late, f"blocks.{b}/update_ratio", lambda s, v: 0.5, first=150)
    assert kinds(found_in(early)) == kinds(found_in(late)) == []


def test_an_early_rise_that_never_came_back_is_no_matter_of_the_warm_up() -> None:
    run = each(healthy(), "train/loss", lambda s, v: 6.8 if s >= 12 else v)
    run["plan"]["decisions"]["warmup_steps"] = 12
    assert "warmup_too_short" not in kinds(found_in(run))


def test_a_batch_that_is_not_finite_is_the_datas_fault_alone() -> None:
    event = {"step": 90, "kind": "non_finite", "act": "skip", "cause": "data", "sequences": []}
    assert kinds(found_in(healthy() | {"events": [event]})) == ["poisoned_data"]


def test_a_rejection_long_ago_did_not_stop_the_run() -> None:
    early = {"step": 30, "kind": "non_finite", "cause": "weights", "layer": "norm (forward)"}
    assert only(found_in(healthy() | {"events": [early]}), "non_finite_values").severity == "harmful"


@pytest.mark.parametrize("odd", [None, "3", [], [1], {}, {"blocks.0": None}, True, 1e400])
def test_records_of_unexpected_form_are_left_out(odd: Any) -> None:
    run = healthy()
    keys = [
        "step",
        "tokens",
        "train/loss",
        "train/lr",
        "train/grad_norm",
        "layers",
        "ledger",
        "val/loss",
        "train/loss_scale",
    ]
    run["records"] += [dict.fromkeys(keys, odd), {"step": 201, "layers": {"blocks.0": {"grad_norm": odd}}}]
    run["events"] = [
        dict.fromkeys(("step", "kind", "cause", "sequences"), odd),
        {"step": odd, "kind": "loss_spike"},
    ]
    assert kinds(found_in(run)) == []
    assert kinds(diagnose([], [], {"decisions": odd, "horizon": odd}, {"train": odd})) == []


def test_no_records_are_no_verdict() -> None:
    found = diagnose([])
    assert found.findings == ()
    assert {"a learning rate that is too high", "dead blocks", "overfitting", "waiting for data"} <= set(
        dict(found.unknown)
    )


# --- the series ---


def test_rises_are_those_beyond_the_noise_and_know_when_they_ended() -> None:
    noise = np.random.default_rng(0).normal(0, 0.05, 300)
    level = 3 - 0.002 * np.arange(300)
    assert rises([(s, float(v)) for s, v in enumerate(level + noise)]) == []
    level[150:200] += 0.6
    (rise,) = rises([(s, float(v)) for s, v in enumerate(level + noise)])
    assert 135 <= rise.start <= 155 and 148 <= rise.top <= 200 and rise.height == pytest.approx(0.6, abs=0.15)
    assert rise.recovered is not None and 195 <= rise.recovered <= 215
    level[250:] += 2
    *_, last = rises([(s, float(v)) for s, v in enumerate(level + noise)])
    assert last.recovered is None


def test_a_noise_that_grows_is_no_rise() -> None:
    draws = np.random.default_rng(1).normal(0, 1, 300)
    for length in (40, 150, 300):
        values = 6 - 0.004 * np.arange(length) + draws[:length] * np.linspace(0.02, 0.3, length)
        assert rises([(s, float(v)) for s, v in enumerate(values)]) == []


def test_blocks_are_in_the_order_of_the_model() -> None:
    run = healthy()
    assert list(History(run["records"]).blocks("grad_norm")) == [f"blocks.{b}" for b in range(12)]
