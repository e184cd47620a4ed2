"""Make a Hugging Face model read packs of rows, or refuse it by name; or padded rows by another kernel than its own.

What stands against packing is found in a model by its parts before anything is changed: the names that Hugging Face
gives to modules, attributes and config fields, and the source of forwards; no numbers. Each finding is one sentence:
what lets rows see one another, where, and what to do. What is not recognised is a finding too: packing is exact, or it
is refused.
"""

import functools
import inspect
import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from rl_backends.errors import ModelError
from rl_backends.packing.attention import AttentionKernel, packed_attention, padded_attention
from rl_parallel_plans.structure import collapsed

_OTHER_INPUTS = ("vision_config", "audio_config", "speech_config", "text_encoder")
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_LAYER_TYPES = ("full_attention", "sliding_attention")
# Config field to what it does.
_OTHER_ATTENTION = {
    "alibi": "adds a bias to attention scores by distance",
    "attn_temperature_tuning": "scales queries by their position in the pack",
    "attention_chunk_size": "attends within chunks of the pack",
    "use_bidirectional_attention": "attends to later tokens",
    "is_encoder_decoder": "has an encoder beside the decoder",
}
_MIXERS = ("indexer", "mamba", "linear_attn", "ssm", "conv", "short_conv", "temporal_block", "ngram", "engram")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PER_TOKEN = (nn.Embedding, nn.Linear, nn.Dropout, nn.Identity, nn.LayerNorm)
_PER_TOKEN_NAMES = re.compile(r"norm|rotary|rope", re.IGNORECASE)
_MIXING_CALLS = re.compile(r"\b(?:roll|cumsum|cumprod|unfold|conv1d)\(")


def enable_packing(model: nn.Module, *, kernel: AttentionKernel = "sdpa") -> None:
    """Let every attention of `model` run on packed rows alone, from now on, by `kernel`.

    The base model is then called with tokens `[1, sum of lengths]`, `position_ids` that begin at 0 in every row, and
    `cu_seq_lens_q=`, `cu_seq_lens_k=`, `max_length_q=`, `max_length_k=`; a call without them is refused, never answered
    by attention over all rows. Weights, names and state are untouched: only `attn_implementation` is another.

    Works on the meta device, before or after a model is sharded.

    Raises:
        ModelError: tokens of the model mix in a way that packing would let leak; every reason is listed.
    """
    found = list(dict.fromkeys(findings(model)))
    if found:
        listed = "\n".join(f"  {number}. {finding}" for number, finding in enumerate(found, 1))
        raise ModelError(
            f"{type(model).__qualname__} cannot be packed: set sequence_packing to false, or change what stands in the "
            f"way, {len(found)} reason(s):\n{listed}"
        )
    _use(model, f"rl_backends_packed_{kernel}", functools.partial(packed_attention, kernel=kernel))


def enable_padded_kernel(model: nn.Module, *, kernel: AttentionKernel) -> None:
    """Let every attention of `model` run on right-padded rows by `kernel`, "sdpa" or "flex", instead of its own.

    Raises:
        ModelError: an attention of the model does something that these kernels are not told of.
    """
    if found := list(dict.fromkeys(padded_findings(model))):
        raise ModelError(
            f"{type(model).__qualname__} cannot run with kernels.attention={kernel!r} (choose 'auto', the model's own "
            f"attention): {'; '.join(found)}"
        )
    _use(model, f"rl_backends_padded_{kernel}", functools.partial(padded_attention, kernel=kernel))


def _use(model: nn.Module, name: str, attention: Any) -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(name, attention)
    for config in _configs(model):
        if not hasattr(config, "_attn_implementation"):
            continue
        config._attn_implementation = name  # noqa: SLF001 - what set_attn_implementation sets, and no more
    for path, module in attention_modules(model):
        chosen = module.config._attn_implementation  # type: ignore[union-attr]  # noqa: SLF001 - as above
        assert chosen == name, f"{path} still runs {chosen}"


def _configs(model: nn.Module) -> list[Any]:
    """Each config that a module of the model holds, once."""
    return list(
        {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}.values()
    )


# ---- What stands in the way.


