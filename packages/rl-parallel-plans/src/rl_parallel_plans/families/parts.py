"""What recognisers share: the parts of a module that hold parameters, and how to say that one is not known."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.structure import collapsed, joined
from rl_parallel_plans.styles import Block, GatheredColwise, ReplicatedParallel, Rowwise, WholeParallel

Styles = dict[str, ParallelStyle]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a plan is asked for."""

    tp: int = 1
    """Ranks that a layer is split over; more than key/value heads where groups of ranks have one together."""
    sequence_parallel: bool = False
    """Whether the stream between blocks is cut along the sequence."""
    projections: Literal["rowwise", "colwise"] = "rowwise"
    """How output projections are cut."""

    def block(self, **options: Any) -> Block:
        """The borders of a block."""
        output: Literal["sum", "features"] = "features" if self.projections == "colwise" else "sum"
        return Block(sequence_parallel=self.sequence_parallel, output=output, **options)

    def output(self, projection: nn.Linear) -> ParallelStyle:
        """The style of an output projection."""
        return GatheredColwise(projection.out_features) if self.projections == "colwise" else Rowwise()


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


def replicated_inside(module: nn.Module, name: str) -> Styles:
    """Every module under the child `name` whole on every rank, its gradients sums."""
    styles = whole_inside(module, name, partial_gradient=True)
    inside = bool(parts(module.get_submodule(name)))
    return {**styles, name: ReplicatedParallel(partial_gradient=True, reads_inside=True)} if inside else styles


def whole_inside(module: nn.Module, name: str, *, partial_gradient: bool = False) -> Styles:
    """Every module under the child `name` that holds parameters, whole on every rank."""
    return {
        joined(name, path): ReplicatedParallel(partial_gradient=partial_gradient)
        for path, submodule in module.get_submodule(name).named_modules()
        if own_parameters(submodule)
    }


def under(name: str, styles: Styles) -> Styles:
    """Styles of the child `name` as those of its parent."""
    return {joined(name, path): style for path, style in styles.items()}


def whole_block(module: nn.Module, layout: Layout) -> Styles:
    """Styles of a block that every rank computes whole."""
    return {**whole_inside(module, ""), "": WholeParallel(sequence_parallel=layout.sequence_parallel)}


def refuse_unknown(module: nn.Module, styles: Styles, *, kind: str) -> None:
    """NotRecognizedError where a parameter of the block has no rule."""
    block = styles[""]
    for path, submodule in module.named_modules():
        for name, parameter in own_parameters(submodule).items():
            known = collapsed(path) in styles and (path or (isinstance(block, Block) and name in block.table))
            if not known:
                where = f"{path}.{name}" if path else name
                raise NotRecognizedError(
                    f"its {kind} ({type(module).__name__}) has a parameter {where} {list(parameter.shape)}, which no "
                    "rule knows"
                )
            if not parameter.is_floating_point():
                raise NotRecognizedError(f"its {kind} is quantized: {path}.{name} is {parameter.dtype}")
