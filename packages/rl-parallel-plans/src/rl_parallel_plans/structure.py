"""Where things are inside a model, found by shape and by name and never by class.

Knows nothing of plans, placements or processes. A name is the dotted path of `named_modules`; a pattern is such a path
whose tokens may hold `*` (one token each, as in `torch.distributed.tensor.parallel.parallelize_module`).
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn


def matching_modules(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """Every module whose path matches `pattern` token by token, with its path.

    What stands in a pipeline stage for a module of another stage matches nothing.
    """
    tokens = pattern.split(".")
    return [
        (name, module)
        for name, module in model.named_modules()
        if _matches(name.split("."), tokens) and "pipeline_path" not in module.__dict__
    ]


def _matches(path: list[str], tokens: list[str]) -> bool:
    return len(path) == len(tokens) and all(map(fnmatchcase, path, tokens))


def collapsed(name: str) -> str:
    """`name` with each index replaced by `*`, so that the same place in every layer has one name."""
    return ".".join("*" if token.isdigit() else token for token in name.split("."))


def direct_parameters(model: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Each parameter slot as (module path, name, parameter); tied slots come once per end."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield path, name, parameter


def joined(path: str, name: str) -> str:
    """`path.name`, or the one of them that is not empty: that of the root is."""
    return ".".join(filter(None, (path, name)))


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """The `nn.ModuleList` that holds the most parameters, with its path: the stack of decoder layers.

    Lists nested in a layer (experts) hold fewer, and on a tie the outermost comes first. None where there is no list.
    """
    lists = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()), default=None)


def text_layers(model: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """The stack of decoder layers that stands beside the input embedding, else `decoder_layers`.

    In a model that also sees or hears, the largest list need not be the text's.
    """
    embedding = input_embedding(model)
    if embedding is not None:
        backbone = embedding.rpartition(".")[0]
        lists = [
            (joined(backbone, name), child)
            for name, child in model.get_submodule(backbone).named_children()
            if isinstance(child, nn.ModuleList)
        ]
        if lists:
            return max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))
    return decoder_layers(model)


def output_head(model: nn.Module) -> str | None:
    """Path of the linear layer that makes logits: `get_output_embeddings()`, else a child `lm_head`."""
    head = _embedding(model, "get_output_embeddings")
    return _path_of(model, getattr(model, "lm_head", None) if head is None else head)


def input_embedding(model: nn.Module) -> str | None:
    """Path of what `get_input_embeddings()` returns, else of a child `embed_tokens`; None where there is neither."""
    embedding = _embedding(model, "get_input_embeddings")
    return _path_of(model, getattr(model, "embed_tokens", None) if embedding is None else embedding)


def _embedding(model: nn.Module, method: str) -> nn.Module | None:
    try:
        found = getattr(model, method, lambda: None)()
    except NotImplementedError:  # how a Hugging Face model says that it has none
        return None
    return found if isinstance(found, nn.Module) else None


def source_of_forward(module: nn.Module) -> str:
    """The text of a module's forward; empty where it cannot be had."""
    try:
        return inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AroundLayers:
    """What a module's forward does around its loop over a list of layers."""

    before: frozenset[str]
    """Children that it calls before the loop."""
    inside: frozenset[str]
    """Children that it calls in the loop, beside the layers."""
    repeated: bool
    """Whether the layers run more than once in a forward: a loop in a loop, or several of them."""


def around_layers(module: nn.Module, layers: str) -> AroundLayers | None:
    """Read `module.forward` for its loop over `self.<layers>`; None where its text shows no such loop."""
    try:
        tree = ast.parse(textwrap.dedent(source_of_forward(module)))
    except SyntaxError:
        return None
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While)]
    of_layers = [loop for loop in loops if any(_is_child(node, layers) for node in ast.walk(loop))]
    if not of_layers:
        return None
    calls = [
        (node.func.attr if isinstance(node.func, ast.Attribute) else "", node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _is_child(node.func)
    ]
    begin = min(loop.lineno for loop in of_layers)
    end = max(loop.end_lineno or loop.lineno for loop in of_layers)
    return AroundLayers(
        before=frozenset(name for name, line in calls if line < begin),
        inside=frozenset(name for name, line in calls if begin <= line <= end and name != layers),
        repeated=len(of_layers) > 1,
    )


def _is_child(node: ast.AST, name: str | None = None) -> bool:
    """Whether `node` is `self.<name>`, or `self.` anything."""
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and name in {None, node.attr}
    )


def _path_of(model: nn.Module, wanted: object) -> str | None:
    return next((path for path, module in model.named_modules() if module is wanted), None)


def head_size(attention: nn.Module, config: object) -> int | None:
    """Features of one attention head, from the module, else from the model's config; None where neither says."""
    for owner in (attention, config):
        try:
            size = getattr(owner, "head_dim", None)
        except Exception:  # noqa: BLE001 - a config that knows one size for each layer raises what it likes
            size = None
        if isinstance(size, int) and size > 0:
            return size
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else None
