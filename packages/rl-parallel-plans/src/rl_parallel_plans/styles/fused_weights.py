"""Fused weights in state dicts: under the unsharded model's names, in its shapes and in its order of rows.

`state_dict()` of a sharded model moves nothing: in place of a fused parameter it holds a `FusedTensor`, which has the
unsharded shape and knows which rows of it lie here. So that all of these give the unsharded weights:

    full_tensor(), get_model_state_dict(full_state_dict=True)    hence accelerate's get_state_dict, save_pretrained
    torch.distributed.checkpoint save and load                    of any mesh into any mesh, or none
    load_state_dict                                               of a FusedTensor, a DTensor or a whole tensor

What would take its local rows for the rows of some `Shard(dim)` is refused by name.
"""

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from rl_parallel_plans.checkpoints import RowOrder, row_orders
from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from rl_parallel_plans.checkpoints import Box

aten = torch.ops.aten
# What a state dict is put through on its way to a file, and changes no row.
ELEMENTWISE = frozenset(
    {
        aten.alias.default,
        aten.clone.default,
        aten.detach.default,
        aten.empty_like.default,
        aten._pin_memory.default,  # noqa: SLF001 - how torch names the operator
        aten._to_copy.default,  # noqa: SLF001 - as above
        aten.zeros_like.default,
    }
)


class DealtRows(Placement):
    """Placement of a FusedTensor on every axis that its rows are sharded over: no rule of torch's redistributes it."""

    def __repr__(self) -> str:
        return "DealtRows()"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DealtRows)

    def __hash__(self) -> int:
        return hash(DealtRows)

    def __reduce__(self) -> "tuple[type[DealtRows], tuple[()]]":
        return DealtRows, ()


class FusedTensor(DTensor):
    """A fused parameter of a sharded model as the unsharded model has it: a view, no collective, no copy.

    registered: the parameter, or a tensor sharded alike, in the shape that `row_order` describes.
    order: which rows each rank of the last mesh axis holds.

    Raises PlanError for every operator but copies and casts: `full_tensor()` gives a plain tensor to compute with.
    """

    @staticmethod
    def __new__(cls: type["FusedTensor"], registered: DTensor, order: RowOrder) -> "FusedTensor":  # noqa: D102, PYI034
        # The mesh stays, so that checkpoints know which ranks take part; its placements must not be read as Shard(dim).
        shape = torch.Size(order.shape(registered.shape))
        stride = torch.empty(shape, device="meta").stride()
        placements = tuple(Replicate() if each.is_replicate() else DealtRows() for each in registered.placements)
        meta = TensorMeta(shape, stride, registered.dtype)
        spec = DTensorSpec(registered.device_mesh, placements, tensor_meta=meta)
        made: FusedTensor = DTensor.__new__(cls, order.local(registered.to_local()), spec, requires_grad=False)  # type: ignore[assignment]
        return made

    def __init__(self, registered: DTensor, order: RowOrder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.registered, self.order = registered, order

    def full_tensor(self, *, grad_placements: object = None) -> Tensor:
        """The whole tensor in the order of the unsharded model, on every rank; a collective."""
        del grad_placements
        return self.order.undealt(self.registered.full_tensor())

    def to_local(self, *, grad_placements: object = None) -> Tensor:
        """This rank's rows in the order in which it computes; `local_boxes` tells where they lie."""
        del grad_placements
        return self.order.local(self.registered.to_local())

    def redistribute(
        self, device_mesh: object = None, placements: "Sequence[Placement] | None" = None, **_: object
    ) -> DTensor:
        """To `Replicate()` on every axis, as `full_tensor()`; else refused: no `Shard` says where these rows lie."""
        if device_mesh in {None, self.device_mesh} and placements and all(each.is_replicate() for each in placements):
            return DTensor.from_local(self.full_tensor(), self.device_mesh, placements, run_check=False)
        raise PlanError(_refusal("redistribute"))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # noqa: PLR0917 - as torch calls it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first, *others = args
        if func in ELEMENTWISE and isinstance(first, cls):
            return cls(func(first.registered, *others, **kwargs), first.order)
        if func is aten.new_empty.default and isinstance(first, cls) and tuple(others[0]) == first.shape:
            # How asynchronous checkpoints stage a tensor; they set its attributes after.
            return cls(torch.empty_like(first.registered, **kwargs), first.order)  # type: ignore[arg-type]
        if func is aten.copy_.default and all(isinstance(each, cls) for each in args[:2]):
            target, source = args[:2]
            if target.order.same_as(source.order):
                target.registered.copy_(source.registered)
                return target
        if func is aten.equal.default and all(isinstance(each, cls) for each in args[:2]):
            return args[0].order.same_as(args[1].order) and torch.equal(args[0].registered, args[1].registered)
        raise PlanError(_refusal(str(func)))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return f"FusedTensor(shape={list(self.shape)}, dtype={self.dtype}, rows dealt to {len(self.order.rows)} ranks)"

    def __deepcopy__(self, memo: dict[int, Any]) -> "FusedTensor":
        return FusedTensor(copy.deepcopy(self.registered, memo), self.order)

    def __reduce_ex__(self, _protocol: object) -> Any:
        return FusedTensor, (self.registered, self.order)

    # What torch.distributed.checkpoint asks of a tensor that lies in pieces (`_Checkpointable`).

    def __create_write_items__(self, fqn: str, _object: object) -> "list[WriteItem]":
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.to_local())
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> "list[ChunkStorageMetadata]":
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        boxes = self._boxes()
        return [ChunkStorageMetadata(offsets=torch.Size(b.offsets), sizes=torch.Size(b.sizes)) for b in boxes]

    def __get_tensor_shard__(self, index: "MetadataIndex") -> Tensor:
        found = [box for box in self._boxes() if index.offset is None or tuple(index.offset) == box.offsets]
        if len(found) != 1:
            raise PlanError(f"{index.fqn} has no piece at {index.offset} on this rank")
        return found[0].of_local(self.to_local())

    def _boxes(self) -> "list[Box]":
        from rl_parallel_plans.checkpoints import local_boxes

        return local_boxes(self.registered, row_order=self.order)


