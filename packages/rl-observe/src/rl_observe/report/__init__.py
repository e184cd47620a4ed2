"""Self-contained HTML reports: of one run, of several runs compared, and a summary for a notebook."""

from rl_observe.report.page import compare_runs, summary_html, write_report

__all__ = ["compare_runs", "summary_html", "write_report"]
