"""Every layer of every stack in a model: text, vision and audio towers, encoder and decoder alike.

A layer is what FSDP shards as one unit and what activation checkpointing recomputes as one piece: an item of an
`nn.ModuleList` that has a forward and more than one module with parameters (a list of linear layers, or of experts
inside a layer, is not a stack). Knows no model code, no mesh and no process group.
"""

from collections import Counter

from torch import nn

from rl_parallel_plans.structure import collapsed


def stacked_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost layers by path, in the model's order; each once, also where lists share it."""
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
    holders.update(_outside(model, {id(layer) for layer in layers.values()}))
    return {path: layer for path, layer in layers.items() if all(holders[id(p)] == 1 for p in layer.parameters())}


def fsdp_units_in_words(model: nn.Module) -> str:
    """What `apply_fsdp` would shard as one unit."""
    units = fsdp_layers(model)
    stacks: dict[str, list[nn.Module]] = {}
    for path, layer in units.items():
        stacks.setdefault(collapsed(path), []).append(layer)
    if not stacks:
        return "none: no nn.ModuleList of layers"
    listed = [f"{path} ({len(each)} x {', '.join(sorted({_name(e) for e in each}))})" for path, each in stacks.items()]
    shared = len(stacked_layers(model)) - len(units)
    rest = f"the rest of the model, with {shared} layers that share parameters," if shared else "the rest of the model"
    return f"{', '.join(listed)}, then {rest} as one"


def _is_layer(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
        return False
    parts = (part for part in module.modules() if next(part.parameters(recurse=False), None) is not None)
    return next(parts, None) is not None and next(parts, None) is not None


def _outside(module: nn.Module, layers: set[int]) -> set[int]:
    """Identities of the parameters that one reaches from `module` without entering a layer."""
    found = {id(p) for p in module.parameters(recurse=False)}
    for child in module.children():
        if id(child) not in layers:
            found |= _outside(child, layers)
    return found


def _name(module: nn.Module) -> str:
    return type(module).__name__
