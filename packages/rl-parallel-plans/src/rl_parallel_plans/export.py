"""The state dict of a sharded model, tensor by tensor, under Hugging Face's names and in their layouts.

Works under tensor parallelism, FSDP, both or neither, on any device and with CPU offload. Each tensor is gathered when
its turn comes and forgotten after, so that the memory in use is that of the largest one. Needs neither transformers nor
safetensors: it hands tensors to whatever writes or sends them.

It undoes what sharding did: rows of fused weights go back to their order, names lose what wrappers put in
(`_checkpoint_wrapped_module`, `_orig_mod`), a tied parameter is one again. Buffers are those that a state dict has.
Names and shapes are those of the model in memory; where a release of transformers stores others,
`model.save_pretrained(folder, state_dict=dict(export_state_dict(model)))` on rank 0 converts them.
"""

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.pipeline.stages import stage_info
from rl_parallel_plans.row_order import RowOrder, row_orders
from rl_parallel_plans.structure import joined

WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"})
"""Tokens of dotted names that wrappers of torch put in."""


@torch.no_grad()
def export_state_dict(
    model: nn.Module,
    *,
    every_rank: bool = False,
    tied_names: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = "cpu",
) -> Iterator[tuple[str, Tensor]]:
    """Names and whole tensors of every parameter and persistent buffer, in the model's order.

    A collective: every rank must iterate to the end. `for name, tensor in export_state_dict(model): ...` is the same
    line on all of them; its body runs on rank 0 alone, and the others only take part in gathering.

    Of a pipeline stage: the weights that it holds, under their names in the model and without the copies of tied ones
    that an earlier stage has, on the first of the stage's ranks. `Pipeline.export_state_dict` has all stages'.

    every_rank: yield on every rank, and not on rank 0 alone.
    tied_names: give a tied tensor under each of its names; otherwise under the first, as files of weights have it.
    dtype: of floating-point tensors; None keeps each one's own. It is that of the sharded parameters, whatever dtype
        the forward gathers them in.
    device: where the whole tensor goes; None leaves it where it was gathered.

    A yielded tensor may share memory with the model where nothing had to be gathered: copy it before changing either.
    """
    reshard(model)
    stage = stage_info(model)
    yields = every_rank or (_is_first_rank() if stage is None else is_first_of_its_ranks(model))
    copies = frozenset() if stage is None else stage.copies
    seen: set[int] = set()
    for name, tensor, order in entries(model):
        if (id(tensor) in seen or name in copies) and not tied_names:
            continue
        seen.add(id(tensor))
        if yields:  # nothing here keeps what is yielded alive while the next one is gathered
            yield name, _moved(_whole(tensor, order), device=device, dtype=dtype)
        else:
            _whole(tensor, order)


def reshard(model: nn.Module) -> None:
    """Put the shards back: after a forward without a backward, some parameters are those that the forward gathered."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def is_first_of_its_ranks(stage: nn.Module) -> bool:
    """Whether this is the first of the ranks that shard the parameters of a pipeline stage, or the only one."""
    meshes = {parameter.device_mesh for parameter in stage.parameters() if is_dtensor(parameter)}
    return not any(any(mesh.get_coordinate() or ()) for mesh in meshes)


def entries(model: nn.Module) -> Iterator[tuple[str, Tensor, RowOrder | None]]:
    """Name, tensor and order of rows of everything that a state dict has, in its order."""
    for path, module in model.named_modules(remove_duplicate=False):
        orders = row_orders(module)
        transient = module._non_persistent_buffers_set  # noqa: SLF001 - no public one
        own: list[tuple[str, Tensor]] = [*module.named_parameters(recurse=False, remove_duplicate=False)]
        buffers = module.named_buffers(recurse=False, remove_duplicate=False)
        own += [(name, buffer) for name, buffer in buffers if name not in transient]
        for name, tensor in own:
            yield joined(_unwrapped(path), name), tensor, orders.get(name)


def _unwrapped(path: str) -> str:
    return ".".join(token for token in path.split(".") if token not in WRAPPERS)


def _whole(tensor: Tensor, order: RowOrder | None) -> Tensor:
    whole = tensor.detach()
    if is_dtensor(whole):
        # Offloaded shards lie in CPU memory, where the mesh of a GPU cannot gather them.
        whole = whole.to(whole.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
    return whole if order is None else order.undealt(whole)


def _moved(tensor: Tensor, *, device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)


def _is_first_rank() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
