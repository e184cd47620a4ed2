"""Put context parallelism into a model: hooks on its decoder and on the attention of each layer.

Knows `forward` arguments by the names that Hugging Face decoders give them. Changes no parameter.

Hooks on modules, and not a context manager around the call, since recomputed activations run again inside backward.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rl_parallel_plans.context_parallel.attention import GatheredAttention
from rl_parallel_plans.context_parallel.layout import chunk_positions
from rl_parallel_plans.context_parallel.limits import attention_modules, check_context_parallel, decoder_path
from rl_parallel_plans.dtensor import submesh
from rl_parallel_plans.errors import PlanError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from rl_parallel_plans.plan import ParallelPlan

_OTHER_INPUTS = ("pixel_values", "pixel_values_videos", "image_patches", "input_features", "input_values")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def apply_context_parallel(
    model: nn.Module, mesh: "DeviceMesh", *, cp_axis: str = "cp", plan: "ParallelPlan | None" = None
) -> nn.Module:
    """Let each rank of the axis `cp_axis` of `mesh` hold its tokens of every sequence, and attend to all of them.

    From now on the model takes `shard_sequence(input_ids, mesh)`, with `position_ids=sequence_positions(length, mesh)`
    by name, and gives the hidden states or logits of those tokens. Backward needs nothing more, with recomputed
    activations neither. Each rank's gradients are those of its own tokens: sum them over the axis, which FSDP2 over
    dp and cp together does. Activations are those of T / cp tokens, but for each layer's keys and values.

    plan: the tensor-parallel plan of the model, if it has one. It makes no difference which is applied first.

    At cp=1 the model stays as it is. Raises PlanError where the axis is missing, where it was applied already, and for
    everything that `check_context_parallel` refuses. The model's forward raises it for labels, masks, cached keys, and
    positions other than those of this rank, hence for packed sequences.
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
    for _, attention in attention_modules(model):
        _hook_attention(attention, cp_mesh, no_mask)
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
        _check_inputs(args, kwargs, cp_mesh)
        return args, {**kwargs, "attention_mask": no_mask}

    decoder.register_forward_pre_hook(enter, with_kwargs=True)


def _hook_attention(attention: nn.Module, cp_mesh: "DeviceMesh", no_mask: Tensor) -> None:
    entered: list[GatheredAttention] = []

    def unmasked(value: object) -> object:
        return None if value is no_mask else value

    def enter(_attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        mode = GatheredAttention(cp_mesh)
        mode.__enter__()  # type: ignore[no-untyped-call]
        entered.append(mode)
        return tuple(map(unmasked, args)), {name: unmasked(value) for name, value in kwargs.items()}

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


def _check_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], cp_mesh: "DeviceMesh") -> None:
    if len(args) > 1:
        raise PlanError(f"{len(args)} arguments were passed by position: pass all but the first by name")
    if kwargs.get("attention_mask") is not None:
        raise PlanError(
            "an attention_mask knows only this rank's tokens: pass none, pad rows on the right (no token sees those "
            "after it) and leave the padding out of the loss"
        )
    if packed := [name for name, value in kwargs.items() if name.startswith("cu_seq") and value is not None]:
        raise PlanError(f"{', '.join(packed)}: context parallelism does not take packed sequences; pass rows [B, T]")
    cache = kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length():
        raise PlanError(
            f"past_key_values holds {cache.get_seq_length()} cached tokens: context parallelism takes whole sequences"
        )
    _check_positions(kwargs.get("position_ids"), cp_mesh)


def _check_positions(positions: Tensor | None, cp_mesh: "DeviceMesh") -> None:
    if positions is None:
        raise PlanError(
            "position_ids are missing, and the model would count from 0 on every rank: pass "
            "position_ids=sequence_positions(length, mesh) by name"
        )
    expected = chunk_positions(positions.shape[-1] // 2, cp_mesh, positions.device)
    fits = positions.ndim == 2 and positions.shape[-1] == expected.shape[-1]
    if not fits or not bool((positions == expected).all()):
        raise PlanError(
            f"position_ids of shape {tuple(positions.shape)} are not those of this rank's tokens, "
            f"{expected[0, :3].tolist()}... to {expected[0, -1:].tolist()}: pass sequence_positions(length, mesh); "
            "packed sequences, whose positions start anew, and padding on the left are not supported"
        )
