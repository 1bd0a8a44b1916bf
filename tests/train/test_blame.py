"""Oracle: faults put into a known sequence, layer or direction."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lavra.objective.causal import causal_numerator
from lavra.train import blame as room
from lavra.train.blame import blame, event_text


def judged(model, sampler, samples=range(6), *, non_finite=False, micro_batch_size=4, **options):
    batch = sampler.batch(np.array(samples))
    return blame(
        model, batch, sampler,
        micro_batch_size=micro_batch_size, seq_len=16, precision="fp32", non_finite=non_finite, **options,
    )  # fmt: skip


@pytest.fixture
def harm(monkeypatch):
    """`harm({sample: factor})`: the loss of these sequences is multiplied."""

    def spoil(factors: dict[int, float]) -> None:
        def numerator(model, batch):
            (sample,) = batch.sample_ids.tolist()
            return causal_numerator(model, batch) * factors.get(sample, 1.0)

        monkeypatch.setattr(room, "causal_numerator", numerator)

    return spoil


@pytest.mark.parametrize("factor", [3.0, math.nan, math.inf])
def test_a_sequence_that_stands_out_is_the_datas_fault(tiny_model, sampler, harm, factor: float) -> None:
    harm({4: factor})
    found = judged(tiny_model(), sampler)
    assert found["cause"] == "data"
    (worst,) = found["sequences"]
    assert (worst["sample"], worst["micro_batch"], worst["rank"]) == (4, 1, 0)
    assert [d["id"] for d in worst["documents"]] == [d.id for d in sampler.documents(4)]
    assert "layer" not in found


@pytest.mark.parametrize("factor", [1.0, math.nan])
def test_a_batch_that_is_bad_as_a_whole_is_the_weights_fault(
    tiny_model, sampler, harm, factor: float
) -> None:
    harm(dict.fromkeys(range(6), factor))
    assert judged(tiny_model(), sampler)["cause"] == "weights"


def test_half_a_batch_of_bad_sequences_is_the_datas_fault_and_a_batch_of_them_the_weights(
    tiny_model, sampler, harm
) -> None:
    """Around the batch's own median neither would stand out."""
    harm(dict.fromkeys(range(0, 6, 2), 2.0))
    usual = math.log(48)
    assert judged(tiny_model(), sampler)["cause"] == "weights"
    found = judged(tiny_model(), sampler, usual_loss=usual)
    assert found["cause"] == "data" and {s["sample"] for s in found["sequences"]} == {0, 2, 4}
    harm({0: 2.0, 1: 2.0, 2: 2.1, 3: 2.0, 4: 2.1, 5: 6.0})
    assert judged(tiny_model(), sampler)["cause"] == "data"
    assert judged(tiny_model(), sampler, usual_loss=usual)["cause"] == "weights"


def test_two_sequences_alike_say_nothing(tiny_model, sampler, harm) -> None:
    harm({})
    assert judged(tiny_model(), sampler, range(2))["cause"] == "unclear"
    harm({1: math.nan})
    assert judged(tiny_model(), sampler, range(2))["cause"] == "data"


def test_the_worst_come_first_and_no_more_than_three_are_named(tiny_model, sampler, harm) -> None:
    harm({1: 3.0, 2: math.nan, 5: 9.0, 7: 5.0})
    found = judged(tiny_model(), sampler, range(12))
    assert [s["sample"] for s in found["sequences"]] == [2]  # what is not finite hides what is only high
    harm({1: 3.0, 5: 9.0, 7: 5.0, 9: 2.5})
    found = judged(tiny_model(), sampler, range(12))
    assert [s["sample"] for s in found["sequences"]] == [5, 7, 1]
    assert [s["micro_batch"] for s in found["sequences"]] == [1, 1, 0]


def test_a_loss_is_that_of_its_sequence_alone(tiny_model, sampler) -> None:
    model = tiny_model(scale=4.0)
    (worst,) = judged(model, sampler, [3])["sequences"]
    one = sampler.batch(np.array([3]))
    with torch.no_grad():
        logits = model(one.tokens, one.positions)[one.loss_mask]
    expected = torch.nn.functional.cross_entropy(logits, one.targets[one.loss_mask])
    assert worst["loss"] == pytest.approx(float(expected), rel=1e-5)


def spoiled(module, kind: str) -> None:
    """`forward`: the output is not finite; `backward`: the gradient that goes on to its input is not."""

    def on_forward(_module, _inputs, output):
        return output * math.nan

    def on_backward(_module, to_input, _from_output):
        return tuple(g * math.inf if g is not None else None for g in to_input)

    module.register_forward_hook(on_forward) if kind == "forward" else module.register_full_backward_hook(
        on_backward
    )


@pytest.mark.parametrize(
    "name", ["blocks.1.attention.qkv", "blocks.0.feed_forward.out", "blocks.1.attention_norm", "norm"]
)
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_the_first_layer_that_is_not_finite_is_named_with_its_direction(
    tiny_model, sampler, name: str, kind: str
) -> None:
    model = tiny_model()
    spoiled(model.get_submodule(name), kind)
    assert judged(model, sampler, non_finite=True)["layer"] == f"{name} ({kind})"


def test_weights_that_are_not_finite_come_before_what_they_cause(tiny_model, sampler) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.blocks[1].feed_forward.out.weight[2, 3] = math.inf
    found = judged(model, sampler, non_finite=True)
    assert found["layer"] == "blocks.1.feed_forward.out.weight (weights)" and found["cause"] == "weights"
    assert "first non-finite: blocks.1.feed_forward.out.weight (weights)" in event_text("not finite", found)


def test_what_does_not_happen_again_is_said(tiny_model, sampler) -> None:
    assert judged(tiny_model(), sampler, non_finite=True)["layer"] == "none: it did not happen again"


def test_looking_for_the_cause_leaves_gradients_and_hooks_as_they_were(tiny_model, sampler) -> None:
    model = tiny_model()
    spoiled(model.blocks[0].attention.out, "backward")
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    hooks = [len(m._forward_hooks) + len(m._backward_hooks) for m in model.modules()]
    judged(model, sampler, non_finite=True)
    assert all(bool((p.grad == 7.0).all()) for p in model.parameters())
    assert [len(m._forward_hooks) + len(m._backward_hooks) for m in model.modules()] == hooks
