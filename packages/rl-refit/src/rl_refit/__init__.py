"""Fresh policy weights into a running engine as a transaction: all of them verified, or none.

Knows tensors, names and layouts; does not know trainers, engines or networks. Needs torch alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rl_refit.adapters import AdapterSink
from rl_refit.config import RefitConfig
from rl_refit.contracts import Coverage, NamedShard, ShardBox, WeightSink, WeightSource
from rl_refit.digest import Digest, digest_regions, digest_tensor
from rl_refit.engine import EngineSink
from rl_refit.errors import (
    AbortedError,
    CoverageError,
    DeadlineError,
    DigestError,
    PeerError,
    PoisonedError,
    RefitError,
)
from rl_refit.layout import Layout, Region
from rl_refit.manifest import Manifest, TensorMeta, merge_manifests
from rl_refit.module_tensors import Binding
from rl_refit.plan import RefitPlan, Route, Topology, plan_refit
from rl_refit.refit import CountedRefit, Refit, RefitReport
from rl_refit.rendezvous import Rendezvous
from rl_refit.replica import Replica
from rl_refit.replicas import Replicas, ReplicasReport
from rl_refit.sink import ModuleSink
from rl_refit.source import ModuleSource, StateDictSource
from rl_refit.tracing import trace, trace_writes
from rl_refit.transports.base import Transport
from rl_refit.transports.stream import SlotStream

if TYPE_CHECKING:
    from refit_simulator import simulate

__all__ = [
    "AbortedError",
    "AdapterSink",
    "Binding",
    "CountedRefit",
    "Coverage",
    "CoverageError",
    "DeadlineError",
    "Digest",
    "DigestError",
    "EngineSink",
    "Layout",
    "Manifest",
    "ModuleSink",
    "ModuleSource",
    "NamedShard",
    "PeerError",
    "PoisonedError",
    "Refit",
    "RefitConfig",
    "RefitError",
    "RefitPlan",
    "RefitReport",
    "Region",
    "Rendezvous",
    "Replica",
    "Replicas",
    "ReplicasReport",
    "Route",
    "ShardBox",
    "SlotStream",
    "StateDictSource",
    "TensorMeta",
    "Topology",
    "Transport",
    "WeightSink",
    "WeightSource",
    "digest_regions",
    "digest_tensor",
    "merge_manifests",
    "plan_refit",
    "simulate",
    "trace",
    "trace_writes",
]


def __getattr__(name: str) -> Any:
    if name == "simulate":  # a tool of the repository, in docs/tools; not in the wheel
        return import_module("refit_simulator").simulate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
