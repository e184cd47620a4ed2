"""Each parameter of a GPT model of megatron-core, and the tensors of Hugging Face that it holds parts of.

Llama, Mistral, Mixtral, Qwen2, Qwen3 and Qwen3-MoE name their tensors alike in transformers 5; what a family lacks is
in neither model. Names of Megatron's local layers and of those of Transformer Engine, which hold a norm inside the
linear layer after it, lead to the same tensors.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from rl_backends.errors import ModelError
from rl_backends.megatron.architecture import Architecture
from rl_backends.megatron.groups import ParallelGroups
from rl_backends.megatron.mapping import layouts
from rl_backends.megatron.mapping.held import HeldTensor
from rl_parallel_plans import Box

__all__ = ["held_tensors"]

Shapes = Mapping[str, tuple[int, ...]]
Part = tuple[str, tuple[Box, ...]]
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class _Place:
    """What decides this rank's part."""

    architecture: Architecture
    shapes: Shapes
    rank: int
    num_ranks: int
    first_expert: int


def held_tensors(
    model: nn.Module, architecture: Architecture, shapes: Shapes, *, groups: ParallelGroups
) -> list[HeldTensor]:
    """What this rank holds of every tensor of the Hugging Face model, in the order of Megatron's parameters.

    Args:
        model: of `build_gpt_model`, not wrapped.
        architecture: what it was made of.
        shapes: of the tensors of the Hugging Face model, tied ones once, under the first name.
        groups: that it is laid over.

    Raises:
        ModelError: a parameter without a place, or a tensor that `shapes` does not have.
    """
    place = _Place(architecture, shapes, groups.tp.rank(), groups.tp.size(), _first_expert(architecture))
    numbers = [layer.layer_number - 1 for layer in model.decoder.layers]  # type: ignore[union-attr]
    held: list[HeldTensor] = []
    for megatron_name, parameter in model.named_parameters():
        parts = list(_parts(megatron_name, numbers, place))
        if not parts:
            raise ModelError(
                f"Megatron's parameter {megatron_name} {list(parameter.shape)} has no counterpart in a "
                f"{architecture.model_type} of transformers; this is a defect of the mapping: report it"
            )
        for name, boxes in parts:
            _require(name, shapes, megatron_name)
            duplicate = megatron_name == "output_layer.weight" and architecture.tied
            held.append(
                HeldTensor(
                    name=name,
                    shape=shapes[name],
                    parameter=parameter,
                    megatron_name=megatron_name,
                    parts=boxes,
                    duplicate=duplicate,
                )
            )
    return held


def _first_expert(architecture: Architecture) -> int:
    if not architecture.num_experts:
        return 0
    from megatron.core import parallel_state

    share: int = architecture.num_experts // parallel_state.get_expert_model_parallel_world_size()
    rank: int = parallel_state.get_expert_model_parallel_rank()
    return rank * share


def _require(name: str, shapes: Shapes, megatron_name: str) -> None:
    if name not in shapes:
        raise ModelError(
            f"Megatron's {megatron_name} is {name} of a Hugging Face model, and this one has no such tensor: its "
            f"configuration and its code do not belong together"
        )


def _parts(megatron_name: str, numbers: list[int], place: _Place) -> Iterator[Part]:
    if match := LAYER.fullmatch(megatron_name):
        prefix = f"model.layers.{numbers[int(match[1])]}."
        yield from _of_layer(prefix, match[2], place)
    elif megatron_name in {"embedding.word_embeddings.weight", "output_layer.weight"}:
        tied = place.architecture.tied or megatron_name.startswith("embedding")
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        shape = place.shapes.get(name, (0, 0))
        yield name, layouts.vocabulary(shape, rank=place.rank, num_ranks=place.num_ranks)
    elif megatron_name == "decoder.final_layernorm.weight":
        yield _whole("model.norm.weight", place)
    elif megatron_name == "score.weight":
        yield _whole("score.weight", place)


def _of_layer(prefix: str, name: str, place: _Place) -> Iterator[Part]:
    if name in NORMS:
        yield _whole(prefix + NORMS[name], place)
    elif name in {"self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"}:
        yield from _qkv(prefix, name.rpartition(".")[2], place)
    elif match := EXPERT.fullmatch(name):
        index, which = match["local"] or match["grouped"], match["which1"] or match["which2"]
        yield from _expert(prefix, place.first_expert + int(index), which, place=place)
    elif name in MATRICES:
        yield from MATRICES[name](prefix, place)


NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
"""What every tensor-parallel rank holds whole."""

EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<local>\d+)\.(?P<which1>linear_fc[12])\.weight"
    r"|(?P<which2>linear_fc[12])\.weight(?P<grouped>\d+))"
)


def _whole(name: str, place: _Place) -> Part:
    return name, layouts.whole(place.shapes.get(name, ()))


def _qkv(prefix: str, kind: str, place: _Place) -> Iterator[Part]:
    architecture = place.architecture
    share = architecture.num_query_groups // place.num_ranks
    for which in "qkv":
        name = f"{prefix}self_attn.{which}_proj.{kind}"
        yield (
            name,
            layouts.qkv(
                which,
                place.shapes.get(name, ()),
                heads_per_group=architecture.num_attention_heads // architecture.num_query_groups,
                head_dim=architecture.head_dim,
                groups=range(place.rank * share, (place.rank + 1) * share),
            ),
        )


def _columns(name: str) -> Callable[[str, _Place], Iterator[Part]]:
    def parts(prefix: str, place: _Place) -> Iterator[Part]:
        shape = place.shapes.get(prefix + name, (0, 0))
        yield prefix + name, layouts.columns(shape, rank=place.rank, num_ranks=place.num_ranks)

    return parts


def _gate_and_up(prefix: str, place: _Place) -> Iterator[Part]:
    size = place.architecture.ffn_hidden_size // place.num_ranks
    for number, which in enumerate(("gate", "up")):
        name = f"{prefix}mlp.{which}_proj.weight"
        shape = place.shapes.get(name, (0, 0))
        yield name, layouts.rows(shape, rank=place.rank, num_ranks=place.num_ranks, at=number * size)


MATRICES = {
    "self_attention.linear_proj.weight": _columns("self_attn.o_proj.weight"),
    "mlp.linear_fc1.weight": _gate_and_up,
    "mlp.linear_fc2.weight": _columns("mlp.down_proj.weight"),
}


def _expert(prefix: str, index: int, which: str, *, place: _Place) -> Iterator[Part]:
    # A stack of all experts in transformers 5, a module for each in 4; no expert is cut.
    stacked = f"{prefix}mlp.experts.{'gate_up_proj' if which == 'linear_fc1' else 'down_proj'}"
    if stacked in place.shapes:
        yield stacked, layouts.expert(place.shapes[stacked], index)
        return
    for number, name in enumerate(("gate_proj", "up_proj") if which == "linear_fc1" else ("down_proj",)):
        full = f"{prefix}mlp.experts.{index}.{name}.weight"
        shape = place.shapes.get(full, (0, 0))
        yield full, layouts.rows(shape, rank=0, num_ranks=1, at=number * shape[0])
