"""What an optimizer costs: operations of a step, numbers kept between steps. No torch, so that the plan can ask."""

from __future__ import annotations

from lavra.model.config import ModelShape
from lavra.optim.config import OptimizerName

NEWTON_SCHULZ_STEPS = 5
# C/R from which the Gram form of Muon's orthogonalisation needs fewer operations: 4 C/R + 34 against 20 C/R + 10, in R^3.
GRAM_RATIO = 1.5

# Numbers that a parameter keeps; Muon's embeddings have AdamW's two, an 8-bit moment is a quarter of a number.
_MOMENTS: dict[OptimizerName, float] = {
    "sgd": 0,
    "momentum": 1,
    "nesterov": 1,
    "adam": 2,
    "adamw": 2,
    "adafactor": 0,  # a row and a column for a matrix
    "lion": 1,
    "muon": 1,
    "adamw8bit": 0.5,
}


def orthogonalization_flops(rows: int, columns: int, *, gram: bool) -> int:
    """FLOPs that `optim.muon.orthogonalize` needs for one matrix; `gram`: wide ones take the Gram form, as in fp32."""
    r, c = sorted((rows, columns))
    if gram and c >= GRAM_RATIO * r:
        return 4 * r * r * c + 34 * r**3
    return NEWTON_SCHULZ_STEPS * (4 * r * r * c + 2 * r**3)


def step_flops(shape: ModelShape, optimizer: OptimizerName, *, gram: bool) -> int:
    """FLOPs of the matrix products of one optimizer step; element-wise work is not counted."""
    if optimizer != "muon":
        return 0
    block = sum(orthogonalization_flops(*m, gram=gram) for m in shape.block_matrices())
    return shape.n_layers * block


def state_count(shape: ModelShape, optimizer: OptimizerName) -> float:
    """Numbers kept between steps besides the weights."""
    kept = _MOMENTS[optimizer] * shape.parameter_count()
    if optimizer == "muon":
        matrices = shape.n_layers * sum(r * c for r, c in shape.block_matrices())
        kept += shape.parameter_count() - matrices
    return kept
