"""Oracle: torch's cross entropy over whole logits, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from lavra.objective import cross_entropy
from lavra.objective.cross_entropy import IGNORED, linear_cross_entropy


def case(rows: int, width: int, vocab: int, ignored: float, seed: int, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=draw, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=draw, dtype=dtype).requires_grad_()
    targets = torch.randint(vocab, (rows,), generator=draw)
    targets[torch.rand(rows, generator=draw) < ignored] = IGNORED
    return hidden, weight, targets


def truth(hidden, weight, targets):
    loss = F.cross_entropy(hidden @ weight.T, targets, ignore_index=IGNORED, reduction="sum")
    return loss, torch.autograd.grad(loss * 0.3, (hidden, weight))


@given(
    rows=st.integers(1, 200),
    width=st.integers(1, 9),
    vocab=st.integers(1, 70),
    ignored=st.sampled_from([0.0, 0.4, 1.0]),
    seed=st.integers(0, 9),
)
def test_loss_and_gradients_of_every_shape_in_chunks(rows, width, vocab, ignored, seed) -> None:
    hidden, weight, targets = case(rows, width, vocab, ignored, seed)  # chunks of 64 rows: see the fixture
    loss = linear_cross_entropy(hidden, weight, targets)
    gradients = torch.autograd.grad(loss * 0.3, (hidden, weight))
    exact, exact_gradients = truth(hidden, weight, targets)
    torch.testing.assert_close(loss, exact)
    torch.testing.assert_close(gradients, exact_gradients)


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "_CPU_CHUNK", 64)
        yield


def test_huge_logits_stay_finite() -> None:
    hidden, weight, targets = case(5, 4, 7, 0.0, 0)
    loss = linear_cross_entropy(hidden * 1e4, weight, targets)
    exact, _ = truth(hidden * 1e4, weight, targets)
    assert loss.isfinite()
    torch.testing.assert_close(loss, exact)


def test_a_loss_that_is_not_finite_is_not_hidden() -> None:
    hidden, weight, targets = case(5, 4, 7, 0.0, 0)
    with torch.no_grad():
        hidden[2, 1] = float("nan")
    assert linear_cross_entropy(hidden, weight, targets).isnan()


def test_bf16_products_are_summed_in_fp32() -> None:
    """A gradient summed over many chunks in bf16 would lose what is smaller than 1/256 of the sum."""
    hidden, weight, targets = case(4096, 8, 16, 0.0, 1, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets)
    assert loss.dtype == torch.float32
    found = torch.autograd.grad(loss * 0.3, weight)[0]
    exact, (_, d_weight) = truth(hidden.double(), weight.double(), targets)
    assert loss.item() == pytest.approx(exact.item(), rel=2e-3)
    assert found.dtype == torch.float32
    assert (found - d_weight).norm() < 5e-3 * d_weight.norm()


def test_without_gradients_only_the_loss_is_computed() -> None:
    hidden, weight, targets = case(100, 4, 7, 0.2, 3)
    expected = linear_cross_entropy(hidden, weight, targets)
    with torch.no_grad():
        loss, *gradients = cross_entropy._linear_cross_entropy(hidden, weight, targets, False)
        assert linear_cross_entropy(hidden, weight, targets) == loss
    assert loss == expected.detach()
    assert [gradient.numel() for gradient in gradients] == [0, 0]


@pytest.mark.parametrize("needs_grad", [True, False])
def test_the_op_keeps_the_promises_that_compilation_relies_on(needs_grad: bool) -> None:
    hidden, weight, targets = case(70, 4, 7, 0.2, 3, torch.float32)
    hidden, weight = (x.detach().requires_grad_(needs_grad) for x in (hidden, weight))
    torch.library.opcheck(cross_entropy._linear_cross_entropy, (hidden, weight, targets, needs_grad))
