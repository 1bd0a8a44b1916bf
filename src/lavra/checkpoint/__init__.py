"""Checkpoints: one folder a step, complete or ignored, safetensors and JSON only."""
