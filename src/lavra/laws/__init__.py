"""Scaling laws: what loss a size and an amount of text should reach."""
