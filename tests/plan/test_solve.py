"""Oracles: the plan's own hints tried out, order relations, closed forms written out here."""

from __future__ import annotations

import copy
import dataclasses
import re
from itertools import pairwise
from typing import Any, get_args

import pytest

from lavra.errors import PreflightError, UsageError
from lavra.hardware.probe import Machine
from lavra.model.config import ModelConfig, ModelShape
from lavra.optim.config import OptimizerName
from lavra.plan.estimates import Calibration, Probe, disk_bytes, peak_memory_bytes
from lavra.plan.solve import MEMORY_SHARE, Situation, Wishes, solve
from lavra.tokenizer.config import TokenizerConfig
from lavra.units import parse_count, parse_seconds

GIB = 1 << 30
AUTO = {
    name: "auto"
    for name in (
        "seq_len",
        "batch_tokens",
        "micro_batch_size",
        "learning_rate",
        "precision",
        "compile",
        "corpus_max_bytes",
        "validation_max_bytes",
        "evaluate_max_bytes",
    )
}

DEFAULTS = {
    "optimizer": "auto",
    "warmup_fraction": 0.05,
    "decay_fraction": 0.35,
    "keep_checkpoints": 2,
}


def situation(
    *,
    time: float | None = None,
    tokens: float | None = None,
    flops: float | None = None,
    gib: float = 8,
    text_bytes: int = 200_000_000,
    compiler: str = "c++",
    model: dict[str, Any] | None = None,
    vocab_size: int | str = "auto",
    **wishes: Any,
) -> Situation:
    """A two-core machine of 150 GFLOP/s."""
    kind, value = next((k, v) for k, v in (("time", time), ("tokens", tokens), ("flops", flops)) if v)
    return Situation(
        budget_kind=kind,
        budget_value=float(value),
        model=ModelConfig(**(model or {})),
        tokenizer=TokenizerConfig(vocab_size=vocab_size),
        wishes=Wishes(**(AUTO | DEFAULTS | wishes)),
        text_bytes=text_bytes,
        machine=Machine(2, int(gib * GIB), int(gib * GIB), "cpu", "Linux", compiler),
        calibration=Calibration(
            device="cpu",
            gemm_gflops={"fp32": 150.0, "bf16": 100.0},
            precision="fp32",
            probes=(Probe(128, 1e7, 6000.0), Probe(320, 4e7, 2500.0)),
            compile_gain=1.2,
            base_bytes=GIB // 2,
        ),
        elapsed=4.0,
    )


@pytest.mark.parametrize("budget", [{"time": 300}, {"tokens": 2e7}, {"flops": 1e15}])
def test_a_plan_is_a_pure_function_of_the_situation(budget: dict) -> None:
    given = situation(**budget)
    before = copy.deepcopy(given)
    assert solve(given) == solve(situation(**budget)) == solve(given)
    assert given == before


