"""Oracle: figures published for the Chinchilla replication (Besiroglu et al. 2024, arXiv 2404.10102)."""

from __future__ import annotations

import pytest

from lavra.laws.loss import chinchilla_loss, predict_bits_per_byte


def test_loss_at_chinchillas_budget_equals_the_published_fit() -> None:
    # 5.76e23 FLOPs: the fit's optimum is 72.25B parameters on 1.329T tokens with a loss of 1.9744.
    assert chinchilla_loss(72.25e9, 1.329e12) == pytest.approx(
        1.9744, abs=5e-4
    )  # printed constants are rounded
    # Terms one by one: without bounds the irreducible loss remains (1.82 in the paper's table).
    assert chinchilla_loss(1e40, 1e40) == pytest.approx(1.8169, abs=1e-4)
    assert chinchilla_loss(1, 1e40) - chinchilla_loss(1e40, 1e40) == pytest.approx(482.01, rel=1e-6)
    assert chinchilla_loss(1e40, 1) - chinchilla_loss(1e40, 1e40) == pytest.approx(2085.43, rel=1e-6)


@pytest.mark.parametrize(("flops", "parameters"), [(1e21, 2.778e9), (5.76e23, 72.25e9), (1e25, 312.1e9)])
def test_the_best_size_for_a_budget_equals_the_published_allocation(flops: float, parameters: float) -> None:
    ladder = [parameters * 1.01**k for k in range(-60, 61)]
    best = min(ladder, key=lambda n: chinchilla_loss(n, flops / 6 / n))
    assert best == pytest.approx(parameters, rel=0.02)


def test_more_parameters_and_more_text_never_predict_worse() -> None:
    for law in (chinchilla_loss, lambda n, d: predict_bits_per_byte(n, d)[0]):
        values = [[law(10**n, 10**d) for d in (5, 6, 7, 8, 9, 12)] for n in (5, 6, 7, 8, 11)]
        assert all(row == sorted(row, reverse=True) for row in values)
        assert all(list(column) == sorted(column, reverse=True) for column in zip(*values, strict=True))


def test_a_large_run_is_predicted_by_chinchilla_and_a_tiny_one_by_token_frequencies() -> None:
    # Published loss 1.9744 nats a token, at 4.2 bytes a token; the reducible part is small, so it hardly bends.
    bits, sentence = predict_bits_per_byte(72.25e9, 1.329e12)
    assert bits == pytest.approx(1.9744 / 0.693147 / 4.2, abs=0.005)
    assert "beyond" in sentence and "beyond" not in predict_bits_per_byte(1e9, 1e10)[1]
    assert 2.8 < predict_bits_per_byte(1e5, 1e3)[0] < 3.3


def test_bending_the_law_does_not_move_the_best_size_for_a_budget() -> None:
    sizes = [10 ** (e / 20) for e in range(100, 180)]
    for flops in (1e13, 1e17, 1e19):
        plain = min(sizes, key=lambda n: chinchilla_loss(n, flops / 6 / n))
        assert min(sizes, key=lambda n: predict_bits_per_byte(n, flops / 6 / n)[0]) == plain
