"""What context parallelism cannot do, found in a model by its parts before anything is changed.

Modules, attributes and config fields have the names that Hugging Face gives them. Each finding is one sentence: what is
in the way, where, then what to do. Whatever is not recognised as causal attention over torch's SDPA is a finding too.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.structure import collapsed, decoder_layers, joined, source_of_forward

if TYPE_CHECKING:
    from rl_parallel_plans.plan.parallel_plan import ParallelPlan

FULL, SLIDING = "full_attention", "sliding_attention"
# Their frequencies depend on the longest position that a rank sees.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_OTHER_INPUTS = ("vision_config", "audio_config", "speech_config", "text_encoder")
# Config field to what it does.
_SCORE_CHANGES = {
    "attn_logit_softcapping": "caps attention scores, which SDPA cannot",
    "alibi": "adds a bias to attention scores by distance",
    "attn_temperature_tuning": "scales queries by their position among this rank's tokens",
    "attention_chunk_size": "attends within chunks",
    "use_bidirectional_attention": "attends to later tokens",
}


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
    yield from _inputs(model)
    yield from _layers(model)
    inside = dict(attention_modules(model))
    for path, module in model.named_modules():
        if path in inside:
            yield from _attention(collapsed(path), module)
            try:
                attention_window(model, path)
            except PlanError as unclear:
                yield str(unclear)
        elif "is_causal" in vars(module):
            yield f"{collapsed(path)} ({type(module).__name__}) is attention outside the decoder layers: not supported"
    yield from _scores(model)
    yield from _position_embeddings(model)


def _configs(model: nn.Module) -> list[Any]:
    """The configs of the model and of its decoder."""
    owners = (model, model.get_submodule(decoder_path(model)))
    return [config for owner in owners if (config := getattr(owner, "config", None)) is not None]


def _inputs(model: nn.Module) -> Iterator[str]:
    for config in _configs(model):
        for field in _OTHER_INPUTS:
            if getattr(config, field, None) is not None:
                yield f"its config has a {field}: images and sound are not tokens that can be cut; use the text model"
        if getattr(config, "is_encoder_decoder", False):
            yield "it is an encoder and a decoder: only decoders are causal"


def _layers(model: nn.Module) -> Iterator[str]:
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


def _attention(where: str, attention: nn.Module) -> Iterator[str]:
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


def _scores(model: nn.Module) -> Iterator[str]:
    for config in _configs(model):
        for field, effect in _SCORE_CHANGES.items():
            if value := getattr(config, field, None):
                yield f"its config has {field}={value}, which {effect}: not supported"
        if others := sorted(set(getattr(config, "layer_types", None) or ()) - {FULL, SLIDING}):
            yield f"its layer_types hold {', '.join(others)}: only {FULL} and {SLIDING} are supported"


def _position_embeddings(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        told = getattr(module, "rope_type", None) if "rope_type" in vars(module) else None
        for kind in told.values() if isinstance(told, dict) else (told,):
            if kind in _LENGTH_DEPENDENT_ROPE:
                yield (
                    f"{collapsed(path)} has rope_type={kind!r}, whose frequencies depend on the longest position that "
                    "a rank sees: ranks would disagree"
                )
