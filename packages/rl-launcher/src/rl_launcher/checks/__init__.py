"""Checks before and around a run: preflight, explain, predict, doctor."""
