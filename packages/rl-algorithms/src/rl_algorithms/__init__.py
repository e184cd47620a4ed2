"""GRPO, SFT and DPO for language models, each on one page.

Knows tensors and five small protocols (`rl_algorithms.contracts`); knows no engine, no backend, no process group.
Import the page you need: `from rl_algorithms import grpo`.
"""
