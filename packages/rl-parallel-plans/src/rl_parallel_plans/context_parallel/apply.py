"""Put context parallelism into a model: hooks on its decoder and on the attention of each layer.

The decoder's hook finds out from `position_ids` where documents begin; the hooks of the attention modules let
`scaled_dot_product_attention` see the keys of all ranks. Arguments of `forward` have the names that Hugging Face
decoders give them. No parameter changes.

These are hooks on modules and not a context manager around the call, since recomputed activations run again inside
backward.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_parallel_plans.context_parallel.attention import GatheredAttention
from rl_parallel_plans.context_parallel.layout import RowLayout, layout_of_positions
from rl_parallel_plans.context_parallel.limits import (
    attention_modules,
    attention_window,
    check_context_parallel,
    decoder_path,
)
from rl_parallel_plans.dtensor import has_numbers, submesh
from rl_parallel_plans.errors import PlanError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from rl_parallel_plans.plan.parallel_plan import ParallelPlan

_OTHER_INPUTS = ("pixel_values", "pixel_values_videos", "image_patches", "input_features", "input_values")
_ROWS = "_context_parallel_rows"

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def apply_context_parallel(
    model: nn.Module, mesh: "DeviceMesh", *, cp_axis: str = "cp", plan: "ParallelPlan | None" = None
) -> nn.Module:
    """Let each rank of the axis `cp_axis` of `mesh` hold its tokens of every sequence, and attend to all of them.

    From now on the model takes `shard_sequence(input_ids, mesh)`, with `position_ids=sequence_positions(length, mesh)`
    by name, and returns the hidden states or logits of those tokens. Rows may be packed: positions that restart at 0
    tell where documents begin, and no token attends to another document. Both ways to cut a packed row are taken:
    each document by itself (`shard_sequence(ids, mesh, cu_seqlens=cu)` with `sequence_positions(cu, mesh)`), which
    keeps the ranks balanced, or the row as one (`shard_sequence` of ids and of position_ids alike). Layers with a
    sliding window keep it.

    Backward needs nothing more, also with recomputed activations. Each rank's gradients are those of its own tokens:
    sum them over the axis, which FSDP2 over dp and cp together does. Activations are those of T / cp tokens, except
    for each layer's keys and values. A forward gathers the positions of all ranks once, and each layer its keys and
    values once.

    Args:
        model: a causal decoder; see `check_context_parallel`.
        mesh: a mesh that has the axis `cp_axis`.
        cp_axis: name of the context-parallel axis.
        plan: the tensor-parallel plan of the model, if it has one, with sequence parallelism or without. It makes no
            difference which is applied first.

    At cp=1 the model stays as it is. Raises PlanError where the axis is missing, where it was applied already, and for
    everything that `check_context_parallel` refuses. The model's forward raises it for labels, masks, cached keys, and
    positions that do not belong to this layout.
    """
    cp_mesh = submesh(mesh, cp_axis)
    if cp_mesh.size() == 1:
        return model
    check_context_parallel(model, plan=plan)
    decoder = model.get_submodule(decoder_path(model))
    if (axis := getattr(decoder, "context_parallel_axis", None)) is not None:
        raise PlanError(f"{type(model).__name__} is context parallel over {axis!r} already: apply it once")
    decoder.context_parallel_axis = cp_axis  # type: ignore[assignment]
    # Four dims: Hugging Face hands such a mask down as it is, and otherwise takes the gap between this rank's two
    # chunks for the border of two packed sequences. The attention's hook takes it away again.
    no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=cp_mesh.device_type)
    if decoder is not model:
        model.register_forward_pre_hook(_check_outer_inputs, with_kwargs=True)
    _hook_decoder(decoder, cp_mesh, no_mask)
    for path, attention in attention_modules(model):
        _hook_attention(attention, cp_mesh, no_mask, window=attention_window(model, path))
    return model


def _check_outer_inputs(_module: nn.Module, _args: object, kwargs: dict[str, Any]) -> None:
    if kwargs.get("labels") is not None:
        raise PlanError(
            "labels would be shifted inside this rank's tokens, whose next token may lie on another rank: shift the "
            "targets, shard them with shard_sequence and compute the loss from the logits"
        )
    if others := [name for name in _OTHER_INPUTS if kwargs.get(name) is not None]:
        raise PlanError(f"{', '.join(others)}: context parallelism takes tokens, and neither images nor sound")


# Closures, since a deep copy of the model copies what a method or a partial holds, and a mesh cannot be copied.
def _hook_decoder(decoder: nn.Module, cp_mesh: "DeviceMesh", no_mask: Tensor) -> None:
    def enter(_decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        _check_inputs(args, kwargs)
        rows = _rows_of_positions(kwargs.get("position_ids"), kwargs, cp_mesh)
        mask = no_mask
        if rows is not None:
            # The layout goes to the layers with the mask that they are all given: a layer that runs again inside
            # backward is called with the same mask, when the decoder may have seen other rows since.
            mask = no_mask.clone()
            setattr(mask, _ROWS, rows)
        return args, {**kwargs, "attention_mask": mask}

    decoder.register_forward_pre_hook(enter, with_kwargs=True)


def _hook_attention(attention: nn.Module, cp_mesh: "DeviceMesh", no_mask: Tensor, *, window: int | None) -> None:
    entered: list[GatheredAttention] = []

    def enter(_attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        found: list[tuple[RowLayout, ...] | None] = []

        def unmasked(value: object) -> object:
            if value is no_mask:
                found.append(None)
                return None
            if isinstance(value, Tensor) and hasattr(value, _ROWS):
                found.append(getattr(value, _ROWS))
                return None
            return value

        args, kwargs = tuple(map(unmasked, args)), {name: unmasked(value) for name, value in kwargs.items()}
        if not found:
            raise PlanError(
                f"{type(attention).__name__} was not given the attention_mask of its model, which says where documents "
                "begin: context parallelism does not know this model"
            )
        mode = GatheredAttention(cp_mesh, rows=found[0], window=window)
        mode.__enter__()  # type: ignore[no-untyped-call]
        entered.append(mode)
        return args, kwargs

    def leave(module: nn.Module, _args: object, output: object) -> None:
        if not entered:  # a hook before ours raised
            return
        mode = entered.pop()
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if output is not None and not mode.calls:  # None: it raised
            raise PlanError(
                f"{type(module).__name__} did not call torch.nn.functional.scaled_dot_product_attention, so its tokens "
                'saw only those of this rank: load the model with attn_implementation="sdpa"'
            )

    attention.register_forward_pre_hook(enter, with_kwargs=True)
    attention.register_forward_hook(leave, always_call=True)


def _check_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if len(args) > 1:
        raise PlanError(f"{len(args)} arguments were passed by position: pass all but the first by name")
    if kwargs.get("attention_mask") is not None:
        raise PlanError(
            "an attention_mask knows only this rank's tokens: pass none, pad rows on the right (no token sees those "
            "after it) and leave the padding out of the loss; for packed rows, position_ids that restart are enough"
        )
    cache = kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length():
        raise PlanError(
            f"past_key_values holds {cache.get_seq_length()} cached tokens: context parallelism takes whole sequences"
        )


def _rows_of_positions(
    positions: Tensor | None, kwargs: dict[str, Any], cp_mesh: "DeviceMesh"
) -> tuple[RowLayout, ...] | None:
    """Where documents lie, from the positions that all ranks hold; None where each row is one document."""
    if positions is None:
        raise PlanError(
            "position_ids are missing, and the model would count from 0 on every rank: pass "
            "position_ids=sequence_positions(length, mesh) by name"
        )
    if positions.ndim != 2 or positions.shape[-1] % 2:
        raise PlanError(
            f"position_ids of shape {tuple(positions.shape)} are not those of this rank's tokens, [rows, T / cp] or "
            "[1, T / cp] of two chunks each: pass sequence_positions(length, mesh)"
        )
    group = cp_mesh.get_group()
    if not has_numbers(positions) or dist.get_backend(group) == "fake":  # a forecast: nothing can be gathered
        return None
    # One small collective a forward, unconditionally: from its own positions a rank cannot tell whether another's
    # restart. All ranks then judge the same numbers, and refuse together.
    held = [torch.empty_like(positions) for _ in range(cp_mesh.size())]
    dist.all_gather(held, positions.contiguous(), group=group)
    rows = layout_of_positions(torch.stack(held).cpu(), cp_mesh.get_local_rank())
    for name, value in kwargs.items():
        if name.startswith("cu_seq") and value is not None:
            _check_documents(name, value, rows, length=cp_mesh.size() * positions.shape[-1])
    return rows


def _check_documents(name: str, cu_seqlens: Tensor, rows: tuple[RowLayout, ...] | None, *, length: int) -> None:
    if rows is not None and len(rows) > 1:
        raise PlanError(f"{name} describes one packed row, and the position_ids are of {len(rows)} different ones")
    documents = [0, *((length,) if rows is None else rows[0].documents)]
    given = cu_seqlens.tolist()
    # A row that was cut as one ends in padding whose positions are all 0: documents of one token.
    padding = documents[len(given) :]
    if given != documents[: len(given)] or padding != list(range(length + 1 - len(padding), length + 1)):
        raise PlanError(
            f"{name} is {given} and the position_ids restart at {documents[:-1]} of {length} tokens: pass where the "
            "documents of the whole row end, over all ranks and with their padding, or leave it out"
        )
