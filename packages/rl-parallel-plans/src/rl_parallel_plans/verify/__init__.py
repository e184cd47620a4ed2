"""Prove a plan with numbers: a small model of the same architecture, real processes, every gradient.

`python -m rl_parallel_plans verify MODEL` is the same from the command line.
"""

from rl_parallel_plans.verify.api import assert_plan_is_exact, verify
from rl_parallel_plans.verify.report import Check, VerifyReport

__all__ = ["Check", "VerifyReport", "assert_plan_is_exact", "verify"]
