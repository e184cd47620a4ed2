"""Checks that need no training: preflight, explain, predict, doctor."""
