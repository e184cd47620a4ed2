"""The peak memory of a training step on each rank, predicted with fake tensors and a fake process group.

`rl_parallel_plans.memory` calls `parallelize` on a model without weights and runs one step of which every storage is
counted: no GPU, no second process of the job, no weights and no formula of any model. A trainer that would rather run
its own step takes the pieces:

    fake_process_group      this process as rank 0 of ranks that exchange nothing
    fake_floats             fake floating-point tensors; integer tensors keep their values
    MemoryTracker, Ledger   count every storage while it is alive, and read the peaks of phases afterwards
    gathered_labels         label what FSDP gathers
    fused_attention         let attention cost what a GPU's kernels cost
"""

from rl_parallel_plans.forecast.fake import fake_floats, fake_process_group, fused_attention
from rl_parallel_plans.forecast.tracker import Ledger, MemoryTracker, Peak, gathered_labels

__all__ = [
    "Ledger",
    "MemoryTracker",
    "Peak",
    "fake_floats",
    "fake_process_group",
    "fused_attention",
    "gathered_labels",
]
