"""What the user sees of a run: its directory, its logs, the live view, the reports, and where its figures are sent.

It watches and does not steer: nothing here changes what is trained.
"""

from rl_launcher.observe.events import EventLog, read_events
from rl_launcher.observe.live import LiveView, StageTotal
from rl_launcher.observe.memory import memory_metrics
from rl_launcher.observe.metrics import MetricError, MetricsLog, Sample, SampleTokens, read_metrics
from rl_launcher.observe.origins import write_origins
from rl_launcher.observe.profiling import Profiler
from rl_launcher.observe.redaction import REDACTED, Secrets, redact, redacted_keys
from rl_launcher.observe.refits import RefitLog, read_refits
from rl_launcher.observe.report import compare_runs, write_report
from rl_launcher.observe.run_directory import RunDirectory, RunDirectoryError
from rl_launcher.observe.run_log import RunLog
from rl_launcher.observe.spans import SpanLog, read_spans
from rl_launcher.observe.tokens import token_sample
from rl_launcher.observe.trace import write_trace
from rl_launcher.observe.trackers import TrackerError, check_trackers
from rl_launcher.observe.versions import collect_versions

__all__ = [
    "REDACTED",
    "EventLog",
    "LiveView",
    "MetricError",
    "MetricsLog",
    "Profiler",
    "RefitLog",
    "RunDirectory",
    "RunDirectoryError",
    "RunLog",
    "Sample",
    "SampleTokens",
    "Secrets",
    "SpanLog",
    "StageTotal",
    "TrackerError",
    "check_trackers",
    "collect_versions",
    "compare_runs",
    "memory_metrics",
    "read_events",
    "read_metrics",
    "read_refits",
    "read_spans",
    "redact",
    "redacted_keys",
    "token_sample",
    "write_origins",
    "write_report",
    "write_trace",
]