def findings(model: nn.Module) -> Iterator[str]:
    """One sentence for each thing that is in the way of packing."""
    lists = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        yield "it holds no nn.ModuleList of decoder layers"
        return
    # The list with the most parameters; those nested in a layer (experts) hold fewer.
    path, layers = max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))
    for config in _configs(model):
        for field in _OTHER_INPUTS:
            if getattr(config, field, None) is not None:
                yield f"its config has a {field}: images and sound do not lie in the pack; use the text model"
        yield from _attention_of_config(config, known=_LAYER_TYPES)

    # Beside the layers: what works token by token.
    parent, _, own_name = path.rpartition(".")
    decoder = model.get_submodule(parent)
    if not _hands_on_kwargs(decoder):
        yield f"{type(decoder).__name__}.forward does not hand on to its layers where rows begin (**kwargs)"
    for name, child in decoder.named_children():
        kind = type(child).__name__
        if name != own_name and not isinstance(child, _PER_TOKEN) and not _PER_TOKEN_NAMES.search(kind):
            yield f"{name} ({kind}) stands beside the layers, and is neither embedding, norm nor rotary embedding"

    for number, layer in layers.named_children():
        yield from _layer(f"{path}.{number}", layer)
    inside = {id(module) for layer in layers for module in layer.modules()}
    for place, module in attention_modules(model):
        if id(module) not in inside:
            yield f"{collapsed(place)} ({type(module).__name__}) is attention outside the decoder layers"
    for place, module in model.named_modules():
        told = vars(module).get("rope_type")
        for kind in told.values() if isinstance(told, dict) else (told,):
            if kind in _LENGTH_DEPENDENT_ROPE:
                yield (
                    f"{collapsed(place)} has rope_type={kind!r}, whose frequencies depend on the longest row that it "
                    f"is given: a row's result would depend on its neighbours"
                )


def padded_findings(model: nn.Module) -> Iterator[str]:
    """One sentence for each thing that an attention does to scores, and would not hand on to another kernel."""
    attentions = attention_modules(model)
    if not attentions:
        yield "it has no attention that says by an attribute is_causal whether it is causal"
    for path, attention in attentions:
        yield from _attention(f"{collapsed(path)} ({type(attention).__name__})", attention)
    for config in _configs(model):
        yield from _attention_of_config(config, known=(*_LAYER_TYPES, "linear_attention"))


def attention_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module that says whether it is causal, as Hugging Face's attentions do, by path."""
    return [(path, module) for path, module in model.named_modules() if "is_causal" in vars(module)]


def _attention_of_config(config: Any, *, known: tuple[str, ...]) -> Iterator[str]:
    for field, effect in _OTHER_ATTENTION.items():
        if value := getattr(config, field, None):
            yield f"its config has {field}={value}, which {effect}"
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - set(known)):
        yield f"its layer_types hold {', '.join(others)}: only {' and '.join(_LAYER_TYPES)} are known"


def _layer(place: str, layer: nn.Module) -> Iterator[str]:
    where, kind = collapsed(place), type(layer).__name__
    if not _hands_on_kwargs(layer):
        yield f"{where} ({kind}).forward does not hand on to its attention where rows begin (**kwargs)"
    attentions = attention_modules(layer)
    if not attentions:
        yield (
            f"{where} ({kind}) has no attention that says by an attribute is_causal whether it is causal: linear "
            f"attention, Mamba and whatever else mixes tokens would mix those of two rows"
        )
    for path, module in layer.named_modules():
        name = path.rpartition(".")[2]
        part = f"{where}.{collapsed(path)} ({type(module).__name__})" if path else f"{where} ({kind})"
        if isinstance(module, _CONVOLUTIONS):
            yield f"{part} is a convolution over tokens, whose window reaches into the row before"
        elif name in _MIXERS:
            yield f"{part} mixes tokens beside attention"
        if found := _MIXING_CALLS.search(source_of(type(module).forward)):
            yield f"{part} calls {found[0]}...) in its forward, which may reach into the row before"
    for path, attention in attentions:
        yield from _attention(f"{where}.{collapsed(path)} ({type(attention).__name__})", attention)


def _attention(part: str, attention: nn.Module) -> Iterator[str]:
    source, config = source_of(type(attention).forward), getattr(attention, "config", None)
    if not attention.is_causal:
        yield f"{part} is not causal"
    if "ALL_ATTENTION_FUNCTIONS" not in source or not hasattr(config, "_attn_implementation"):
        yield f"{part} does not compute attention through transformers' AttentionInterface"
    elif not _hands_on_kwargs(attention):
        yield f"{part} does not hand on to the attention function where rows begin (**kwargs)"
    types = getattr(config, "layer_types", None)
    if types is not None:
        slides = "sliding_attention" in types
    else:
        slides = any(getattr(each, "sliding_window", None) is not None for each in (attention, config))
    if slides and "sliding_window" not in source:
        yield f"{part} has a sliding window that it does not hand on to the attention function"
    if any("sink" in name for name, _ in attention.named_parameters(recurse=False)) and "s_aux" not in source:
        yield f"{part} has attention sinks that it does not hand on as s_aux"
    if getattr(config, "attn_logit_softcapping", None) and "softcap" not in source:
        yield f"{part} caps scores and does not hand on softcap"


def _hands_on_kwargs(module: nn.Module) -> bool:
    """Whether its forward takes what it does not know by name, and gives it to something."""
    forward = inspect.unwrap(type(module).forward)
    names = [each.name for each in inspect.signature(forward).parameters.values() if each.kind is each.VAR_KEYWORD]
    return bool(names) and len(re.findall(rf"\*\*{names[0]}\b", source_of(type(module).forward))) > 1


def source_of(thing: Any) -> str:
    """The source of a class or function; empty where there is none."""
    try:
        return inspect.getsource(inspect.unwrap(thing))
    except (OSError, TypeError):
        return ""
