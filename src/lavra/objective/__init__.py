"""Objectives: what is predicted, and each one's loss numerator and normaliser."""
