"""Oracle: the mean cross entropy over all unmasked targets, in one piece, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lavra.batch import Batch
from lavra.objective.causal import causal_numerator
from lavra.train.step import accumulate, validation_loss


def batch_with(unmasked: list[int], seed: int = 0) -> Batch:
    """Row i has `unmasked[i]` targets that count."""
    tokens, targets = torch.randint(
        1, 48, (2, len(unmasked), 16), generator=torch.Generator().manual_seed(seed)
    )
    mask = torch.arange(16) < torch.tensor(unmasked)[:, None]
    positions = torch.arange(16).expand(len(unmasked), -1)
    return Batch(tokens, targets, positions, mask, torch.arange(len(unmasked)))


def truth(tiny_model, batch: Batch) -> tuple[float, list[torch.Tensor]]:
    model = tiny_model(scale=3).double()
    logits = model(batch.tokens, batch.positions)
    loss = F.cross_entropy(logits[batch.loss_mask], batch.targets[batch.loss_mask])
    return loss.item(), list(torch.autograd.grad(loss, list(model.parameters())))


def run(tiny_model, batch: Batch, micro_batch_size: int):
    model = tiny_model(scale=3)
    result = accumulate(
        model, batch, micro_batch_size=micro_batch_size, precision="fp32", numerator=causal_numerator
    )
    return result, [p.grad for p in model.parameters()]


@settings(max_examples=12, deadline=None)
@given(
    unmasked=st.lists(st.integers(0, 16), min_size=1, max_size=6).filter(any),
    micro=st.integers(1, 7),
    seed=st.integers(0, 99),
)
def test_micro_batches_of_unequal_targets_give_the_loss_and_gradients_of_the_whole(
    tiny_model, unmasked: list[int], micro: int, seed: int
) -> None:
    batch = batch_with(unmasked, seed)
    loss, gradients = truth(tiny_model, batch)
    result, found = run(tiny_model, batch, micro)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert result.targets == sum(unmasked)
    for mine, exact in zip(found, gradients, strict=True):
        assert (mine - exact).norm() <= 2e-5 * exact.norm() + 1e-7


def test_a_mean_of_means_would_be_far_off(tiny_model) -> None:
    """The mistake that the test above guards against is large here, not within its tolerance."""
    batch = batch_with([1, 16])
    loss, gradients = truth(tiny_model, batch)
    parts = [truth(tiny_model, part) for part in batch.split(1)]
    assert abs(sum(part[0] for part in parts) / 2 - loss) > 0.01 * loss
    wrong = (parts[0][1][0] + parts[1][1][0]) / 2
    assert (wrong - gradients[0]).norm() > 0.2 * gradients[0].norm()


def test_a_masked_micro_batch_does_not_poison_the_loss(tiny_model) -> None:
    batch = batch_with([0, 5, 0])
    result, gradients = run(tiny_model, batch, 1)
    loss, exact = truth(tiny_model, batch_with([0, 5, 0]))
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert all(bool(g.isfinite().all()) for g in gradients)
    torch.testing.assert_close(gradients[0].double(), exact[0], atol=1e-6, rtol=1e-4)


def test_a_step_without_any_target_is_refused_and_leaves_no_gradient(tiny_model) -> None:
    """Zero targets in the whole global step are the only case that cannot be divided (OLMo-core#657)."""
    model = tiny_model()
    with pytest.raises(ValueError, match="every position is masked"):
        accumulate(model, batch_with([0, 0]), micro_batch_size=1, precision="fp32")
    assert all(p.grad is None for p in model.parameters())


def test_masked_targets_do_not_matter(tiny_model) -> None:
    batch = batch_with([3, 9])
    other = batch.targets.where(batch.loss_mask, torch.tensor(7))
    changed = Batch(batch.tokens, other, batch.positions, batch.loss_mask, batch.sample_ids)
    (first, gradients), (second, others) = run(tiny_model, batch, 2), run(tiny_model, changed, 2)
    assert first == second
    assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))


@settings(max_examples=15, deadline=None)
@given(unmasked=st.lists(st.integers(0, 16), min_size=1, max_size=6).filter(any), size=st.integers(1, 6))
def test_validation_is_the_training_loss(tiny_model, unmasked: list[int], size: int) -> None:
    batch = batch_with(unmasked)
    model = tiny_model(scale=3)
    found = validation_loss(model, batch.split(size), precision="fp32")
    assert found == pytest.approx(run(tiny_model, batch, 3)[0].loss, rel=1e-6)
    assert all(p.grad is None for p in model.parameters())


def test_validation_weighs_tokens_not_batches_of_unequal_size_and_length(tiny_model) -> None:
    """torchtitan#4167: a mean of batch means gave 6.0 where 9.2 was true; others drop the last batch or a masked one."""
    parts = [
        batch_with([16, 16, 16], 1),
        batch_with([0], 2),
        batch_with([2, 16], 3).cut(4),
        batch_with([1], 4),
    ]
    model = tiny_model(scale=3)
    found = validation_loss(model, parts, precision="fp32")
    sums, counts = zip(
        *((truth(tiny_model, p)[0] * n, n) for p in parts if (n := int(p.loss_mask.sum()))), strict=True
    )
    assert found == pytest.approx(sum(sums) / sum(counts), rel=1e-5)
    assert found == pytest.approx(validation_loss(model, parts[::-1], precision="fp32"), rel=1e-6)
    means = [s / n for s, n in zip(sums, counts, strict=True)]
    assert abs(found - sum(means) / len(means)) > 0.005 * found  # the mistake would be seen


def test_bf16_computes_near_fp32_and_keeps_fp32_gradients(tiny_model) -> None:
    batch, model = batch_with([16, 9, 4]), tiny_model(scale=3)
    result = accumulate(model, batch, micro_batch_size=2, precision="bf16", numerator=causal_numerator)
    loss, gradients = truth(tiny_model, batch)
    assert result.loss == pytest.approx(loss, rel=0.02) and result.loss != pytest.approx(loss, rel=1e-6)
    for parameter, exact in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad.dtype == torch.float32
        assert (parameter.grad - exact).norm() <= 0.1 * exact.norm()
