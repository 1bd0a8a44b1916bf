"""Oracle: torch's AdamW with fp32 moments."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lavra.errors import PreflightError
from lavra.optim.build import OptimizerSettings, build_optimizer, set_learning_rate

TEXT = Path(__file__).parents[2] / "LICENSE"


def losses(tiny_model, name, steps: int) -> list[float]:
    """Next-byte losses of a small decoder on this repository's licence, the same batches for any optimizer."""
    model = tiny_model(
        vocab_size=128, d_model=64, d_ff=128, n_heads=4, n_kv_heads=4, seq_len=32, tie_embeddings=False
    )
    data = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    optimizer = build_optimizer(model, OptimizerSettings(name, learning_rate=1e-3))
    generator = torch.Generator().manual_seed(0)
    found = []
    for step in range(steps):
        set_learning_rate(optimizer, min(1.0, (step + 1) / 20))
        starts = torch.randint(len(data) - 33, (16, 1), generator=generator)
        windows = data[starts + torch.arange(33)]
        logits = model(windows[:, :-1], torch.arange(32).expand(16, -1))
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def test_training_stays_within_a_percent_of_fp32_moments(tiny_model) -> None:
    """At every step. At three times this rate training is chaotic: single losses then differ by 5 %, both ways."""
    pytest.importorskip("bitsandbytes")
    exact, coded = (losses(tiny_model, name, 150) for name in ("adamw", "adamw8bit"))
    assert exact[-1] < 0.6 * exact[0]
    assert coded != exact  # moments really are coded
    assert coded == pytest.approx(exact, rel=0.01)


def test_large_tensors_have_codes_and_small_ones_fp32(tiny_model) -> None:
    pytest.importorskip("bitsandbytes")
    model = tiny_model(vocab_size=128, d_model=64, n_heads=4, n_kv_heads=4)
    optimizer = build_optimizer(model, OptimizerSettings("adamw8bit"))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kinds = {p.numel() >= 4096: optimizer.state[p]["state1"].dtype for p in model.parameters()}
    assert kinds == {True: torch.uint8, False: torch.float32}


def test_without_bitsandbytes_it_says_what_to_install(tiny_model, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.delitem(sys.modules, "lavra.optim.eight_bit", raising=False)
    with pytest.raises(PreflightError, match="needs bitsandbytes") as caught:
        build_optimizer(tiny_model(), OptimizerSettings("adamw8bit"))
    assert caught.value.hint == 'pip install "lavra[8bit]"'
