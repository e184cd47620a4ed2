"""The peak memory of a training step on each rank, predicted with fake tensors and a fake process group.

Calls `parallelize` on a model without weights and runs one step of which every storage is counted: no GPU, no second
process of the job, no weights. Knows torch and the plans of this package; knows no formula of any model.

`rl_parallel_plans.memory` is that. A trainer that would rather run its own step takes the pieces:

    fake_process_group      this process as rank 0 of ranks that exchange nothing
    fake_floats             fake floating-point tensors; integer tensors keep their values
    MemoryTracker, Ledger   count every storage from its birth to its death, and read peaks of phases afterwards
    gathered_labels         tell what FSDP gathers from what else a step makes
    fused_attention         let attention cost what a GPU's kernels cost
"""

from rl_parallel_plans.forecast.attention import fused_attention
from rl_parallel_plans.forecast.fake_floats import fake_floats
from rl_parallel_plans.forecast.gathered import gathered_labels
from rl_parallel_plans.forecast.ledger import Ledger, Peak
from rl_parallel_plans.forecast.torch_internals import fake_process_group
from rl_parallel_plans.forecast.tracker import MemoryTracker

__all__ = [
    "Ledger",
    "MemoryTracker",
    "Peak",
    "fake_floats",
    "fake_process_group",
    "fused_attention",
    "gathered_labels",
]
