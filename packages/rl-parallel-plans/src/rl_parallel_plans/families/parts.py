"""What recognisers share: the parts of a module that hold parameters, and how to say that one is not known."""

from typing import TYPE_CHECKING

from torch import nn

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.structure import collapsed

if TYPE_CHECKING:
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


def first_linear(module: nn.Module, names: tuple[str, ...]) -> tuple[str, nn.Linear] | None:
    """The first of `names` that is an nn.Linear child."""
    return next(((name, found) for name in names if (found := linear(module, name)) is not None), None)


def replicated_inside(module: nn.Module, name: str) -> "Styles":
    """Every module under the child `name` whole on every rank, its gradients sums."""
    from rl_parallel_plans.styles import BlockReplicated, BlockReplicatedTree

    child = module.get_submodule(name)
    styles: Styles = {
        f"{name}.{path}" if path else name: BlockReplicated()
        for path, submodule in child.named_modules()
        if own_parameters(submodule)
    }
    return {**styles, name: BlockReplicatedTree()} if parts(child) else styles


def whole_block(module: nn.Module, *, sequence_parallel: bool) -> "Styles":
    """Styles of a block that every rank computes whole."""
    from rl_parallel_plans.styles import ReplicatedParallel, WholeParallel

    styles: Styles = {
        path: ReplicatedParallel() for path, part in module.named_modules() if path and own_parameters(part)
    }
    styles[""] = WholeParallel(sequence_parallel=sequence_parallel)
    return styles


def refuse_unknown(module: nn.Module, styles: "Styles", *, kind: str) -> None:
    """NotRecognizedError where a parameter of the block has no rule."""
    from rl_parallel_plans.styles import BlockParallel

    block = styles[""]
    for path, submodule in module.named_modules():
        for name, parameter in own_parameters(submodule).items():
            known = collapsed(path) in styles and (path or (isinstance(block, BlockParallel) and name in block.own))
            if not known:
                where = f"{path}.{name}" if path else name
                raise NotRecognizedError(
                    f"its {kind} ({type(module).__name__}) has a parameter {where} {list(parameter.shape)}, which no "
                    "rule knows"
                )
            if not parameter.is_floating_point():
                raise NotRecognizedError(f"its {kind} is quantized: {path}.{name} is {parameter.dtype}")
