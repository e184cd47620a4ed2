"""The report of a run, and of several beside one another: pages that need nothing else."""

from rl_observe.report.comparison import compare_runs
from rl_observe.report.page import write_report

__all__ = ["compare_runs", "write_report"]
