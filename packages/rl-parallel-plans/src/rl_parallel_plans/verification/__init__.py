"""Prove a plan with numbers: a small model of the same architecture, real processes, every gradient.

`python -m rl_parallel_plans verify MODEL` is the same from the command line.
"""
