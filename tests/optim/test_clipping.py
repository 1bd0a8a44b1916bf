"""Oracle: the norm of all gradients laid end to end."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lavra.optim.clipping import clip_gradients


def with_gradients(*values: list[float]) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(len(v))) for v in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.tensor(value)
    return [*parameters, nn.Parameter(torch.zeros(1))]  # one without gradient


def laid_out(parameters: list[nn.Parameter]) -> torch.Tensor:
    return torch.cat([p.grad for p in parameters if p.grad is not None])


@pytest.mark.parametrize("kind", ["norm", "value"])
def test_clipping_clips_what_a_generator_yields(kind) -> None:
    """A generator is empty after the norm (torchtitan PR#1258)."""
    parameters = with_gradients([3.0, 0.5], [-4.0])
    before = clip_gradients((p for p in parameters), kind, 1.0)
    assert float(before) == pytest.approx(math.sqrt(25.25))
    expected = torch.tensor([3.0, 0.5, -4.0])
    expected = expected.clamp(-1, 1) if kind == "value" else expected / math.sqrt(25.25)
    torch.testing.assert_close(laid_out(parameters), expected)


@pytest.mark.parametrize("kind", ["norm", "value", "off"])
@pytest.mark.parametrize("limit", [1.0, 10.0])
def test_the_norm_returned_is_the_one_before(kind, limit: float) -> None:
    parameters = with_gradients([3.0], [-4.0])
    assert float(clip_gradients(parameters, kind, limit)) == 5.0
    untouched = kind == "off" or limit == 10.0
    assert torch.equal(laid_out(parameters), torch.tensor([3.0, -4.0])) is untouched


@pytest.mark.parametrize("kind", ["norm", "value", "off"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_not_finite_leaves_all_gradients_as_they_are(kind, bad: float) -> None:
    parameters = with_gradients([3.0, bad], [-4.0])
    assert not math.isfinite(float(clip_gradients(parameters, kind, 1.0)))
    expected = torch.tensor([3.0, bad, -4.0])
    torch.testing.assert_close(laid_out(parameters), expected, rtol=0, atol=0, equal_nan=True)


def test_without_gradients_the_norm_is_zero() -> None:
    assert float(clip_gradients([nn.Parameter(torch.zeros(2))], "norm", 1.0)) == 0.0
