"""Optimizers, parameter groups, schedules as pure functions of the step."""
