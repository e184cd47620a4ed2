"""The folder of benchmarks, beside which the README of rl-parallel-plans gives its command."""

from pathlib import Path

Path("benchmarks").symlink_to(Path(__file__).parents[2] / "packages/rl-parallel-plans/benchmarks")