def _refusal(operation: str) -> str:
    return (
        f"{operation} on a fused weight of a sharded model's state dict, whose rows lie on the ranks in an order of "
        "their own: take full_tensor() first, or export_state_dict(model)"
    )


def keep_state_dicts_unsharded(module: nn.Module) -> None:
    """Let the module's state dicts have its fused parameters as the unsharded model has them; once."""
    if _present not in module._state_dict_hooks.values():  # noqa: SLF001 - no public one; a second hook would wrap twice
        module.register_state_dict_post_hook(_present)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(_accept)  # type: ignore[no-untyped-call]


def _present(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
    for name, order in row_orders(module).items():
        value = state.get(prefix + name)
        if value is not None and is_dtensor(value) and not isinstance(value, FusedTensor):
            state[prefix + name] = FusedTensor(value.detach(), order)  # type: ignore[arg-type]


def _accept(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    for name, order in row_orders(module).items():
        value, parameter = state.get(prefix + name), getattr(module, name)
        if not isinstance(value, Tensor):
            continue
        if isinstance(value, FusedTensor) and value.order.same_as(order):
            state[prefix + name] = value.registered
            continue
        if tuple(value.shape) != order.shape(parameter.shape):
            if value.shape == parameter.shape and is_dtensor(value):
                continue  # the parameter itself, or a copy of it
            raise PlanError(
                f"{prefix}{name} is {list(value.shape)} in the state dict and {order.shape(parameter.shape)} in the "
                "unsharded model: load a state dict of this model, sharded by any mesh or not at all"
            )
        whole = value.full_tensor() if is_dtensor(value) else value
        state[prefix + name] = distribute_tensor(
            order.dealt(whole.to(parameter.device_mesh.device_type)),
            parameter.device_mesh,
            parameter.placements,
            src_data_rank=None,
        )
