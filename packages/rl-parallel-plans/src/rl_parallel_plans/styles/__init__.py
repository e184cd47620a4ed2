"""Parallel styles that torch lacks: blocks of a decoder layer, what is inside them, and what is outside.

Importing it imports `torch.distributed.tensor`; nothing does before a plan with tp > 1 is asked for.
"""

from rl_parallel_plans.styles.blocks import BlockParallel, SplitSequence
from rl_parallel_plans.styles.in_block import (
    BlockColwise,
    BlockExperts,
    BlockGatheredColwise,
    BlockNorm,
    BlockPackedColwise,
    BlockReplicated,
    BlockReplicatedHeads,
    BlockRowwise,
)
from rl_parallel_plans.styles.layer_inputs import LayerReads, SplitLayerInputs
from rl_parallel_plans.styles.local_heads import LocalHeads
from rl_parallel_plans.styles.local_parameters import LocalParameters, ParameterRule
from rl_parallel_plans.styles.mixers import (
    BlockConvolution,
    BlockGatedNorm,
    BlockGroupNorm,
    BlockParameters,
    BlockReplicatedTree,
    BlockShare,
    BlockSharedRows,
    MixerParallel,
    WholeParallel,
)
from rl_parallel_plans.styles.replicated import ReplicatedParallel, SequenceShardedParallel
from rl_parallel_plans.styles.vocabulary_parallel import VocabularyParallelEmbedding
from rl_parallel_plans.styles.whole_layers import WholeLayer
from rl_parallel_plans.styles.whole_method import WholeMethod

__all__ = [
    "BlockColwise",
    "BlockConvolution",
    "BlockExperts",
    "BlockGatedNorm",
    "BlockGatheredColwise",
    "BlockGroupNorm",
    "BlockNorm",
    "BlockPackedColwise",
    "BlockParallel",
    "BlockParameters",
    "BlockReplicated",
    "BlockReplicatedHeads",
    "BlockReplicatedTree",
    "BlockRowwise",
    "BlockShare",
    "BlockSharedRows",
    "LayerReads",
    "LocalHeads",
    "LocalParameters",
    "MixerParallel",
    "ParameterRule",
    "ReplicatedParallel",
    "SequenceShardedParallel",
    "SplitLayerInputs",
    "SplitSequence",
    "VocabularyParallelEmbedding",
    "WholeLayer",
    "WholeMethod",
    "WholeParallel",
]
