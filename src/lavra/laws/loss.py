"""Predicted loss of a decoder of N parameters trained on D tokens."""

from __future__ import annotations

import math

# Besiroglu et al. 2024 (arXiv 2404.10102), replication of Hoffmann et al. 2022, approach 3.
_E, _A, _B, _ALPHA, _BETA = 1.8169, 482.01, 2085.43, 0.3478, 0.3658
CHINCHILLA_RANGE = (44e6, 16e9)  # parameters of the runs it was fitted on


def chinchilla_loss(parameters: float, tokens: float) -> float:
    """E + A/N^alpha + B/D^beta, nats per token of Chinchilla's own 32k tokenizer and data."""
    return _E + _A / parameters**_ALPHA + _B / tokens**_BETA


# Fitted on lavra's own short runs (docs/lab-log.md): decoders of 0.3M to 10M parameters, 0.2M to 4M
# tokens, English prose and Python code, vocabulary 4096.
_SMALL = {"E": 0.9, "A": 60.0, "ALPHA": 0.35, "B": 90.0, "BETA": 0.33}
SMALL_RUN_RANGE = (3e5, 1e7)


def small_run_bits_per_byte(parameters: float, text_bytes: float) -> float:
    """Bits per byte after one pass over `text_bytes` bytes, in the form E + A/N^alpha + B/bytes^beta."""
    s = _SMALL
    return s["E"] + s["A"] / parameters ** s["ALPHA"] + s["B"] / text_bytes ** s["BETA"]


def predict_bits_per_byte(parameters: float, tokens: float, bytes_per_token: float) -> tuple[float, str]:
    """Expected validation bits per byte, and a sentence on where that comes from."""
    if parameters < CHINCHILLA_RANGE[0]:
        value = small_run_bits_per_byte(parameters, tokens * bytes_per_token)
        low, high = SMALL_RUN_RANGE
        inside = low <= parameters <= high
        return value, "law fitted on lavra's own short runs of English and Python" + (
            "" if inside else f"; {parameters:.2g} parameters is outside its range {low:.1g} to {high:.1g}"
        )
    value = chinchilla_loss(parameters, tokens) / math.log(2) / CHINCHILLA_BYTES_PER_TOKEN
    return value, (
        "Chinchilla law (Besiroglu et al. 2024) in nats per token, turned into bits per byte by an assumed "
        f"{CHINCHILLA_BYTES_PER_TOKEN} bytes a token; another corpus and tokenizer than yours"
    )


CHINCHILLA_BYTES_PER_TOKEN = 4.2  # assumed: the tokenizer was not published
