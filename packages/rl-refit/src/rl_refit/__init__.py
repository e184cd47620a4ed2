"""Fresh policy weights into a running engine as a transaction: all of them verified, or none.

Knows tensors, names and layouts; does not know trainers, engines or networks. Needs torch alone.
"""

from __future__ import annotations

from rl_refit.contracts import Coverage, WeightSink, WeightSource
from rl_refit.digest import Digest, digest_tensor
from rl_refit.errors import CoverageError, DeadlineError, DigestError, PoisonedError, RefitError
from rl_refit.layout import Layout, Region
from rl_refit.manifest import Manifest, TensorMeta
from rl_refit.plan import RefitPlan, Route, plan_refit
from rl_refit.refit import Refit, RefitConfig
from rl_refit.report import RefitReport
from rl_refit.sink import ModuleSink
from rl_refit.source import ModuleSource

__all__ = [
    "Coverage",
    "CoverageError",
    "DeadlineError",
    "Digest",
    "DigestError",
    "Layout",
    "Manifest",
    "ModuleSink",
    "ModuleSource",
    "PoisonedError",
    "Refit",
    "RefitConfig",
    "RefitError",
    "RefitPlan",
    "RefitReport",
    "Region",
    "Route",
    "TensorMeta",
    "WeightSink",
    "WeightSource",
    "digest_tensor",
    "plan_refit",
]
