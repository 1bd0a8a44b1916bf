"""Predicted loss of a decoder of N parameters trained on D tokens."""

from __future__ import annotations

import math

# Besiroglu et al. 2024 (arXiv 2404.10102), replication of Hoffmann et al. 2022, approach 3.
_E, _A, _B, _ALPHA, _BETA = 1.8169, 482.01, 2085.43, 0.3478, 0.3658
CHINCHILLA_RANGE = (44e6, 16e9)  # parameters of the runs it was fitted on
CHINCHILLA_BYTES_PER_TOKEN = 4.2  # assumed: the tokenizer was not published

# Bits per byte, above the irreducible part, of a model that has learned little more than how frequent
# tokens are. Fitted on lavra's own short runs (docs/lab-log.md).
_NOTHING_LEARNED = 2.4


def chinchilla_loss(parameters: float, tokens: float) -> float:
    """E + A/N^alpha + B/D^beta, nats per token of Chinchilla's own 32k tokenizer and data."""
    return _E + _A / parameters**_ALPHA + _B / tokens**_BETA


def predict_bits_per_byte(parameters: float, tokens: float) -> tuple[float, str]:
    """Expected validation bits per byte, and a sentence on where that comes from.

    Chinchilla's reducible loss S = A/N^alpha + B/D^beta grows without bound for short runs, whose loss
    cannot: it starts at token frequencies. So S becomes S / (1 + S/S0): S for large runs, S0 for short
    ones, and the same best N for a given compute, since the map is monotone.
    """
    per_byte = 1 / math.log(2) / CHINCHILLA_BYTES_PER_TOKEN
    reducible = (chinchilla_loss(parameters, tokens) - _E) * per_byte
    bits = _E * per_byte + reducible / (1 + reducible / _NOTHING_LEARNED)
    low, high = CHINCHILLA_RANGE
    basis = (
        f"Chinchilla law (Besiroglu et al. 2024) at an assumed {CHINCHILLA_BYTES_PER_TOKEN} bytes a token, saturating "
        "at token frequencies; fitted on other text than yours"
    )
    if not low <= parameters <= high:
        basis += f"; {parameters:.2g} parameters is an extrapolation beyond its {low:.2g} to {high:.2g}"
    return bits, basis
