"""Where things are inside a model, found by shape and by name and never by class: layers, embeddings, heads, ties.

A name is the dotted path of `named_modules`; a pattern is such a path whose tokens may hold `*` (one token each, as in
`torch.distributed.tensor.parallel.parallelize_module`).
"""

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from rl_parallel_plans.errors import PlanError


def matching_modules(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """Every module whose path matches `pattern` token by token, with its path.

    A pipeline stage's stand-in for a module of another stage matches nothing.
    """
    tokens = pattern.split(".")
    return [
        (name, module)
        for name, module in model.named_modules()
        if name.count(".") + 1 == len(tokens)
        and all(map(fnmatchcase, name.split("."), tokens))
        and "pipeline_path" not in module.__dict__
    ]


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
    """Path of what makes logits: `get_output_embeddings()`, else a child `lm_head`.

    Of the model, or of the outermost of the modules around its input embedding that has one: a model may hold a whole
    language model, and its logits are the model's.
    """
    embedding = input_embedding(model)
    names = [] if embedding is None else embedding.split(".")
    for depth in range(max(len(names), 1)):
        owner = model.get_submodule(".".join(names[:depth]))
        head = _embedding(owner, "get_output_embeddings")
        head = getattr(owner, "lm_head", None) if head is None else head
        if (path := _path_of(model, head)) is not None:
            return path
    return None


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


def reshapes_to_input_width(module: nn.Module) -> str | None:
    """The local name in which a module's forward keeps the features of its input, to reshape what it computes to them.

    `b, t, width = x.size()` and later `y.reshape(b, t, width)`: wrong where `y` is made of some of the features only.
    None where its text shows no such thing.
    """
    try:
        tree = ast.parse(textwrap.dedent(source_of_forward(module)))
    except SyntaxError:
        return None
    widths = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(names := node.targets[0], ast.Tuple):
            continue
        if ast.unparse(node.value) in ("hidden_states.size()", "hidden_states.shape") and len(names.elts) == 3:
            widths |= {name.id for name in names.elts[2:] if isinstance(name, ast.Name)}
    reshapes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("reshape", "view")
    ]
    last = [call.args[-1] for call in reshapes if call.args]
    last = [each.elts[-1] if isinstance(each, ast.Tuple) and each.elts else each for each in last]
    return next((each.id for each in last if isinstance(each, ast.Name) and each.id in widths), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AroundLayers:
    """What a module's forward does around its loop over a list of layers."""

    before: frozenset[str]
    """Children that it calls before the loop."""
    inside: frozenset[str]
    """Children that it calls in the loop, beside the layers; a list where it calls an item of it."""
    repeated: bool
    """Whether the layers run more than once in a forward: a loop in a loop, or several of them."""


def around_layers(module: nn.Module, layers: str) -> AroundLayers | None:
    """Read `module.forward` for its loop over `self.<layers>`; None where its text shows no such loop."""
    try:
        tree = ast.parse(textwrap.dedent(source_of_forward(module)))
    except SyntaxError:
        return None

    def child(node: ast.AST) -> str | None:  # the name in `self.<name>`
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            return node.attr
        return None

    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While)]
    of_layers = [loop for loop in loops if any(child(node) == layers for node in ast.walk(loop))]
    if not of_layers:
        return None
    calls = [
        (name, node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and (name := child(node.func.value if isinstance(node.func, ast.Subscript) else node.func)) is not None
    ]
    begin = min(loop.lineno for loop in of_layers)
    end = max(loop.end_lineno or loop.lineno for loop in of_layers)
    return AroundLayers(
        before=frozenset(name for name, line in calls if line < begin),
        inside=frozenset(name for name, line in calls if begin <= line <= end and name != layers),
        repeated=len(of_layers) > 1,
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


# -- Layers ------------------------------------------------------------------------------------------


def stacked_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost layers of every stack by path, in the model's order; each once, also where lists share it.

    A layer is what FSDP shards as one unit and what activation checkpointing recomputes as one piece: an item of an
    `nn.ModuleList`, in a text, vision or audio tower, an encoder or a decoder, that has a forward and more than one
    module with parameters. A list of linear layers, or of experts inside a layer, is not a stack.
    """
    layers: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(path.startswith(f"{outer}.") for outer in layers):
            continue
        for name, item in module.named_children():
            if id(item) not in seen and _is_layer(item):
                seen.add(id(item))
                layers[f"{path}.{name}" if path else name] = item
    return layers


def fsdp_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that are FSDP units of their own: those that share no parameter with anything outside of them.

    The others stay in the last unit, with the rest of the model: a parameter belongs to one unit only.
    """
    layers = stacked_layers(model)
    holders = Counter(id(p) for layer in layers.values() for p in layer.parameters())
    entered = {id(layer) for layer in layers.values()}

    def outside(module: nn.Module) -> set[int]:  # parameters that one reaches without entering a layer
        found = {id(p) for p in module.parameters(recurse=False)}
        return found.union(*(outside(child) for child in module.children() if id(child) not in entered))

    holders.update(outside(model))
    return {path: layer for path, layer in layers.items() if all(holders[id(p)] == 1 for p in layer.parameters())}


def fsdp_units_in_words(model: nn.Module) -> str:
    """What `apply_fsdp` would shard as one unit."""
    units = fsdp_layers(model)
    stacks: dict[str, list[nn.Module]] = {}
    for path, layer in units.items():
        stacks.setdefault(collapsed(path), []).append(layer)
    if not stacks:
        return "none: no nn.ModuleList of layers"
    kinds = {path: ", ".join(sorted({type(layer).__name__ for layer in each})) for path, each in stacks.items()}
    listed = [f"{path} ({len(each)} x {kinds[path]})" for path, each in stacks.items()]
    shared = len(stacked_layers(model)) - len(units)
    rest = f"the rest of the model, with {shared} layers that share parameters," if shared else "the rest of the model"
    return f"{', '.join(listed)}, then {rest} as one"


def _is_layer(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
        return False
    parts = (part for part in module.modules() if next(part.parameters(recurse=False), None) is not None)
    return next(parts, None) is not None and next(parts, None) is not None


# -- Ties: parameters that two modules share (`lm_head` and `embed_tokens`) --------------------------


def tied_names(model: nn.Module) -> list[list[str]]:
    """Groups of two or more parameter names that are one parameter."""
    groups: dict[int, list[str]] = {}
    for path, name, parameter in direct_parameters(model):
        groups.setdefault(id(parameter), []).append(joined(path, name))
    return [names for names in groups.values() if len(names) > 1]


def retie(model: nn.Module, groups: list[list[str]]) -> None:
    """Make the names of each group one parameter again: the first name's.

    Sharding makes each end a parameter of its own. Without this, half of the embedding's gradient is lost, and the two
    ends differ after one optimizer step.
    """
    for first, *others in groups:
        parameter = model.get_parameter(first)
        for other in others:
            path, _, name = other.rpartition(".")
            model.get_submodule(path).register_parameter(name, parameter)
    if tied_names(model) != groups:
        raise PlanError(f"ties were {groups} before sharding and are {tied_names(model)} after: report this plan")


def broken_tie(model: nn.Module) -> str | None:
    """The sentence that says so where the config promises tied embeddings and the model's are two parameters."""
    promised = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    embedding, head = input_embedding(model), output_head(model)
    if not promised or embedding is None or head is None:
        return None
    modules = [model.get_submodule(path) for path in (embedding, head)]
    if any("pipeline_path" in module.__dict__ for module in modules):
        return None  # a pipeline stage that holds one end: the pipeline keeps both equal
    if not all(isinstance(getattr(module, "weight", None), nn.Parameter) for module in modules):
        return None  # several embeddings or heads in a list (MusicGen), of which no rule says which are one
    ends = [f"{path}.weight" for path in (embedding, head)]
    if model.get_parameter(ends[0]) is model.get_parameter(ends[1]):
        return None
    return (
        f"config.tie_word_embeddings is True, but {ends[1]} and {ends[0]} are two parameters: call model.tie_weights() "
        "before planning, or set tie_word_embeddings=False"
    )
