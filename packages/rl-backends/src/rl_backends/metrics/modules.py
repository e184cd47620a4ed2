"""What of a Hugging Face decoder is multiplied for each token, read from its modules and not from names in its config.

Knows parameters, shapes and a few attributes that transformers' modules share; does not know lengths or batches, and
runs nothing. Weights of any placement, or none (meta device): DTensors have their whole shape.

    decoder            the module that owns the input embedding; towers of other modalities are outside of it
    matrix products    every parameter of two dims or more that is not an embedding
    experts            a stack [experts, ., .], or a list `experts` of modules: top_k of them see a token
    attention          a module that says `is_causal`; its width is that of what its output projection reads

The scans of state-space layers and of linear attention are left out, their projections and convolutions are not.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

from rl_backends.errors import ModelError

__all__ = ["attention_widths", "decoder_of", "head_of", "matmul_parameters"]

_CHOSEN_EXPERTS = ("num_experts_per_tok", "moe_top_k", "moe_topk", "moe_k", "experts_per_token")
"""What modules, or else their config, call the number of experts that see a token. Modules say `top_k` too, which in a
config is an option of sampling."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def decoder_of(model: nn.Module) -> nn.Module:
    """The module whose layers read tokens.

    Raises:
        ModelError: the model has no input embedding, or nothing owns it.
    """
    get = getattr(model, "get_input_embeddings", None)
    embedding = None if get is None else get()
    owner = next((each for each in model.modules() if any(child is embedding for child in each.children())), None)
    if embedding is None or owner is None:
        raise ModelError(
            f"{type(model).__name__} has no input embedding, so that nothing tells which layers read tokens"
        )
    return owner


def head_of(model: nn.Module) -> nn.Module | None:
    """What reads hidden states: the language-model head, or a `score`; None for a model without."""
    get = getattr(model, "get_output_embeddings", None)
    head = None if get is None else get()
    found = getattr(model, "score", None) if head is None else head
    return found if isinstance(found, nn.Module) else None


def matmul_parameters(module: nn.Module) -> Iterator[tuple[nn.Parameter, float]]:
    """Each parameter that tokens are multiplied with, and the share of it that one token meets.

    Raises:
        ModelError: experts of which nothing tells how many see a token.
    """
    shares = _shares_in_lists(module)
    for path, each in module.named_modules():
        if isinstance(each, nn.Embedding):
            continue
        parameters = list(each.parameters(recurse=False))
        stacks = [] if isinstance(each, _CONVOLUTIONS) else [p for p in parameters if p.ndim == 3]
        if stacks:  # two dims are their biases then
            share = _chosen(module, path) / stacks[0].shape[0]
            yield from ((stack, share) for stack in stacks)
        else:
            yield from ((p, shares.get(id(each), 1.0)) for p in parameters if p.ndim > 1)


def attention_widths(decoder: nn.Module, hidden_size: int) -> Counter[tuple[int | None, int]]:
    """How many layers there are of each (window, width): keys a query sees at most, and numbers multiplied per pair.

    A query and a key are multiplied over all heads' query width, and the value over all heads' value width.

    Raises:
        ModelError: attention without a linear layer back to `hidden_size`.
    """
    layers: Counter[tuple[int | None, int]] = Counter()
    for path, module in decoder.named_modules():
        if isinstance(getattr(module, "is_causal", None), bool):
            layers[_window(module), _width(module, path, hidden_size)] += 1
    return layers


def _shares_in_lists(module: nn.Module) -> dict[int, float]:
    """By identity of each module inside a list of experts: the share of its list that a token meets."""
    shares: dict[int, float] = {}
    for path, each in module.named_modules():
        if isinstance(each, nn.ModuleList) and path.rpartition(".")[2] == "experts":
            share = _chosen(module, path) / len(each)
            shares |= {id(part): share for expert in each for part in expert.modules()}
    return shares


def _chosen(root: nn.Module, path: str) -> int:
    """Experts that see a token, as something around those at `path` says: the nearest first."""
    ancestors = [root.get_submodule(path)]
    while path:
        path = path.rpartition(".")[0]
        ancestors.append(root.get_submodule(path))
    for ancestor in ancestors:
        modules = [(each, ("top_k", *_CHOSEN_EXPERTS)) for each in (ancestor, *ancestor.children())]
        for holder, names in (*modules, (getattr(ancestor, "config", None), _CHOSEN_EXPERTS)):
            for name in names:
                if isinstance(found := getattr(holder, name, None), int):
                    return found
    raise ModelError(
        f"{type(ancestors[0]).__name__} holds experts, and no module around it says how many see a token (looked for "
        f"top_k, {', '.join(_CHOSEN_EXPERTS)})"
    )


def _width(attention: nn.Module, path: str, hidden_size: int) -> int:
    projections = [sizes for module in attention.modules() if (sizes := _sizes(module)) is not None]
    values = max((inputs for inputs, outputs in projections if outputs == hidden_size), default=None)
    if values is None:
        raise ModelError(
            f"{path} ({type(attention).__name__}) has no linear layer to the hidden size {hidden_size}, from which the "
            "width of its heads could be read"
        )
    of_key, of_value = (getattr(attention, name, None) for name in ("qk_head_dim", "v_head_dim"))
    queries = values * of_key // of_value if of_key and of_value else values
    return queries + values


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of a linear layer; that of GPT-2 is a class of transformers with other names."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    inputs, outputs = getattr(module, "nx", None), getattr(module, "nf", None)
    return (inputs, outputs) if isinstance(inputs, int) and isinstance(outputs, int) else None


def _window(attention: nn.Module) -> int | None:
    """Keys that a query sees at most, itself included; None for all before it."""
    if hasattr(attention, "sliding_window"):
        return _positive(attention.sliding_window)
    config: Any = getattr(attention, "config", None)
    kinds, layer = getattr(config, "layer_types", None), getattr(attention, "layer_idx", None)
    if kinds is not None and isinstance(layer, int) and kinds[layer] != "sliding_attention":
        return None
    return _positive(getattr(config, "sliding_window", None))


def _positive(window: object) -> int | None:
    return window if isinstance(window, int) and window > 0 else None
