"""Oracles: Muon written out in float64 with one matrix at a time; torch.optim.Muon and AdamW; the SVD."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from lavra.optim.build import OptimizerSettings, build_optimizer, set_learning_rate
from lavra.optim.muon import Muon, orthogonalize

SHAPES = [(24, 24), (16, 40), (40, 16), (8, 24)]  # square, Gram form, tall, very wide


def conditioned(rows: int, columns: int, generator: torch.Generator, smallest: float = 0.2) -> Tensor:
    """A random matrix whose singular values lie between `smallest` and 1, as many in each octave.

    fp32 cannot tell a singular value of 1e-7 of the norm from none, and five steps multiply such a
    direction by 500; so a comparison with float64 to 1e-5 is only fair where there are none.
    """
    rank = min(rows, columns)
    left, _ = torch.linalg.qr(torch.randn(rows, rank, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(columns, rank, generator=generator, dtype=torch.float64))
    return (left * torch.logspace(math.log10(smallest), 0, rank)) @ right.T


def newton_schulz(x: Tensor) -> Tensor:
    """One matrix, five steps, as Jordan 2024 writes them, in float64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x.double() / x.double().norm()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def gradient_sequence(rows: int, columns: int, steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows * columns)
    base = conditioned(rows, columns, generator)
    noise = [torch.randn(rows, columns, generator=generator, dtype=torch.float64) for _ in range(steps)]
    return [(base * 10 ** (t % 3 - 2) + 1e-4 * noise[t]).float() for t in range(steps)]


def muon(parameters: list[nn.Parameter], splits: list[tuple[int, ...]], **settings) -> Muon:
    return Muon([{"params": parameters, "algorithm": "muon", "splits": splits, **settings}])


@pytest.mark.parametrize("splits", [(24,), (8, 10, 6)])
@pytest.mark.parametrize("columns", [10, 24, 60])
def test_a_hundred_steps_equal_muon_written_out(columns: int, splits: tuple[int, ...]) -> None:
    pieces = [gradient_sequence(rows, columns, 100) for rows in splits]
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(sum(splits), columns, generator=generator))
    reference = list(parameter.detach().double().split(splits))
    buffers = [torch.zeros_like(r) for r in reference]
    optimizer = muon([parameter], [splits], weight_decay=0.1, momentum=0.9)
    for step in range(100):
        rate = 0.02 * (1 + math.cos(step / 10)) / 2
        optimizer.param_groups[0]["lr"] = rate
        parameter.grad = torch.cat([piece[step] for piece in pieces])
        for i, rows in enumerate(splits):
            g = pieces[i][step].double()
            buffers[i] = 0.9 * buffers[i] + 0.1 * g
            update = newton_schulz(0.9 * buffers[i] + 0.1 * g)
            reference[i] = reference[i] * (1 - rate * 0.1)
            reference[i] = reference[i] - rate * 0.2 * math.sqrt(max(rows, columns)) * update
        optimizer.step()
    expected = torch.cat(reference)
    assert float((parameter.detach() - expected).norm() / expected.norm()) <= 1e-5


