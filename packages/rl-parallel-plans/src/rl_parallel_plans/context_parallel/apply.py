"""Put context parallelism into a model: hooks on its decoder and on the attention of each layer.

The decoder's hook finds out from `position_ids` where documents begin; the hooks of the attention modules let
`scaled_dot_product_attention` see the keys of all ranks. They are hooks on modules and not a context manager around the
call, since recomputed activations run again inside backward. No parameter changes. Modules, attributes, config fields
and arguments of `forward` have the names that Hugging Face decoders give them, and whatever is not recognised there as
causal attention over torch's SDPA is refused before anything has changed.

Each rank gathers the keys and values of the others in one all-gather, before they are repeated for grouped queries,
and runs one attention for each run of consecutive tokens that it holds, over the keys of its document up to the run's
end. That is a causal mask aligned to the lower right, for which torch has a flash kernel, so no mask of T² entries
exists on a GPU; documents of a packed row never meet in a call. Under a sliding window of w tokens a run is computed
w queries at a time over at most 2·w - 1 keys, with a mask of that size. In backward one reduce-scatter sums the
gradients of keys and values. This is the all-gather method of Llama 3 (arXiv:2407.21783, 3.3.2).

Axes: [B, heads, T / cp, D]; heads are this rank's where tensor parallelism shards them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from rl_parallel_plans.context_parallel.layout import (
    RowLayout,
    Run,
    gather_tokens,
    in_order,
    layout_of_documents,
    layout_of_positions,
)
from rl_parallel_plans.dtensor import has_numbers, is_dtensor, submesh
from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.structure import collapsed, decoder_layers, joined, source_of_forward

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from rl_parallel_plans.plan.parallel_plan import ParallelPlan

_OTHER_INPUTS = ("pixel_values", "pixel_values_videos", "image_patches", "input_features", "input_values")
_ROWS = "_context_parallel_rows"
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
FULL, SLIDING = "full_attention", "sliding_attention"
# Their frequencies depend on the longest position that a rank sees.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_OTHER_CONFIGS = ("vision_config", "audio_config", "speech_config", "text_encoder")
# Config field to what it does.
_SCORE_CHANGES = {
    "attn_logit_softcapping": "caps attention scores, which SDPA cannot",
    "alibi": "adds a bias to attention scores by distance",
    "attn_temperature_tuning": "scales queries by their position among this rank's tokens",
    "attention_chunk_size": "attends within chunks",
    "use_bidirectional_attention": "attends to later tokens",
}
_POSITIONAL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


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
    for name in ("cache", "past_key_values"):  # since transformers 5.24, and before
        if (cache := kwargs.get(name)) is not None and cache.get_seq_length():
            raise PlanError(
                f"{name} holds {cache.get_seq_length()} cached tokens: context parallelism takes whole sequences"
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


# -- Attention over the keys of all ranks -----------------------------------------------------------


class GatheredAttention(TorchFunctionMode):
    """While entered, scaled_dot_product_attention sees the keys and values of every rank of `cp_mesh`.

    rows: where documents begin and end, for packed rows; None where each row is one document.
    window: how many tokens a query attends to, itself included; None: all before it.
    """

    def __init__(
        self, cp_mesh: "DeviceMesh", *, rows: tuple[RowLayout, ...] | None = None, window: int | None = None
    ) -> None:
        super().__init__()
        self.cp_mesh, self.rows, self.window = cp_mesh, rows, window
        self.calls = 0

    def __torch_function__(  # noqa: PLR0917 - torch's protocol
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace the one function and pass on every other."""
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        named = dict(zip(_POSITIONAL, args, strict=False))
        return gathered_attention(cp_mesh=self.cp_mesh, rows=self.rows, window=self.window, **named, **(kwargs or {}))


