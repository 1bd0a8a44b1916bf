"""Which parameters decay and which are orthogonalised, by name."""

from __future__ import annotations

import pytest
from torch import nn

from lavra.optim.build import OptimizerSettings, build_optimizer, optimizer_groups
from lavra.optim.groups import describe_groups, muon_groups, parameter_groups


def names(groups: list[dict]) -> dict[str, list[str]]:
    return {g["name"]: g["param_names"] for g in groups}


@pytest.mark.parametrize("make", [parameter_groups, muon_groups])
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_in_one_group_and_only_matrices_of_layers_decay(
    tiny_model, tied: bool, make
) -> None:
    model = tiny_model(tie_embeddings=tied)
    own = dict(model.named_parameters())
    groups = make(model, 0.1)
    assert sorted(n for g in groups for n in g["param_names"]) == sorted(own)
    assert all(own[n] is p for g in groups for n, p in zip(g["param_names"], g["params"], strict=True))
    decay = {n: g["weight_decay"] for g in groups for n in g["param_names"]}
    assert decay == {n: 0.0 if "norm" in n or "embedding" in n else 0.1 for n in own}
    assert ("head.weight" in own) is not tied


def test_biases_and_foreign_embeddings_do_not_decay() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.LayerNorm(3))
    decayed, kept = ["1.weight"], ["0.weight", "1.bias", "2.weight", "2.bias"]
    assert names(parameter_groups(model, 0.1)) == {"decay": decayed, "no_decay": kept}
    assert names(muon_groups(model, 0.1)) == {"matrices": decayed, "no_decay": kept}


def test_muon_leaves_the_output_head_to_adamw_which_decays_it(tiny_model) -> None:
    groups = muon_groups(tiny_model(tie_embeddings=False), 0.1)
    assert [g["name"] for g in groups] == ["matrices", "decay", "no_decay"]
    assert [g["algorithm"] for g in groups] == ["muon", "adamw", "adamw"]
    matrices, decay, _ = groups
    assert decay["param_names"] == ["head.weight"] and decay["weight_decay"] == 0.1
    assert all(n.startswith("blocks.") and p.ndim == 2 for n, p in zip(*_named(matrices), strict=True))


def test_a_matrix_that_is_not_of_a_linear_layer_is_not_orthogonalised() -> None:
    model = nn.Conv1d(3, 4, 2)
    assert names(muon_groups(model, 0.1)) == {"decay": ["weight"], "no_decay": ["bias"]}


def test_a_layer_says_which_matrices_its_weight_stacks() -> None:
    model = nn.Sequential(nn.Linear(4, 9, bias=False), nn.Linear(9, 4, bias=False))
    model[0].splits = (5, 2, 2)
    (group,) = muon_groups(model, 0.1)
    assert group["splits"] == [(5, 2, 2), (4,)]
    model[0].splits = (5, 2)
    with pytest.raises(ValueError, match=r"0\.splits \(5, 2\) do not add up to its 9 rows"):
        muon_groups(model, 0.1)


@pytest.mark.parametrize(
    "name, expected", [("adamw", ["decay", "no_decay"]), ("muon", ["matrices", "no_decay"])]
)
def test_the_description_tells_the_groups_that_the_optimizer_trains(tiny_model, name, expected) -> None:
    model = tiny_model()
    settings = OptimizerSettings(name=name, learning_rate=0.002)
    groups = build_optimizer(model, settings).param_groups
    lines = describe_groups(optimizer_groups(model, settings)).splitlines()
    assert [group["name"] for group in groups] == expected
    for line, group in zip(lines, groups, strict=True):
        count = sum(p.numel() for p in group["params"])
        assert f"{group['name']}: {len(group['params'])} tensors, {count:,} parameters" in line
        assert f"weight_decay {group['weight_decay']}, peak_lr 0.002" in line


def _named(group: dict) -> tuple[list[str], list[nn.Parameter]]:
    return group["param_names"], group["params"]