@pytest.mark.parametrize("budget", [{"time": 300}, {"time": 3600}, {"tokens": 2e7}, {"flops": 1e15}])
def test_decisions_and_predictions_agree_with_one_another(budget: dict) -> None:
    plan = solve(situation(**budget))
    d, h, p = plan["decisions"], plan["horizon"], plan["predictions"]
    shape = ModelShape(**d["model"])
    assert d["parameters"] == p["parameters"] == shape.parameter_count()
    assert d["batch_tokens"] == d["batch_size"] * d["seq_len"] and d["seq_len"] == shape.seq_len
    assert d["gradient_accumulation"] == -(-d["batch_size"] // d["micro_batch_size"])
    assert h["tokens"] == h["steps"] * d["batch_tokens"]
    assert 1 <= d["warmup_steps"] <= h["steps"] and 1 <= h["decay"] <= h["steps"]
    assert p["flops"] == pytest.approx(shape.flops_per_token() * h["tokens"])
    assert p["peak_memory_bytes"] <= MEMORY_SHARE * 8 * GIB
    assert p["wall_seconds"] == pytest.approx(sum(p["stage_seconds"].values()))
    assert plan["basis"].keys() == p.keys() - {"stage_seconds"}
    if "time" in budget:
        assert p["wall_seconds"] == pytest.approx(budget["time"])  # the whole budget, no more
        assert h["decided"] is False
    else:
        assert h["decided"] is True
        assert h["tokens"] >= budget.get("tokens", 0)
    if "flops" in budget:
        assert p["flops"] == pytest.approx(budget["flops"], rel=0.05)


SIZES = [2 * 10**6 * 2**k for k in range(9)]  # 2M to 512M


def test_larger_models_cost_more_of_everything() -> None:
    plans = [solve(situation(tokens=1e8, gib=64, model={"size": size})) for size in SIZES]
    for name in ("parameters", "flops", "peak_memory_bytes", "disk_bytes", "wall_seconds"):
        values = [plan["predictions"][name] for plan in plans]
        assert all(a < b for a, b in pairwise(values)), name
    rates = [plan["predictions"]["tokens_per_second"] for plan in plans]
    assert all(a > b for a, b in pairwise(rates))


def test_in_a_given_time_a_larger_model_reads_fewer_tokens_and_more_time_reads_more() -> None:
    def tokens(seconds: float, size: int) -> int:
        plan = solve(situation(time=seconds, model={"size": size}, batch_tokens=4096, compile="off"))
        return plan["horizon"]["tokens"]

    by_size = [tokens(3600, size) for size in SIZES[:6]]
    by_time = [tokens(seconds, SIZES[1]) for seconds in (300, 600, 1800, 7200)]
    assert all(a > b for a, b in pairwise(by_size))
    assert all(a < b for a, b in pairwise(by_time))


def test_more_time_never_plans_a_worse_model() -> None:
    plans = [solve(situation(time=t)) for t in (60, 300, 1800, 4 * 3600)]
    bits = [plan["predictions"]["final_bpb"] for plan in plans]
    assert all(a >= b for a, b in pairwise(bits))


def test_the_choice_is_the_best_of_what_could_be_asked_for() -> None:
    chosen = solve(situation(time=600))["predictions"]["final_bpb"]
    asked = [solve(situation(time=600, model={"size": n}))["predictions"]["final_bpb"] for n in SIZES[:5]]
    assert chosen <= min(asked) + 1e-3


def test_a_token_budget_takes_the_largest_model_up_to_the_optimum_that_fits() -> None:
    roomy, tight = (solve(situation(tokens=1e9, gib=gib)) for gib in (64, 2))
    assert roomy["decisions"]["parameters"] == pytest.approx(1e9 / 20, rel=0.2)
    assert tight["predictions"]["peak_memory_bytes"] <= MEMORY_SHARE * 2 * GIB
    with pytest.raises(PreflightError):
        solve(situation(tokens=1e9, gib=2, model={"size": int(1.5 * tight["decisions"]["parameters"])}))


def test_weights_gradients_moments_are_in_the_memory_and_checkpoints_on_the_disk() -> None:
    plan = solve(situation(tokens=1e8, gib=64, model={"size": 10**8}, optimizer="adamw"))
    d, p = plan["decisions"], plan["predictions"]
    assert p["peak_memory_bytes"] > GIB // 2 + 16 * d["parameters"]
    assert p["disk_bytes"] > 2 * 12 * d["parameters"]
    shape = ModelShape(**d["model"])
    bound = situation(tokens=1).calibration

    def memory(micro: int, *, optimizer: OptimizerName = "adamw", compiled: bool = False) -> int:
        return peak_memory_bytes(shape, micro, optimizer=optimizer, compiled=compiled, calibration=bound)

    assert memory(4) - memory(2) == pytest.approx(2 * (memory(2) - memory(1)), abs=4)  # linear
    assert memory(4, compiled=True) < memory(4)
    assert memory(4) - memory(4, optimizer="sgd") == 8 * shape.parameter_count()
    for optimizer, count in (("adamw", 12), ("lion", 8)):
        two, three = (disk_bytes(shape, 0, 0, optimizer=optimizer, keep=n) for n in (2, 3))
        assert three - two == count * shape.parameter_count()


def test_windows_and_soft_caps_spare_memory_and_windows_flops() -> None:
    bound = situation(tokens=1).calibration
    plain, windowed, capped = (
        ModelShape(**solve(situation(tokens=1e7, seq_len=1024, model=limits))["decisions"]["model"])
        for limits in ({}, {"attention_window": 64}, {"attention_soft_cap": 50.0})
    )
    memory = [
        peak_memory_bytes(s, 8, optimizer="adamw", compiled=False, calibration=bound)
        for s in (plain, windowed, capped)
    ]
    assert memory[0] > memory[1] > memory[2]  # probabilities kept: causal, in a window, none
    assert windowed.flops_per_token() < plain.flops_per_token() == capped.flops_per_token()


@pytest.mark.parametrize(
    "wishes",
    [
        {},
        {"micro_batch_size": 16, "batch_tokens": 65_536},
        {"seq_len": 2048, "vocab_size": 32_768},
        {"model": {"size": 3 * 10**9, "tie_embeddings": False}},
    ],
)
def test_what_does_not_fit_in_memory_is_refused_and_the_size_named_instead_fits(wishes: dict) -> None:
    wishes = {"tokens": 1e7, "gib": 4, "model": {"size": 3 * 10**9}} | wishes
    with pytest.raises(PreflightError, match=r"needs .* to train; 4.0 GiB are available") as error:
        solve(situation(**wishes))
    named = parse_count(re.search(r"model\.size=(\S+)", error.value.hint)[1])
    assert 10**6 < named < 3 * 10**9
    model = wishes["model"]
    fits = solve(situation(**wishes | {"model": model | {"size": named}}))
    assert fits["predictions"]["peak_memory_bytes"] <= MEMORY_SHARE * 4 * GIB
    with pytest.raises(PreflightError):  # and it is near: one and a half times as large does not fit
        solve(situation(**wishes | {"model": model | {"size": int(1.5 * named)}}))


def test_when_no_size_fits_other_ways_out_are_named() -> None:
    fixed = {"d_model": 4096, "n_layers": 40}
    for wishes in (
        {"gib": 0.4},
        {"gib": 4, "model": fixed},
        {"gib": 1, "micro_batch_size": 512, "batch_tokens": 1e6},
    ):
        with pytest.raises(PreflightError) as error:
            solve(situation(tokens=1e7, **wishes))
        assert "model.size=0" not in error.value.hint and "micro_batch_size" in error.value.hint


@pytest.mark.parametrize("wishes", [{}, {"model": {"size": 10**8}}, {"compile": "model"}, {"seq_len": 2048}])
def test_too_little_time_is_refused_and_the_time_named_instead_is_enough(wishes: dict) -> None:
    with pytest.raises(PreflightError, match="a budget of 10s leaves") as error:
        solve(situation(time=10, **wishes))
    named = parse_seconds(re.search(r"budget\.time=(\S+?),", error.value.hint)[1])
    assert named > 10
    assert solve(situation(time=named, **wishes))["horizon"]["steps"] >= 40


@pytest.mark.parametrize("budget", [{"time": 600}, {"tokens": 2e7}, {"flops": 1e15}])
def test_what_the_recipe_fixes_is_kept(budget: dict) -> None:
    fixed = dict(
        seq_len=256,
        batch_tokens=8192,
        micro_batch_size=3,
        learning_rate=1.25e-3,
        precision="bf16",
        corpus_max_bytes=5_000_000,
        validation_max_bytes=70_000,
        evaluate_max_bytes=50_000,
    )
    model = {
        "d_model": 192,
        "n_layers": 5,
        "n_heads": 6,
        "n_kv_heads": 2,
        "d_ff": 500,
        "tie_embeddings": False,
        "attention_window": 256,
        "attention_soft_cap": 30.0,
    }
    d = solve(situation(**budget, vocab_size=3000, model=model, **fixed))["decisions"]
    assert {k: d[k] for k in fixed} == fixed
    assert d["vocab_size"] == d["model"]["vocab_size"] == 3000
    assert {k: d["model"][k] for k in model} == model
    assert d["batch_size"] == 32 and d["gradient_accumulation"] == 11


def test_a_micro_batch_is_never_larger_than_the_batch() -> None:
    d = solve(situation(tokens=1e7, seq_len=512, batch_tokens=1024, micro_batch_size=64))["decisions"]
    assert (d["batch_size"], d["micro_batch_size"], d["gradient_accumulation"]) == (2, 2, 1)


@pytest.mark.parametrize(
    ("width", "compile_", "tokens"), [(256, "model", 1024), (256, "off", 4096), (512, "model", 4096)]
)
def test_compiled_micro_batches_of_narrow_models_stay_in_the_cache(
    width: int, compile_: str, tokens: int
) -> None:
    wishes = {"tokens": 1e7, "seq_len": 512, "batch_tokens": 65_536, "compiler": "c++", "compile": compile_}
    d = solve(situation(**wishes, model={"d_model": width, "n_layers": 4}))["decisions"]
    assert d["micro_batch_size"] * 512 == tokens


@pytest.mark.parametrize(
    ("compiler", "wish", "expected"),
    [("", "model", "off"), ("c++", "model", "model"), ("c++", "blocks", "blocks"), ("c++", "off", "off")],
)
def test_compiling_follows_the_wish_and_the_machine(compiler: str, wish: str, expected: str) -> None:
    plan = solve(situation(time=3600, compiler=compiler, compile=wish))
    assert plan["decisions"]["compile"] == expected
    assert any("compiler" in note for note in plan["notes"]) is (not compiler)


def test_the_automatic_rate_is_that_of_the_optimizer_or_the_plan_says_it_is_not() -> None:
    plans = {name: solve(situation(tokens=1e7, optimizer=name)) for name in get_args(OptimizerName)}
    rates = {name: plan["decisions"]["learning_rate"] for name, plan in plans.items()}
    assert rates["lion"] == pytest.approx(rates["adamw"] / 5)
    warned = {name for name, plan in plans.items() if any("on another scale" in n for n in plan["notes"])}
    assert warned == {"sgd", "momentum", "nesterov", "adafactor"}
    given = solve(situation(tokens=1e7, optimizer="sgd", learning_rate=0.5))
    assert given["decisions"]["learning_rate"] == 0.5
    assert not any("on another scale" in note for note in given["notes"])


def test_muon_is_chosen_where_its_step_is_cheap_and_its_cost_is_predicted() -> None:
    shape = {"d_model": 512, "n_layers": 8}
    rates = {}
    for batch_tokens, expected in ((2048, "adamw"), (65536, "muon")):
        for wish in ("auto", "muon", "adamw"):
            plan = solve(situation(tokens=1e8, model=shape, batch_tokens=batch_tokens, optimizer=wish))
            assert plan["decisions"]["optimizer"] == (expected if wish == "auto" else wish)
            rates[batch_tokens, wish] = plan["predictions"]["tokens_per_second"]
    # About 5 d_model / batch_tokens of the blocks' own 6 FLOPs a parameter and token (square matrices: 30 R^3 / 6 R^2).
    for batch_tokens in (2048, 65536):
        slower = rates[batch_tokens, "adamw"] / rates[batch_tokens, "muon"] - 1
        assert slower == pytest.approx(5 * 512 / batch_tokens, rel=0.3)
    assert rates[65536, "auto"] == rates[65536, "muon"] and rates[2048, "auto"] == rates[2048, "adamw"]


def test_compiling_must_earn_itself_back() -> None:
    assert solve(situation(time=100))["decisions"]["compile"] == "off"
    assert solve(situation(time=400))["decisions"]["compile"] == "blocks"
    assert solve(situation(time=7200))["decisions"]["compile"] in ("blocks", "model")


def test_a_short_text_gets_a_small_vocabulary_and_short_windows() -> None:
    d = solve(situation(time=300, text_bytes=20_000))["decisions"]
    assert d["vocab_size"] <= 260 + 20_000 // 60
    assert d["seq_len"] * 8 <= 20_000 / 3.4 + 1
    plan = solve(situation(time=3600, text_bytes=1_000_000))
    assert any("passes" in note and "over the text" in note for note in plan["notes"])


def test_a_run_that_inherits_keeps_the_shape_it_starts_from(tiny_shape) -> None:
    shape = tiny_shape()
    plan = solve(dataclasses.replace(situation(time=300), inherited=shape))
    assert plan["decisions"]["model"] == shape.model_dump()


def test_impossible_overrides_are_a_mistake_of_the_recipe() -> None:
    with pytest.raises(UsageError, match="no decoder has"):
        solve(situation(time=300, model={"d_model": 64, "n_heads": 5}))
