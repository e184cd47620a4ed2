"""What an unmodified `load_weights` does with a checkpoint, found out by running it: where every element goes."""

from __future__ import annotations

from rl_refit.tracing.layouts import LoaderMap, trace
from rl_refit.tracing.writes import WriteCoverage, trace_writes

__all__ = ["LoaderMap", "WriteCoverage", "trace", "trace_writes"]