def gathered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cp_mesh: "DeviceMesh",
    rows: tuple[RowLayout, ...] | None = None,
    window: int | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` of this rank's queries [B, heads, T / cp, D] over the whole sequence.

    rows, window: as of `GatheredAttention`.

    Raises PlanError for anything but causal self-attention without a mask on plain tensors.
    """
    _refuse_other_than_causal(query, key, attn_mask, is_causal=is_causal)
    from torch.distributed.tensor import Partial

    # [T, B, heads, D of keys and values]
    both = gather_tokens(torch.cat([key, value], -1), cp_mesh, dim=-2, gradient=Partial())
    options: dict[str, Any] = {"window": window, "dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    if rows is None:
        rows = (layout_of_documents([query.shape[-2] // 2], cp_mesh.get_local_rank(), cp_mesh.size()),)
    outputs = []
    # Rows of one layout are computed together.
    batches = [slice(None)] if len(rows) == 1 else [slice(row, row + 1) for row in range(len(rows))]
    for layout, batch in zip(rows, batches, strict=True):
        ordered = in_order(both[:, batch], layout).movedim(0, -2)
        keys, values = ordered[..., : key.shape[-1]], ordered[..., key.shape[-1] :]
        outputs.append(attention_of_runs(query[batch], keys, values, runs=layout.runs, **options))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def attention_of_runs(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    runs: Sequence[Run],
    window: int | None = None,
    enable_gqa: bool = False,
    **options: Any,
) -> Tensor:
    """Causal attention of the runs of tokens that are joined in `query`, each over its document in `keys`, `values`.

    options: those of `scaled_dot_product_attention`.
    """
    if window is not None and enable_gqa:
        # The kernels that take a mask take no grouped queries: on a GPU torch would compute all scores.
        groups = query.shape[-3] // keys.shape[-3]
        keys, values, enable_gqa = keys.repeat_interleave(groups, -3), values.repeat_interleave(groups, -3), False
    outputs = []
    for queries, run in zip(torch.split(query, [run.length for run in runs], -2), runs, strict=True):
        stop = run.end - run.length
        for block in (queries,) if window is None else torch.split(queries, window, -2):
            tokens = block.shape[-2]
            stop += tokens
            start = run.first if window is None else max(run.first, stop - tokens - window + 1)
            mask: Any
            if window is not None and stop - start > window:
                mask = _window_mask(tokens, stop - start, window=window, device=query.device)
            else:
                with _disable_current_modes():  # torch cannot make it under one, as in selective checkpointing
                    mask = causal_lower_right(tokens, stop - start)
            seen = keys[..., start:stop, :], values[..., start:stop, :]
            outputs.append(scaled_dot_product_attention(block, *seen, attn_mask=mask, enable_gqa=enable_gqa, **options))
    return torch.cat(outputs, -2)


def _window_mask(queries: int, keys: int, *, window: int, device: torch.device) -> Tensor:
    """Whether each query attends to each key, where queries are the last of the keys' tokens: bool [queries, keys]."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (distance >= 0) & (distance < window)


def _refuse_other_than_causal(query: Tensor, key: Tensor, attn_mask: Tensor | None, *, is_causal: bool) -> None:
    if attn_mask is not None:
        raise PlanError(
            f"scaled_dot_product_attention was given a mask of shape {tuple(attn_mask.shape)}, which knows only this "
            "rank's tokens: context parallelism does causal attention without a mask"
        )
    if not is_causal:
        raise PlanError("scaled_dot_product_attention was called with is_causal=False: context parallelism is causal")
    if query.shape[-2] != key.shape[-2]:
        raise PlanError(
            f"{query.shape[-2]} queries attend to {key.shape[-2]} keys of this rank: context parallelism is for whole "
            "sequences, without cached keys"
        )
    if is_dtensor(query) or is_dtensor(key):
        raise PlanError(
            "scaled_dot_product_attention was called with DTensors: use a plan whose attention sees this rank's heads "
            "as plain tensors"
        )


# -- What is refused, found before anything is changed ----------------------------------------------


def check_context_parallel(model: nn.Module, *, plan: "ParallelPlan | None" = None) -> None:
    """Raise one PlanError that lists all that stands against context parallelism for `model`; touch nothing.

    plan: the tensor-parallel plan that the model is under or shall be. Every plan is taken.

    It takes causal decoders whose every layer mixes tokens only by attention over torch's SDPA, full or with a sliding
    window (Gemma 3, Mistral). Refused by name: attention other than "sdpa", windows that the config and the model
    disagree about, attention in chunks (Llama 4), attention sinks (gpt-oss), soft-capped (Gemma 2) or biased scores,
    sparse indexers, linear attention, Mamba and convolutions, encoders, vision and audio, position embeddings that
    depend on the length seen, and sequence classifiers.
    """
    del plan
    found = list(dict.fromkeys(_findings(model)))
    if found:
        listed = "\n".join(f"  {i}. {finding}" for i, finding in enumerate(found, 1))
        raise PlanError(f"{type(model).__name__} cannot be context parallel, {len(found)} problem(s):\n{listed}")


def decoder_path(model: nn.Module) -> str:
    """Path of the module that owns the decoder layers; PlanError where there are none."""
    stack = decoder_layers(model)
    if stack is None:
        raise PlanError(f"{type(model).__name__} holds no nn.ModuleList of decoder layers")
    return stack[0].rpartition(".")[0]


def attention_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module of a decoder layer that says whether it is causal, as Hugging Face's attentions do, by path."""
    return [
        (joined(where, path), module)
        for where, layer in _decoder_layers(model)
        for path, module in layer.named_modules()
        if "is_causal" in vars(module)  # not hasattr: wrappers pass it on
    ]


def attention_window(model: nn.Module, path: str) -> int | None:
    """How many tokens a query of the attention at `path` attends to, itself included; None: all before it.

    Hugging Face's decoders make the mask, by the config's `layer_types` where it has some and else by its
    `sliding_window`; most attention modules tell their window too. Raises PlanError where these disagree.
    """
    attention = model.get_submodule(path)
    decoder = model.get_submodule(decoder_path(model))
    config = getattr(decoder, "config", None)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    where = f"{collapsed(path)} ({type(attention).__name__})"
    if kinds is not None:
        index = getattr(attention, "layer_idx", None)
        if not isinstance(index, int) or not 0 <= index < len(kinds):
            raise PlanError(f"{where} has no layer_idx that tells which of the config's layer_types it is")
        window = window if kinds[index] == SLIDING else None
    elif window is not None and not getattr(config, "use_sliding_window", True):
        raise PlanError(f"its config has sliding_window={window} and use_sliding_window=False: set the former to None")
    elif window is not None and "sliding_window" not in source_of_forward(decoder):
        raise PlanError(
            f"its config has sliding_window={window} and {type(decoder).__name__}.forward does not read it: set it to "
            "None if the model has no window"
        )
    if "sliding_window" in vars(attention) and attention.sliding_window != window:
        raise PlanError(
            f"{where} has sliding_window={attention.sliding_window} and the config of its decoder says {window}: "
            "not supported"
        )
    if window is not None and (not isinstance(window, int) or window < 1):
        raise PlanError(f"{where} has a sliding window of {window!r} tokens: not supported")
    return window


def _decoder_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    stack = decoder_layers(model)
    return [] if stack is None else [(joined(stack[0], number), layer) for number, layer in stack[1].named_children()]


def _findings(model: nn.Module) -> Iterator[str]:
    if decoder_layers(model) is None:
        yield "it holds no nn.ModuleList of decoder layers"
        return
    if "SequenceClassification" in type(model).__name__:
        yield "it pools the last token, and each rank would take its own: score all tokens and pick after unsharding"
    owners = (model, model.get_submodule(decoder_path(model)))
    configs = [config for owner in owners if (config := getattr(owner, "config", None)) is not None]

    for config in configs:
        for field in _OTHER_CONFIGS:
            if getattr(config, field, None) is not None:
                yield f"its config has a {field}: images and sound are not tokens that can be cut; use the text model"
        if getattr(config, "is_encoder_decoder", False):
            yield "it is an encoder and a decoder: only decoders are causal"

    for place, layer in _decoder_layers(model):
        if not any("is_causal" in vars(module) for module in layer.modules()):
            yield (
                f"{collapsed(place)} ({type(layer).__name__}) has no attention that says by an attribute is_causal "
                "whether it is causal: linear attention, Mamba and whatever else mixes tokens are not supported"
            )
        for path, module in layer.named_modules():
            where = collapsed(joined(place, path))
            if isinstance(module, nn.Conv1d):
                yield f"{where} is a convolution over tokens, whose neighbours lie on another rank"
            if path.rpartition(".")[2] == "indexer":
                yield f"{where} chooses the keys of each query from this rank's tokens alone: sparse attention"

    inside = dict(attention_modules(model))
    for path, module in model.named_modules():
        if path in inside:
            yield from _attention_findings(collapsed(path), module)
            try:
                attention_window(model, path)
            except PlanError as unclear:
                yield str(unclear)
        elif "is_causal" in vars(module):
            yield f"{collapsed(path)} ({type(module).__name__}) is attention outside the decoder layers: not supported"

    for config in configs:
        for field, effect in _SCORE_CHANGES.items():
            if value := getattr(config, field, None):
                yield f"its config has {field}={value}, which {effect}: not supported"
        if others := sorted(set(getattr(config, "layer_types", None) or ()) - {FULL, SLIDING}):
            yield f"its layer_types hold {', '.join(others)}: only {FULL} and {SLIDING} are supported"

    for path, module in model.named_modules():
        rope = vars(module).get("rope_type")
        for kind in rope.values() if isinstance(rope, dict) else (rope,):
            if kind in _LENGTH_DEPENDENT_ROPE:
                yield (
                    f"{collapsed(path)} has rope_type={kind!r}, whose frequencies depend on the longest position that "
                    "a rank sees: ranks would disagree"
                )


def _attention_findings(where: str, attention: nn.Module) -> Iterator[str]:
    kind = type(attention).__name__
    implementation = getattr(getattr(attention, "config", None), "_attn_implementation", "sdpa")
    if implementation != "sdpa":
        yield (
            f'{where} ({kind}) runs with attn_implementation={implementation!r}: load the model with "sdpa", whose '
            "keys and values can be gathered"
        )
    if not attention.is_causal:
        yield f"{where} ({kind}) is not causal: encoders and cross attention are not supported"
    if sinks := [name for name, _ in attention.named_parameters(recurse=False) if "sink" in name]:
        yield f"{where} ({kind}) has attention sinks ({', '.join(sinks)}), which SDPA cannot add to the softmax"
