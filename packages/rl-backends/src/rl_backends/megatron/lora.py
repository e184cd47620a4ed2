"""LoRA on Megatron: the adapters of a Hugging Face model, over fused and sharded weights.

    W' = W + scaling * (B A)        in float32, rounded once, in every forward

Megatron fuses q, k and v, and gate and up, and shards them; an adapter belongs to one of them. So an adapter changes
the rows of the weight that are its own (`torch.nn.utils.parametrize`), and every layout computes as it did. The trainer
computes with the weights that an engine is given, rounded alike. What is saved is the memory of gradients and optimizer
state; the gradient of a whole W' exists for one layer at a time.

Under tensor parallelism one of A [rank, in] and B [out, rank] is sharded as W is. The other is replicated, and its
gradient is summed over tensor-parallel ranks.

Names and first values are those that `rl_backends.lora` gives the Hugging Face model, so adapters, checkpoints and
references mean the same on both backends.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from rl_backends.errors import ModelError
from rl_backends.loading.weights import write_whole
from rl_backends.lora.inject import first_value
from rl_backends.lora.layers import A_TAIL, B_TAIL, adapted_layers, base_name, trained_whole
from rl_backends.megatron.mapping import HeldTensor
from rl_parallel_plans import Box


def is_adapter(name: str) -> bool:
    """Whether a tensor of the Hugging Face model is an A or a B."""
    return name.endswith((A_TAIL, B_TAIL))


def bare_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model without its adapters."""
    return {base_name(name): shape for name, shape in shapes.items() if not is_adapter(name)}


