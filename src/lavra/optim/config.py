"""Names that a recipe may use; no torch, so that a recipe is read without it."""

from __future__ import annotations

from typing import Literal

OptimizerName = Literal[
    "sgd", "momentum", "nesterov", "adam", "adamw", "adafactor", "lion", "muon", "adamw8bit"
]
ClipKind = Literal["norm", "value", "off"]
