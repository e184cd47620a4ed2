"""Fresh policy weights into a running engine as a transaction: all of them verified, or none.

Knows tensors, names and layouts; does not know trainers, engines or networks. Needs torch alone.
"""

from __future__ import annotations

from rl_refit.bindings import Binding
from rl_refit.config import RefitConfig
from rl_refit.contracts import Coverage, WeightSink, WeightSource
from rl_refit.digest import Digest, digest_regions, digest_tensor
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
from rl_refit.plan import RefitPlan, Route, plan_refit
from rl_refit.refit import Refit
from rl_refit.rendezvous import Rendezvous
from rl_refit.report import RefitReport
from rl_refit.sink import ModuleSink
from rl_refit.source import ModuleSource, StateDictSource
from rl_refit.topology import Topology

__all__ = [
    "AbortedError",
    "Binding",
    "Coverage",
    "CoverageError",
    "DeadlineError",
    "Digest",
    "DigestError",
    "Layout",
    "Manifest",
    "ModuleSink",
    "ModuleSource",
    "PeerError",
    "PoisonedError",
    "Refit",
    "RefitConfig",
    "RefitError",
    "RefitPlan",
    "RefitReport",
    "Region",
    "Rendezvous",
    "Route",
    "StateDictSource",
    "TensorMeta",
    "Topology",
    "WeightSink",
    "WeightSource",
    "digest_regions",
    "digest_tensor",
    "merge_manifests",
    "plan_refit",
]
