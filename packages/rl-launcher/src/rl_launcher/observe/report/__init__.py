"""The report of a run: one page that needs nothing else, made from the files of its directory."""

from rl_launcher.observe.report.page import write_report

__all__ = ["write_report"]
