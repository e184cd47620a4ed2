"""Optimizers, schedules and the gradient step."""