def test_it_equals_torch_muon_as_far_as_bf16_goes() -> None:
    """torch's runs its Newton-Schulz in bf16: 8 bits a step, so 2 % of what the weights moved."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in SHAPES]
    ours, theirs = ([nn.Parameter(s.clone()) for s in start] for _ in range(2))
    settings = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}
    optimizers = [
        muon(ours, [(r,) for r, _ in SHAPES], **settings),
        torch.optim.Muon(theirs, **settings, adjust_lr_fn="match_rms_adamw"),
    ]
    sequences = [gradient_sequence(*shape, 100) for shape in SHAPES]
    for step in range(100):
        for i, sequence in enumerate(sequences):
            ours[i].grad, theirs[i].grad = sequence[step].clone(), sequence[step].clone()
        for optimizer in optimizers:
            optimizer.step()
    for mine, other, before in zip(ours, theirs, start, strict=True):
        assert (mine - other).norm() <= 0.02 * (other - before).norm()


def test_a_stacked_weight_takes_the_steps_of_its_matrices_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(32, 16, generator=generator)
    gradient = torch.randn(32, 16, generator=generator)
    splits = (16, 8, 8)  # queries, keys, values
    stacked, together = nn.Parameter(whole.clone()), nn.Parameter(whole.clone())
    alone = [nn.Parameter(w.clone()) for w in whole.split(splits)]
    stacked.grad, together.grad = gradient.clone(), gradient.clone()
    for parameter, g in zip(alone, gradient.split(splits), strict=True):
        parameter.grad = g.clone()
    muon([stacked], [splits]).step()
    muon(alone, [(16,), (8,), (8,)]).step()
    muon([together], [(32,)]).step()
    torch.testing.assert_close(stacked.detach(), torch.cat([p.detach() for p in alone]))
    assert (stacked - together).norm() > 0.1 * (stacked - whole).norm()


@pytest.mark.parametrize(("rows", "columns"), [(24, 24), (16, 40), (8, 64)])
def test_orthogonalising_keeps_singular_vectors_and_levels_singular_values(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    stack = torch.stack([conditioned(rows, columns, generator) for _ in range(3)])
    found = orthogonalize(stack.float()).double()
    u, _, vt = torch.linalg.svd(stack, full_matrices=False)
    levelled = u.mT @ found @ vt.mT
    values = levelled.diagonal(dim1=1, dim2=2)
    assert ((values > 0.6) & (values < 1.3)).all()
    assert (levelled - values.diag_embed()).norm() <= 1e-5 * levelled.norm()


@pytest.mark.parametrize(("rows", "columns"), [(24, 24), (24, 40)])
def test_a_gradient_of_low_rank_or_zero_gives_a_finite_update(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    thin = torch.randn(rows, 2, generator=generator) @ torch.randn(2, columns, generator=generator)
    found = orthogonalize(torch.stack([thin, torch.zeros(rows, columns)]))
    torch.testing.assert_close(found[0].double(), newton_schulz(thin), rtol=0, atol=1e-4)
    assert not found[1].any()


def test_bf16_keeps_to_the_standard_form_which_survives_it() -> None:
    """Squared, small singular values drown in 8 bits; the Gram form would then grow without bound."""
    generator = torch.Generator().manual_seed(0)
    wide = conditioned(32, 256, generator, smallest=1e-3).float()[None]
    found = orthogonalize(wide.bfloat16())
    assert found.dtype == torch.bfloat16
    assert float(torch.linalg.matrix_norm(found.float(), 2)) < 1.5


def test_what_is_no_matrix_takes_the_steps_of_adamw(tiny_model) -> None:
    ours, theirs = tiny_model(tie_embeddings=False), tiny_model(tie_embeddings=False)
    optimizer = build_optimizer(ours, OptimizerSettings("muon", learning_rate=1e-2, betas=(0.8, 0.9)))
    left = {n for g in optimizer.param_groups[1:] for n in g["param_names"]}
    assert left == {n for n, _ in ours.named_parameters() if "norm" in n or n in ADAMW_MATRICES}
    oracle = build_optimizer(theirs, OptimizerSettings("adamw", learning_rate=1e-2, betas=(0.8, 0.9)))
    generator = torch.Generator().manual_seed(0)
    for step in range(100):
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        for each in (optimizer, oracle):
            set_learning_rate(each, 1 - step / 100)
            each.step()
    others = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, others[name]) is (name in left)


ADAMW_MATRICES = ("embedding.weight", "head.weight")


def test_how_many_matrices_lie_in_a_stack_changes_nothing(monkeypatch) -> None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(24, 16, generator=generator) for _ in range(5)]
    found = []
    for size in (1, 2 * 24 * 16, 1 << 20):  # one, two and all a stack
        monkeypatch.setattr("lavra.optim.muon._STACK_ON_CPU", size)
        parameters = [nn.Parameter(s.clone()) for s in start]
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
        muon(parameters, [(24,)] * 5).step()
        found.append(torch.stack([p.detach() for p in parameters]))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def test_a_matrix_without_gradient_stays_where_it_is() -> None:
    moved, still = (nn.Parameter(torch.eye(4)) for _ in range(2))
    optimizer = muon([moved, still], [(4,), (4,)], weight_decay=0.1)
    moved.grad = torch.eye(4)
    optimizer.step()
    assert torch.equal(still, torch.eye(4)) and not torch.equal(moved, still)
    assert not optimizer.state[still]
