"""Oracle: every statistic written out with loops and plain cross entropy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lavra.batch import Batch
from lavra.metrics import read_jsonl
from lavra.model.attention import document_starts_from_positions
from lavra.train.horizon import Horizon
from lavra.train.layers import LayerStatistics, activation_statistics
from lavra.train.loop import train
from lavra.train.signals import StopRequest


@pytest.fixture
def batch(sampler):
    """Three sequences; the first, which is looked at, holds more than one document."""
    chosen = next(s for s in range(50) if (sampler.batch(np.array([s])).positions == 0).sum() >= 3)
    return sampler.batch(np.array([chosen, chosen + 1, chosen + 2]))


def layer_of(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]


def backward(model, batch) -> None:
    logits = model(batch.tokens, batch.positions)
    F.cross_entropy(logits[batch.loss_mask], batch.targets[batch.loss_mask]).backward()


def flat(tensors) -> torch.Tensor:
    return torch.cat([t.detach().double().flatten() for t in tensors])


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_weights_and_updates_are_those_of_the_step(tiny_model, batch, tied: bool) -> None:
    model = tiny_model(scale=4.0, tie_embeddings=tied)
    observer = LayerStatistics(1, "fp32")
    backward(model, batch)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    streams = []
    hook = model.blocks[1].register_forward_hook(lambda module, inputs, output: streams.append(output[0]))
    with torch.no_grad():
        model(batch.tokens[:1], batch.positions[:1])
    hook.remove()
    largest = float(streams[0].abs().max())
    observer.before(1, model, batch)
    torch.optim.AdamW(model.parameters(), lr=0.02).step()
    found = observer.after(1, model)["layers"]
    assert found["blocks.1"]["activation_max"] == pytest.approx(largest, rel=1e-4)
    after = dict(model.named_parameters())
    names = list(dict.fromkeys(map(layer_of, before)))
    assert names == ["embedding", "blocks.0", "blocks.1", "norm"] + ([] if tied else ["head"])
    assert list(found) == names
    for layer in names:
        mine = [n for n in before if layer_of(n) == layer]
        weights = flat(before[n] for n in mine)
        change = flat(after[n] for n in mine) - weights
        expected = {
            "grad_norm": flat(gradients[n] for n in mine).norm(),
            "weight_rms": weights.square().mean().sqrt(),
            "update_ratio": change.norm() / weights.norm(),
        }
        for value, number in expected.items():
            assert found[layer][value] == pytest.approx(float(number), rel=2e-4), (layer, value)


def rope(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """`[T, E]` rotated as complex numbers, pairs (i, i + E/2)."""
    half = x.shape[1] // 2
    pairs = torch.complex(x[:, :half], x[:, half:])
    angles = positions[:, None].double() * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], 1)


def largest_logits(model, tokens, positions, inputs) -> tuple[float, float]:
    """Largest |q k| / sqrt(E) over the keys that are visible, and over all keys; inputs `[T, D]` of one attention."""
    attention, shape = inputs[1], model.shape
    x = inputs[0].double()
    rows = x @ attention.qkv.weight.detach().double().T
    width, heads, kv = shape.d_model // shape.n_heads, shape.n_heads, shape.n_kv_heads
    visible = everything = 0.0
    for head in range(heads):
        own = head // (heads // kv)
        q = rope(rows[:, head * width : (head + 1) * width], positions, shape.rope_theta)
        at = (heads + own) * width
        k = rope(rows[:, at : at + width], positions, shape.rope_theta)
        for i in range(len(tokens)):
            for j in range(len(tokens)):
                logit = abs(float(q[i] @ k[j])) / math.sqrt(width)
                everything = max(everything, logit)
                if i - int(positions[i]) <= j <= i:
                    visible = max(visible, logit)
    return visible, everything


@pytest.mark.parametrize("sign", [1, -1])
def test_activations_and_attention_logits_are_those_of_the_first_sequence(
    tiny_model, batch, sign: int
) -> None:
    model = tiny_model(scale=6.0)
    with torch.no_grad():
        model.embedding.weight *= sign  # every value of the stream has the other sign: the norms are odd
        for block in model.blocks:
            block.attention_norm.weight *= sign
            block.feed_forward_norm.weight *= sign
            block.attention.out.weight *= sign
            block.feed_forward.out.weight *= sign
    streams, attentions = [], []
    hooks = [b.register_forward_hook(lambda m, i, o: streams.append((i[0][0], o[0]))) for b in model.blocks]
    hooks += [
        b.attention.register_forward_hook(lambda m, i, o: attentions.append((i[0][0], m)))
        for b in model.blocks
    ]
    with torch.no_grad():
        model(batch.tokens[:1], batch.positions[:1])
    for hook in hooks:
        hook.remove()
    found = activation_statistics(model, batch.split(1)[0], "fp32")
    hidden = 0
    for number, ((before, after), inputs) in enumerate(zip(streams, attentions, strict=True)):
        before, after, values = before.double(), after.double(), found[f"blocks.{number}"]
        assert values["activation_rms"] == pytest.approx(float(after.square().mean().sqrt()), rel=1e-4)
        assert values["activation_max"] == pytest.approx(float(after.abs().max()), rel=1e-4)
        added = (after - before).square().mean().sqrt() / before.square().mean().sqrt()
        assert values["contribution"] == pytest.approx(float(added), rel=1e-4)
        visible, everything = largest_logits(model, batch.tokens[0], batch.positions[0], inputs)
        assert values["attention_logit"] == pytest.approx(visible, rel=1e-4)
        hidden += everything > 1.01 * visible
    assert hidden  # some key that may not be seen would have been larger


def test_only_the_first_step_and_multiples_are_looked_at() -> None:
    observer = LayerStatistics(50, "fp32")
    assert [s for s in range(1, 151) if observer.due(s)] == [1, 50, 100, 150]
    assert not any(LayerStatistics(0, "fp32").due(s) for s in range(1, 100))


def test_looking_changes_nothing_and_is_recorded(tmp_path, tiny_model, sampler, settings) -> None:
    def run(name: str, observer):
        horizon = Horizon(steps=9, decay=3, decided=True)
        model = tiny_model()
        train(
            model,
            sampler,
            settings(),
            horizon,
            run_dir=tmp_path / name,
            stop=StopRequest(),
            observer=observer,
        )
        return model, list(read_jsonl(tmp_path / name / "metrics.jsonl"))

    plain, records = run("plain", None)
    watched, seen = run("watched", LayerStatistics(4, "fp32"))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
    assert [r["train/loss"] for r in records] == [r["train/loss"] for r in seen]
    assert [r["step"] for r in seen if "layers" in r] == [1, 4, 8]
    assert all(math.isfinite(v) for r in seen for s in r.get("layers", {}).values() for v in s.values())


@torch.no_grad()
@pytest.mark.parametrize("window", [0, 1, 4])
@pytest.mark.parametrize("soft_cap", [0, 1.0])
def test_the_largest_attention_logit_is_that_of_a_visible_pair_before_the_soft_cap(
    tiny_model, window: int, soft_cap: float
) -> None:
    model = tiny_model(scale=8, attention_window=window, attention_soft_cap=soft_cap)
    tokens = torch.randint(48, (1, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(7), torch.arange(9)])[None]
    batch = Batch(
        tokens, tokens, positions, torch.ones(1, 16, dtype=torch.bool), torch.zeros(1, dtype=torch.long)
    )
    found = activation_statistics(model, batch, "fp32")
    rope, stream = model.rotary(positions), model.embedding(tokens)
    for number, block in enumerate(model.blocks):
        q, k, _ = block.attention.project(block.attention_norm(stream), rope)
        pairs = [
            abs(float(q[0, head, i] @ k[0, head // 2, j])) / math.sqrt(6)
            for head in range(4)
            for first, last in ((0, 7), (7, 16))
            for i in range(first, last)
            for j in range(first, i + 1)
            if not window or i - j < window
        ]
        assert found[f"blocks.{number}"]["attention_logit"] == pytest.approx(max(pairs), rel=1e-5)
        stream = block(stream, rope, document_starts_from_positions(positions))
