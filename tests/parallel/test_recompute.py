"""Oracle: the same model that keeps everything."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lavra.batch import Batch
from lavra.optim.build import OptimizerSettings, build_optimizer
from lavra.parallel.recompute import apply_recompute
from lavra.train.layers import LayerStatistics
from lavra.train.step import accumulate


def batch() -> Batch:
    tokens, targets = torch.randint(1, 48, (2, 4, 16), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(16).expand(4, -1)
    return Batch(tokens, targets, positions, torch.ones(4, 16, dtype=torch.bool), torch.arange(4))


@pytest.mark.parametrize(
    ("policy", "forwards"),
    [("none", [1, 1, 1]), ("full", [2, 2, 2]), (2, [2, 1, 2]), ("selective", [2, 2, 2])],
)
def test_recomputing_changes_no_bit_and_happens_where_it_was_asked_for(tiny_model, policy, forwards) -> None:
    plain, model = tiny_model(n_layers=3), tiny_model(n_layers=3)
    names = [name for name, _ in model.named_parameters()]
    apply_recompute(model, policy)
    assert [name for name, _ in model.named_parameters()] == names
    seen = [0, 0, 0]
    for number, block in enumerate(model.blocks):

        def count(module, inputs, number=number) -> None:
            seen[number] += 1

        block.feed_forward.register_forward_pre_hook(count)
    expected = accumulate(plain, batch(), micro_batch_size=4, precision="fp32")
    assert accumulate(model, batch(), micro_batch_size=4, precision="fp32").loss == expected.loss
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)
    assert seen == forwards


@pytest.mark.parametrize("policy", ["full", 2, "selective"])
def test_recomputing_runs_no_side_effect_of_a_block_twice_and_statistics_stay_the_same(
    tiny_model, policy
) -> None:
    """torchtitan#1593: counts taken in the forward pass were doubled. What watches a block hangs outside of it."""

    def watched(chosen) -> dict:
        model, seen = tiny_model(n_layers=3), []
        apply_recompute(model, chosen)
        for number, block in enumerate(model.blocks):
            block.register_forward_pre_hook(lambda module, inputs, number=number: seen.append(number))
            block.register_forward_hook(lambda module, inputs, output, number=number: seen.append(number))
        optimizer = build_optimizer(model, OptimizerSettings())
        statistics = LayerStatistics(1, "fp32")
        accumulate(model, batch(), micro_batch_size=2, precision="fp32")
        assert seen == [0, 0, 1, 1, 2, 2] * 2
        statistics.before(1, model, batch())
        optimizer.step()
        assert seen == [0, 0, 1, 1, 2, 2] * 3
        return statistics.after(1, model)

    found = watched(policy)
    assert found == watched("none")
    assert {"grad_norm", "update_ratio", "activation_rms"} <= found["layers"]["blocks.1"].keys()


def test_selective_recomputation_multiplies_matrices_only_once(tiny_model) -> None:
    def flops(policy) -> int:
        model = tiny_model()
        apply_recompute(model, policy)
        with FlopCounterMode(display=False) as counter:  # sees what runs, not what is answered from memory
            accumulate(model, batch(), micro_batch_size=4, precision="fp32")
        return counter.get_total_flops()

    assert flops("selective") == flops("none") < flops("full")
