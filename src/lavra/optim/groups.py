"""Parameter groups: which parameters decay, and which Muon orthogonalises.

A model says two things that cannot be seen from its parameters: `output_weight`, on the module that has
an output head, and `splits` on an `nn.Linear` whose weight stacks several matrices, the rows of each.
"""

from __future__ import annotations

from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups, each with `name`, `params`, `param_names`, `weight_decay`.

    Matrices of linear layers decay; embeddings, norms and biases never do. An untied output head is a
    linear layer; a tied one is the embedding.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    groups: dict[str, list[tuple[str, nn.Parameter]]] = {"decay": [], "no_decay": []}
    for name, parameter in model.named_parameters():
        decays = parameter.ndim >= 2 and id(parameter) not in embeddings
        groups["decay" if decays else "no_decay"].append((name, parameter))
    return [
        _group(key, members, weight_decay if key == "decay" else 0.0)
        for key, members in groups.items()
        if members
    ]


def muon_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """The groups of `parameter_groups`, each with `algorithm`; linear layers form a group `matrices` first.

    `matrices` has algorithm "muon" and a list `splits` beside `params`: the rows of each matrix stacked in
    that weight. Embeddings, the output head, norms and biases have algorithm "adamw": their rows, one a
    token, are not a map between two spaces of activations (Jordan 2024).

    Raises:
        ValueError: the `splits` of a layer do not add up to its rows.
    """
    heads = {id(m.output_weight) for m in model.modules() if hasattr(m, "output_weight")}
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    splits: dict[int, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and id(module.weight) not in heads | embeddings:
            rows = tuple(getattr(module, "splits", ())) or (module.out_features,)
            if sum(rows) != module.out_features:
                raise ValueError(f"{name}.splits {rows} do not add up to its {module.out_features} rows")
            splits[id(module.weight)] = rows
    groups = []
    for group in parameter_groups(model, weight_decay):
        members = list(zip(group["param_names"], group["params"], strict=True))
        matrices = [(n, p) for n, p in members if id(p) in splits]
        others = [(n, p) for n, p in members if id(p) not in splits]
        if matrices:
            stacked = {"algorithm": "muon", "splits": [splits[id(p)] for _, p in matrices]}
            groups.append(_group("matrices", matrices, group["weight_decay"]) | stacked)
        if others:
            groups.append(_group(group["name"], others, group["weight_decay"]) | {"algorithm": "adamw"})
    return groups


def describe_groups(groups: list[dict]) -> str:
    """One line a group: name, tensors, parameters, weight decay and peak learning rate."""
    return "\n".join(
        f"  {g['name']}: {len(g['params'])} tensors, {sum(p.numel() for p in g['params']):,} parameters, "
        f"weight_decay {g['weight_decay']}, peak_lr {g['peak_lr']:g}"
        for g in groups
    )


def _group(name: str, members: list[tuple[str, nn.Parameter]], weight_decay: float) -> dict:
    return {
        "name": name,
        "params": [p for _, p in members],
        "param_names": [n for n, _ in members],
        "weight_decay": weight_decay,
    }
