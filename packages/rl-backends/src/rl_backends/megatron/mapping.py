"""Which part of which Hugging Face tensor each parameter of Megatron holds: one table for whatever moves weights.

Llama, Mistral, Mixtral, Qwen2, Qwen3 and Qwen3-MoE name their tensors alike in transformers; what a family lacks is
in neither model. Names of Megatron's local layers and of those of Transformer Engine, which hold a norm inside the
linear layer after it, lead to the same tensors. Megatron shards and fuses them so:

    linear_qkv    for each group of query heads that share a key head: its q rows, its k rows, its v rows
    linear_fc1    this rank's rows of gate, then those of up
    embeddings    shares of ceil(V / n) rows, of which the last ranks have fewer, or none
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from rl_backends.errors import ModelError
from rl_backends.megatron.architecture import Architecture
from rl_backends.megatron.groups import ParallelGroups
from rl_parallel_plans import Box

Shapes = Mapping[str, tuple[int, ...]]
Part = tuple[str, tuple[Box, ...]]

LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<local>\d+)\.(?P<which1>linear_fc[12])\.weight"
    r"|(?P<which2>linear_fc[12])\.weight(?P<grouped>\d+))"
)
WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
"""What every tensor-parallel rank holds whole."""
COLUMNS = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
"""Matrices whose columns tensor-parallel ranks share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """This rank's part of one tensor of the Hugging Face model; several of them may be of one parameter.

    Every box spans whole rows of the parameter, so that it is contiguous in the parameter's memory.
    """

    name: str
    """In the model of transformers."""
    shape: tuple[int, ...]
    """Of the whole tensor there."""
    parameter: nn.Parameter
    megatron_name: str
    """Its name there, on this pipeline stage."""
    parts: tuple[Box, ...]
    """Where in the whole tensor, and where in `local`."""
    duplicate: bool = False
    """A second copy on this or another stage, as of tied embeddings: filled as the first, and never written."""

    def view(self, tensor: Tensor) -> Tensor:
        """A tensor shaped like the parameter, with as many dims as the whole one; its memory and not a copy."""
        return tensor.view((1,) * (len(self.shape) - tensor.ndim) + tuple(tensor.shape))

    @property
    def local(self) -> Tensor:
        """The parameter as `view` shows it: this rank's memory."""
        return self.view(self.parameter.detach())

    def boxes(self) -> list[Box]:
        """The parts of the whole that `local` holds."""
        return list(self.parts)


def names_in_hugging_face(held: Iterable[HeldTensor]) -> dict[str, str]:
    """What messages call each of Megatron's parameters: the tensors that it holds parts of, by its name."""
    names: dict[str, list[str]] = {}
    for each in held:
        names.setdefault(each.megatron_name, []).append(each.name)
    return {megatron_name: " + ".join(several) for megatron_name, several in names.items()}


def parameters_of(chunks: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str, str, nn.Parameter]]:
    """Each chunk with each parameter, its name there, and its name on the stage.

    Of several chunks that begins with the chunk's number.
    """
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            yield chunk, name, f"{number}.{name}" if len(chunks) > 1 else name, parameter


def held_tensors(
    chunks: Sequence[nn.Module], architecture: Architecture, shapes: Shapes, *, groups: ParallelGroups
) -> list[HeldTensor]:
    """What this rank holds of every tensor of the Hugging Face model, in the order of Megatron's parameters.

    chunks: of the model on this stage; one without virtual stages.
    """
    table = _Table(architecture, shapes, rank=groups.tp.rank(), num_ranks=groups.tp.size())
    held: list[HeldTensor] = []
    for chunk, name_in_chunk, megatron_name, parameter in parameters_of(chunks):
        layers = [layer.layer_number - 1 for layer in chunk.decoder.layers]  # type: ignore[union-attr]
        parts = list(table.parts(name_in_chunk, layers))
        if not parts:
            raise ModelError(
                f"Megatron's parameter {megatron_name} {list(parameter.shape)} has no counterpart in a "
                f"{architecture.model_type} of transformers; this is a defect of the mapping: report it"
            )
        for name, boxes in parts:
            if name not in shapes:
                raise ModelError(
                    f"Megatron's {megatron_name} is {name} of a Hugging Face model, and this one has no such tensor: "
                    f"its configuration and its code do not belong together"
                )
            held.append(
                HeldTensor(
                    name=name,
                    shape=shapes[name],
                    parameter=parameter,
                    megatron_name=megatron_name,
                    parts=boxes,
                    duplicate=name_in_chunk == "output_layer.weight" and architecture.tied,
                )
            )
    return held


