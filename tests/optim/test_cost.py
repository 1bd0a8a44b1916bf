"""Oracles: torch's own FLOP counter around a real step, and the state that real optimizers keep."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lavra.model.decoder import build_decoder
from lavra.optim.build import OptimizerSettings, build_optimizer
from lavra.optim.config import OptimizerName
from lavra.optim.cost import orthogonalization_flops, state_count, step_flops
from lavra.optim.muon import orthogonalize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [16, 23, 24, 80])  # on both sides of one and a half times the rows
def test_orthogonalization_costs_what_torch_counts(columns: int, dtype: torch.dtype) -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.randn(1, 16, columns, dtype=dtype))
    gram = dtype == torch.float32
    assert counter.get_total_flops() == orthogonalization_flops(16, columns, gram=gram)
    assert orthogonalization_flops(columns, 16, gram=gram) == orthogonalization_flops(16, columns, gram=gram)


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_a_step_and_its_state_cost_what_a_real_one_does(name: OptimizerName, tiny_shape) -> None:
    if name == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    shape = tiny_shape(d_model=128, n_heads=4, n_kv_heads=2, d_ff=320, vocab_size=2048, n_layers=2)
    model = build_decoder(shape, seed=0)
    optimizer = build_optimizer(model, OptimizerSettings(name=name))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    rank_one = (
        4 * shape.parameter_count() if name == "adafactor" else 0
    )  # its second moments, element-wise work
    assert counter.get_total_flops() == pytest.approx(step_flops(shape, name, gram=True), abs=rank_one)
    kept = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values()) / 4
    # Adafactor's rows and columns, step counters, and 8-bit tables and small tensors kept whole.
    assert kept == pytest.approx(state_count(shape, name), abs=0.05 * shape.parameter_count())
