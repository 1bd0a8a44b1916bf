"""Benchmark items in training text: found by their words, verified, reported by item and place, and dropped."""
