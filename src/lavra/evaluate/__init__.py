"""Evaluation: bits per byte beside general-purpose compressors."""
