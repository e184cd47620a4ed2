"""Parallel styles that torch lacks: blocks of a decoder layer, what is inside them, and what is outside.

`table` has the row of one parameter and the base class that carries a table out, `forward` the wrappers around a
module's forward; `modules`, `block`, `sequence` and `expert_dispatch` the styles. Importing it imports
`torch.distributed.tensor`; nothing does before a plan with tp > 1 is asked for.
"""

from rl_parallel_plans.styles.block import Block
from rl_parallel_plans.styles.modules import (
    Colwise,
    Experts,
    GatheredColwise,
    Norm,
    OwnRules,
    PackedColwise,
    ReplicatedHeads,
    ReplicatedParallel,
    Rowwise,
    SharedIdentity,
    VocabularyParallelEmbedding,
)
from rl_parallel_plans.styles.sequence import (
    ReadsInside,
    SequenceShardedParallel,
    SplitSequence,
    WholeLayer,
    WholeMethod,
    WholeParallel,
)
from rl_parallel_plans.styles.table import LocalParameters, ParameterRule

__all__ = [
    "Block",
    "Colwise",
    "Experts",
    "GatheredColwise",
    "LocalParameters",
    "Norm",
    "OwnRules",
    "PackedColwise",
    "ParameterRule",
    "ReadsInside",
    "ReplicatedHeads",
    "ReplicatedParallel",
    "Rowwise",
    "SequenceShardedParallel",
    "SharedIdentity",
    "SplitSequence",
    "VocabularyParallelEmbedding",
    "WholeLayer",
    "WholeMethod",
    "WholeParallel",
]