class _Table:
    """The tensors that a parameter holds parts of, and which parts, by the parameter's name, on one rank."""

    def __init__(self, architecture: Architecture, shapes: Shapes, *, rank: int, num_ranks: int) -> None:
        self.architecture, self.shapes, self.rank, self.num_ranks = architecture, shapes, rank, num_ranks
        self.first_expert = 0
        if architecture.num_experts:
            from megatron.core import parallel_state

            share = architecture.num_experts // parallel_state.get_expert_model_parallel_world_size()
            self.first_expert = parallel_state.get_expert_model_parallel_rank() * share

    def parts(self, megatron_name: str, layers: list[int]) -> Iterator[Part]:
        """Nothing for a name that no family has. `layers` are the numbers of this stage's, in the whole model."""
        if match := LAYER.fullmatch(megatron_name):
            yield from self._of_layer(f"model.layers.{layers[int(match[1])]}.", match[2])
        elif megatron_name in {"embedding.word_embeddings.weight", "output_layer.weight"}:
            embeds = self.architecture.tied or megatron_name.startswith("embedding")
            name = "model.embed_tokens.weight" if embeds else "lm_head.weight"
            share = -(-self._shape(name)[0] // self.num_ranks)
            yield name, self._rows(name, start=self.rank * share, size=share, at=0)
        elif megatron_name == "decoder.final_layernorm.weight":
            yield self._whole("model.norm.weight")
        elif megatron_name == "score.weight":
            yield self._whole("score.weight")

    def _of_layer(self, prefix: str, name: str) -> Iterator[Part]:
        if name in WHOLE:
            yield self._whole(prefix + WHOLE[name])
        elif name in COLUMNS:
            rows, columns = self._shape(prefix + COLUMNS[name])
            size = columns // self.num_ranks
            box = Box(offsets=(0, self.rank * size), sizes=(rows, size), local_offsets=(0, 0))
            yield prefix + COLUMNS[name], (box,)
        elif name in {"self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"}:
            for which in "qkv":
                full = f"{prefix}self_attn.{which}_proj.{name.rpartition('.')[2]}"
                yield full, tuple(self._qkv(full, which))
        elif name == "mlp.linear_fc1.weight":
            size = self.architecture.ffn_hidden_size // self.num_ranks
            for number, which in enumerate(("gate", "up")):
                full = f"{prefix}mlp.{which}_proj.weight"
                yield full, self._rows(full, start=self.rank * size, size=size, at=number * size)
        elif match := EXPERT.fullmatch(name):
            index = self.first_expert + int(match["local"] or match["grouped"])
            which = "gate_up_proj" if "linear_fc1" in (match["which1"], match["which2"]) else "down_proj"
            full = f"{prefix}mlp.experts.{which}"
            yield full, (Box(offsets=(index, 0, 0), sizes=(1, *self._shape(full)[1:]), local_offsets=(0, 0, 0)),)

    def _qkv(self, full: str, which: str) -> Iterator[Box]:
        """This rank's rows of a projection, group by group of key heads."""
        of = self.architecture
        heads = of.num_attention_heads // of.num_query_groups
        block = (heads + 2) * of.head_dim
        first = {"q": 0, "k": heads, "v": heads + 1}[which] * of.head_dim
        size = (heads if which == "q" else 1) * of.head_dim
        share = of.num_query_groups // self.num_ranks
        for place in range(share):
            group = self.rank * share + place
            yield from self._rows(full, start=group * size, size=size, at=place * block + first)

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.shapes.get(name, (0, 0))  # one that is absent is refused by its name

    def _whole(self, name: str) -> Part:
        shape = self.shapes.get(name, ())
        zeros = (0,) * len(shape)
        return name, (Box(offsets=zeros, sizes=shape, local_offsets=zeros),)

    def _rows(self, name: str, *, start: int, size: int, at: int) -> tuple[Box, ...]:
        """Rows of a matrix or bias, from `start` there and from `at` in the parameter; none past the end."""
        num_rows, *rest = self._shape(name)
        size, zeros = min(size, num_rows - start), (0,) * len(rest)
        if size <= 0:
            return ()
        return (Box(offsets=(start, *zeros), sizes=(size, *rest), local_offsets=(at, *zeros)),)
