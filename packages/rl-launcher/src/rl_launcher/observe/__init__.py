"""What the user sees of a run: its directory, its log, the live view and the report.

It watches and does not steer: nothing here changes what is trained.
"""

from rl_launcher.observe.live import LiveView, StageTotal
from rl_launcher.observe.metrics import MetricError, MetricsLog, Sample, read_metrics
from rl_launcher.observe.report import write_report
from rl_launcher.observe.run_directory import RunDirectory, RunDirectoryError
from rl_launcher.observe.versions import collect_versions

__all__ = [
    "LiveView",
    "MetricError",
    "MetricsLog",
    "RunDirectory",
    "RunDirectoryError",
    "Sample",
    "StageTotal",
    "collect_versions",
    "read_metrics",
    "write_report",
]