class LowRankUpdate(nn.Module):
    """The adapters in one weight of Megatron, by the last token of their names (`q_proj`)."""

    rows: Tensor

    def __init__(self, base: Mapping[str, HeldTensor], *, rank: int, scaling: float, tensor_parallel: bool) -> None:
        super().__init__()
        self.scaling: Final = scaling
        self.enabled = True
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        self._reduced: dict[str, str] = {}  # which of the two has a gradient that is a part of a sum
        rows: list[int] = []
        for key, held in base.items():
            num_rows = sum(box.sizes[0] for box in held.parts)
            columns = held.parts[0].sizes[1]
            new: Callable[..., Tensor] = held.parameter.new_zeros
            self.lora_A[key] = nn.Parameter(new(rank, columns))
            self.lora_B[key] = nn.Parameter(new(num_rows, rank))
            if tensor_parallel:
                rows_are_sharded = num_rows < held.shape[0]
                sharded = self.lora_B[key] if rows_are_sharded else self.lora_A[key]
                # Megatron counts what is not marked once over tensor-parallel ranks, in the norm of the gradient.
                sharded.tensor_model_parallel = True
                sharded.partition_dim = 0 if rows_are_sharded else 1
                sharded.partition_stride = 1
                self._reduced[key] = "A" if rows_are_sharded else "B"
            rows += [box.local_offsets[0] + row for box in held.parts for row in range(box.sizes[0])]
        self.register_buffer("rows", torch.tensor(rows, device=held.parameter.device), persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        """W' of W, this rank's part."""
        if not self.enabled:
            return weight
        deltas = [self._whole(key, "B").float() @ self._whole(key, "A").float() for key in self.lora_A]
        changed = weight.float().index_add(0, self.rows, torch.cat(deltas), alpha=self.scaling)
        return changed.to(weight.dtype)

    def _whole(self, key: str, which: str) -> Tensor:
        parameter: Tensor = (self.lora_A if which == "A" else self.lora_B)[key]
        if self._reduced.get(key) != which:
            return parameter
        from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

        summed: Tensor = copy_to_tensor_model_parallel_region(parameter)  # whose backward sums over the ranks
        return summed


class Adapters:
    """The adapters of a model on this rank, and its weights with them merged in."""

    def __init__(
        self, skeleton: nn.Module, held: Sequence[HeldTensor], *, adapted: Mapping[int, tuple[nn.Module, LowRankUpdate]]
    ) -> None:
        """`adapted`: the module that computes with an adapted parameter, and its update, by the parameter's id."""
        self._skeleton, self._held = skeleton, held
        self._updates = [update for _, update in adapted.values()]
        self._modules = {parameter: module for parameter, (module, _) in adapted.items()}
        self._merged: dict[int, nn.Parameter] = {}

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute with W alone inside."""
        if others := trained_whole(self._skeleton):
            raise ModelError(
                f"without_adapters=True of a policy that also trains {next(iter(others))}: freeze a copy instead"
            )
        for update in self._updates:
            update.enabled = False
        try:
            yield
        finally:
            for update in self._updates:
                update.enabled = True

    @torch.no_grad()
    def merged(self) -> list[HeldTensor]:
        """What this rank holds of every weight, adapters merged, in the same tensors at every call."""
        found = []
        for held in self._held:
            if is_adapter(held.name):
                continue
            parameter = held.parameter
            if (module := self._modules.get(id(parameter))) is not None:
                if id(parameter) not in self._merged:
                    self._merged[id(parameter)] = nn.Parameter(torch.empty_like(parameter), requires_grad=False)
                parameter = self._merged[id(parameter)]
                storage = parameter.untyped_storage()
                if storage.nbytes() == 0:  # given up by `release`
                    storage.resize_(parameter.numel() * parameter.element_size())
                if held.name == next(each.name for each in self._held if each.parameter is held.parameter):
                    merged: Any = module.weight
                    parameter.copy_(merged)  # once for all that are fused in it
            found.append(replace(held, name=base_name(held.name), parameter=parameter))
        return found

    def release(self) -> None:
        """Free the memory of the merged weights until the next call of `merged`."""
        for parameter in self._merged.values():
            parameter.untyped_storage().resize_(0)

    def trainable(self) -> list[HeldTensor]:
        """Adapters, and what is trained whole beside them."""
        whole = trained_whole(self._skeleton)
        return [held for held in self._held if is_adapter(held.name) or held.name in whole]

    def initialise(self, *, seed: int) -> None:
        """First values, as on every other backend and mesh."""
        for held in self._held:
            if is_adapter(held.name):
                write_whole(first_value(held.name, held.shape, seed=seed), [held])


def add_adapters(
    gpt: nn.Module, held: Sequence[HeldTensor], skeleton: nn.Module, *, tensor_ranks: int
) -> tuple[Adapters, list[HeldTensor]]:
    """Put the adapters of `skeleton` into Megatron's model; return them, and all that this rank holds then."""
    layers = {f"{layer.name}.weight": layer for layer in adapted_layers(skeleton)}
    of_parameter: dict[int, list[HeldTensor]] = {}
    for each in held:
        of_parameter.setdefault(id(each.parameter), []).append(each)
    all_held: list[HeldTensor] = []
    changed: dict[int, tuple[nn.Module, LowRankUpdate]] = {}
    for parts in of_parameter.values():
        adapted = {each.name.split(".")[-2]: each for each in parts if each.name in layers}
        if not adapted:
            all_held += parts
            continue
        first = next(iter(adapted.values()))
        layer = layers[first.name]
        rank = layer.lora_a.shape[0]
        update = LowRankUpdate(adapted, rank=rank, scaling=layer.scaling, tensor_parallel=tensor_ranks > 1)
        module = gpt.get_submodule(first.megatron_name.rpartition(".")[0])
        parametrize.register_parametrization(module, "weight", update, unsafe=True)
        changed[id(first.parameter)] = module, update
        path = first.megatron_name.rpartition(".")[0] + ".parametrizations.weight"
        for each in parts:
            name = each.name.removesuffix(".weight") + ".base_layer.weight" if each.name in layers else each.name
            all_held.append(replace(each, name=name, megatron_name=f"{path}.original"))
        for key, each in adapted.items():  # A and B in the coordinates of the Hugging Face model, cut as W is
            bare, (num_out, num_in) = each.name.removesuffix(".weight"), each.shape
            start, columns = each.parts[0].offsets[1], each.parts[0].sizes[1]
            of_a = (Box(offsets=(0, start), sizes=(rank, columns), local_offsets=(0, 0)),)
            of_b, at = [], 0
            for box in each.parts:
                of_b.append(Box(offsets=(box.offsets[0], 0), sizes=(box.sizes[0], rank), local_offsets=(at, 0)))
                at += box.sizes[0]
            for tail, which, shape, boxes in (
                (A_TAIL, "lora_A", (rank, num_in), of_a),
                (B_TAIL, "lora_B", (num_out, rank), tuple(of_b)),
            ):
                all_held.append(
                    HeldTensor(
                        name=f"{bare}{tail}",
                        shape=shape,
                        parameter=getattr(update, which)[key],
                        megatron_name=f"{path}.0.{which}.{key}",
                        parts=boxes,
                    )
                )
    return Adapters(skeleton, all_held, adapted=changed), all_held
