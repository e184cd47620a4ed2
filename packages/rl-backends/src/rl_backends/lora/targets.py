"""Which modules of a model get adapters, and which are trained whole: names in, modules out, or a refusal.

Knows names and module kinds; changes nothing. A pattern that fits nothing, or something that cannot be adapted, is an
error: an adapter that is silently not there is found out after the run.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from rl_backends.errors import ModelError
from rl_parallel_plans.structure import collapsed, text_layers, tied_names

__all__ = ["find_targets", "find_trained_whole"]


def find_targets(model: nn.Module, target_modules: str | tuple[str, ...]) -> dict[str, nn.Linear]:
    """The linear layers that `LoraConfig.target_modules` means, by name, in the model's order.

    Raises:
        ModelError: the model has no decoder layers, is quantized, or a pattern fits none of their linear layers, or
            also what cannot be adapted.
    """
    linears = _adaptable_linears(model)
    if target_modules == "all-linear":
        return linears
    wanted: set[str] = set()
    for pattern in target_modules:
        matches = _ending_in(model, pattern)
        if not matches:
            raise ModelError(
                f"target_modules: {pattern!r} is the end of no module's name in {type(model).__name__}; its linear "
                f"layers end in {_ends(linears)}"
            )
        if loose := [name for name in matches if name not in linears]:
            raise ModelError(
                f"target_modules: {pattern!r} also fits {loose[0]}, which cannot be adapted: "
                f"{_why_not(model, loose[0])}; name linear layers of the decoder alone, which end in {_ends(linears)}"
            )
        wanted |= set(matches)
    return {name: linear for name, linear in linears.items() if name in wanted}


def find_trained_whole(
    model: nn.Module, modules_to_save: tuple[str, ...], *, targets: Iterable[str]
) -> dict[str, nn.Module]:
    """The modules that `LoraConfig.modules_to_save` means, by name.

    Raises:
        ModelError: a pattern fits no module with parameters, one that gets adapters, or one tied to another.
    """
    found: dict[str, nn.Module] = {}
    tied = {name for names in tied_names(model) for name in names}
    for pattern in modules_to_save:
        matches = [name for name in _ending_in(model, pattern) if any(True for _ in _parameters(model, name))]
        if not matches:
            raise ModelError(
                f"modules_to_save: {pattern!r} is the end of no name of a module with parameters in "
                f"{type(model).__name__}, whose modules are {[name for name, _ in model.named_children()]}"
            )
        for name in matches:
            if adapted := [target for target in targets if target == name or target.startswith(f"{name}.")]:
                raise ModelError(f"modules_to_save: {name} is to be trained whole, and {adapted[0]} to have an adapter")
            if ends := [end for end in _parameters(model, name) if end in tied]:
                raise ModelError(
                    f"modules_to_save: {ends[0]} is tied to another parameter, which would be trained with it and is "
                    f"not in the saved adapter; leave {pattern!r} out"
                )
            found[name] = model.get_submodule(name)
    return found


def _adaptable_linears(model: nn.Module) -> dict[str, nn.Linear]:
    stack = text_layers(model)
    if stack is None:
        raise ModelError(f"{type(model).__name__} has no stack of decoder layers to put adapters into")
    found = {}
    for name, module in model.named_modules():
        if name.startswith(f"{stack[0]}.") and isinstance(module, nn.Linear) and not _in_mixture(model, name):
            if not module.weight.is_floating_point():
                raise ModelError(
                    f"{name}.weight is {module.weight.dtype}: the model is quantized, and merged weights would be "
                    f"another model's; load it dequantized"
                )
            found[name] = module
    if not found:
        raise ModelError(f"{type(model).__name__} has no nn.Linear in {stack[0]} to put adapters into")
    return found


def _in_mixture(model: nn.Module, name: str) -> bool:
    """Whether it is an expert, or a router or gate beside experts."""
    parent = model.get_submodule(name.rpartition(".")[0])
    return "experts" in name.split(".") or "experts" in dict(parent.named_children())


def _why_not(model: nn.Module, name: str) -> str:
    module = model.get_submodule(name)
    if name and _in_mixture(model, name):
        return "experts of a mixture, and what routes to them, stay frozen"
    if not isinstance(module, nn.Linear):
        return f"it is a {type(module).__name__}"
    return "it is outside of the decoder layers"


def _ending_in(model: nn.Module, pattern: str) -> list[str]:
    wanted = pattern.split(".")
    return [name for name, _ in model.named_modules() if name and _ends_in(name.split("."), wanted)]


def _ends_in(tokens: list[str], wanted: list[str]) -> bool:
    return len(tokens) >= len(wanted) and all(map(fnmatchcase, tokens[-len(wanted) :], wanted))


def _parameters(model: nn.Module, name: str) -> list[str]:
    module = model.get_submodule(name)
    return [f"{name}.{own}" for own, _ in module.named_parameters(remove_duplicate=False)]


def _ends(linears: Iterable[str]) -> list[str]:
    """The last two tokens of each kind of linear layer, once."""
    return list(dict.fromkeys(".".join(collapsed(name).split(".")[-2:]) for name in linears))
