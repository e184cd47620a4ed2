"""Log, watch and report any training run: run directory, metrics, trackers, live view, health conditions, HTML report.

Nothing here changes what is trained. Start with `RunLog`.
"""

from rl_observe.config import HealthConfig, LoggerConfig, ProfilerConfig, RecordedStepsConfig
from rl_observe.health import HealthError
from rl_observe.live import LiveView, StageTotal
from rl_observe.log_files import (
    EventLog,
    MetricError,
    MetricsLog,
    RefitLog,
    SpanLog,
    read_events,
    read_metrics,
    read_refits,
    read_spans,
)
from rl_observe.prediction import Prediction, write_prediction
from rl_observe.profiling import Profiler, memory_metrics
from rl_observe.provenance import collect_versions, write_origins
from rl_observe.recorded_steps import RecordedStep, RecordedStepError, RecordedSteps, StepRollouts, TrainedRows
from rl_observe.redaction import REDACTED, Secrets, redact, redacted_keys
from rl_observe.report import compare_runs, write_report
from rl_observe.run_directory import RunDirectory, RunDirectoryError
from rl_observe.run_log import RunLog
from rl_observe.samples import Sample, SampleTokens, ScoredResponse, token_sample
from rl_observe.step_recorder import StepRecorder
from rl_observe.trace import write_trace
from rl_observe.trackers import TrackerError, check_trackers

__all__ = [
    "REDACTED",
    "EventLog",
    "HealthConfig",
    "HealthError",
    "LiveView",
    "LoggerConfig",
    "MetricError",
    "MetricsLog",
    "Prediction",
    "Profiler",
    "ProfilerConfig",
    "RecordedStep",
    "RecordedStepError",
    "RecordedSteps",
    "RecordedStepsConfig",
    "RefitLog",
    "RunDirectory",
    "RunDirectoryError",
    "RunLog",
    "Sample",
    "SampleTokens",
    "ScoredResponse",
    "Secrets",
    "SpanLog",
    "StageTotal",
    "StepRecorder",
    "StepRollouts",
    "TrackerError",
    "TrainedRows",
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
    "write_prediction",
    "write_report",
    "write_trace",
]
