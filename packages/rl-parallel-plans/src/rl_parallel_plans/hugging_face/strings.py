"""What each of Hugging Face's style strings is as a `ParallelStyle`, from transformers 4.50 to 5.23.

Imports none of it. The table does not depend on the release: a string that was renamed (5.2: `*_rep` became
`colwise_gather_output` and `rowwise_split_input`) stands here under both names. One changed its meaning:
`sequence_parallel` cut a whole input and gathered the output again (4.51-4.57), and takes an input that is cut already
since 5.0, which no other string makes, so that either way its module computes the same as on whole tensors.
"""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.hugging_face.styles import (
    LatentAttentionDown,
    OwnParameters,
    SummedModule,
    SummedOutput,
    SummedRowwise,
)
from rl_parallel_plans.styles import (
    Block,
    Colwise,
    PackedColwise,
    ReplicatedParallel,
    Rowwise,
    SharedIdentity,
    VocabularyParallelEmbedding,
)

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

GATHERED = frozenset({"colwise_gather_output", "colwise_rep", "embedding_colwise"})
SPLIT_INPUT = frozenset({"rowwise_split_input", "rowwise_rep"})
EXPERT_PARALLEL = frozenset({"grouped_gemm", "ep_router", "ep_dispatch_experts", "megamoe_router", "megamoe_experts"})
BLOCK = "gather"
IN_BLOCK = frozenset({"local_colwise", "local_rowwise", "local_packed_rowwise", "local"})
PARAMETERS_ONLY = frozenset({"packed_rowwise", "local_packed_rowwise"})

_STYLES: "dict[str, Callable[[], ParallelStyle]]" = {
    "colwise": ColwiseParallel,
    "rowwise": SummedRowwise,
    **dict.fromkeys(GATHERED, lambda: ColwiseParallel(output_layouts=Replicate())),
    **dict.fromkeys(SPLIT_INPUT, lambda: SummedRowwise(split_input=True)),
    "embedding_rowwise": VocabularyParallelEmbedding,
    "replicated_with_grad_allreduce": lambda: ReplicatedParallel(partial_gradient=True),
    "replicate": ReplicatedParallel,
    "sequence_parallel": ReplicatedParallel,
    "packed_colwise": lambda: PackedColwise(sum_input_gradients=True),
    "moe_tp_experts": SummedModule,
    "moe_identity_expert": SharedIdentity,
    "all_reduce": SummedOutput,
    "local_params": OwnParameters,
    BLOCK: Block,
    "local_colwise": Colwise,
    "local_rowwise": Rowwise,
    "local": OwnParameters,
}
KNOWN = tuple(sorted({*_STYLES, "mla_kv_a_proj", *PARAMETERS_ONLY}))


def translate_parallel_style(style: str, *, config: object | None = None) -> "ParallelStyle":
    """A new style that does to a module exactly what the Hugging Face style of this name does.

    config: the model's configuration, which `mla_kv_a_proj` asks for `qk_rope_head_dim`; no other needs it.

    Raises PlanError for a string of expert parallelism, for one that only a parameter can have, and for an unknown one.
    """
    check_known(style)
    if style in PARAMETERS_ONLY:
        raise PlanError(f"Hugging Face style {style!r} is one of a stacked parameter, and not of a module")
    if style == "mla_kv_a_proj":
        return LatentAttentionDown(rope_features=_rope_features(config))
    return _STYLES[style]()


def check_known(style: str) -> None:
    """Raise PlanError for a string of expert parallelism and for an unknown one."""
    if style in EXPERT_PARALLEL:
        raise PlanError(
            f"Hugging Face style {style!r} is expert parallelism, which is no style of the tp axis: it shares experts "
            "out over an axis of its own (plan_for's ep=)"
        )
    if style not in KNOWN:
        raise PlanError(f"Hugging Face style {style!r} is unknown: known are {', '.join(KNOWN)}")


def release() -> str:
    """The release of transformers that is installed."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return "not installed"


def _rope_features(config: object | None) -> int:
    text = getattr(config, "get_text_config", lambda: config)()
    size = getattr(text, "qk_rope_head_dim", None)
    if not isinstance(size, int):
        raise PlanError(
            "Hugging Face style 'mla_kv_a_proj' sums the gradient of the rope features and needs to know how many: "
            "pass config= a configuration with qk_rope_head_dim"
        )
    return size
