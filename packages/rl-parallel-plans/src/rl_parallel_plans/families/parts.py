"""What recognisers share: the parts of a module that hold parameters, and how to say that one is not known."""

from typing import TYPE_CHECKING

from torch import nn

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.structure import collapsed, joined

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.tensor.parallel import ParallelStyle

    Styles = dict[str, ParallelStyle]


class NotRecognizedError(PlanError):
    """The model has a part that no rule knows; the message says which."""


def parts(module: nn.Module) -> dict[str, nn.Module]:
    """Children that hold parameters, by name."""
    return {name: child for name, child in module.named_children() if any(True for _ in child.parameters())}


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that the module itself holds."""
    return dict(module.named_parameters(recurse=False))


def linear(module: nn.Module, name: str) -> nn.Linear | None:
    """The child of that name where it is an nn.Linear."""
    child = getattr(module, name, None)
    # A subclass that computes otherwise (a quantizing one) is not what its weight's shape says.
    return child if isinstance(child, nn.Linear) and type(child).forward is nn.Linear.forward else None


def known_sizes(module: nn.Module, sizes: "Mapping[str, int]") -> dict[str, int]:
    """Those of `sizes` that the module has as attributes."""
    return {name: size for name, size in sizes.items() if isinstance(module.__dict__.get(name), int)}


def first_linear(module: nn.Module, names: tuple[str, ...]) -> tuple[str, nn.Linear] | None:
    """The first of `names` that is an nn.Linear child."""
    return next(((name, found) for name in names if (found := linear(module, name)) is not None), None)


def replicated_inside(module: nn.Module, name: str) -> "Styles":
    """Every module under the child `name` whole on every rank, its gradients sums."""
    from rl_parallel_plans.styles import ReplicatedParallel

    styles = whole_inside(module, name, partial_gradient=True)
    inside = bool(parts(module.get_submodule(name)))
    return {**styles, name: ReplicatedParallel(partial_gradient=True, reads_inside=True)} if inside else styles


def whole_inside(module: nn.Module, name: str, *, partial_gradient: bool = False) -> "Styles":
    """Every module under the child `name` that holds parameters, whole on every rank."""
    from rl_parallel_plans.styles import ReplicatedParallel

    return {
        joined(name, path): ReplicatedParallel(partial_gradient=partial_gradient)
        for path, submodule in module.get_submodule(name).named_modules()
        if own_parameters(submodule)
    }


def under(name: str, styles: "Styles") -> "Styles":
    """Styles of the child `name` as those of its parent."""
    return {joined(name, path): style for path, style in styles.items()}


def whole_block(module: nn.Module, *, sequence_parallel: bool) -> "Styles":
    """Styles of a block that every rank computes whole."""
    from rl_parallel_plans.styles import WholeParallel

    return {**whole_inside(module, ""), "": WholeParallel(sequence_parallel=sequence_parallel)}


def refuse_unknown(module: nn.Module, styles: "Styles", *, kind: str) -> None:
    """NotRecognizedError where a parameter of the block has no rule."""
    from rl_parallel_plans.styles import Block

    block = styles[""]
    for path, submodule in module.named_modules():
        for name, parameter in own_parameters(submodule).items():
            known = collapsed(path) in styles and (path or (isinstance(block, Block) and name in block.own))
            if not known:
                where = f"{path}.{name}" if path else name
                raise NotRecognizedError(
                    f"its {kind} ({type(module).__name__}) has a parameter {where} {list(parameter.shape)}, which no "
                    "rule knows"
                )
            if not parameter.is_floating_point():
                raise NotRecognizedError(f"its {kind} is quantized: {path}.{name} is {parameter.dtype}")
