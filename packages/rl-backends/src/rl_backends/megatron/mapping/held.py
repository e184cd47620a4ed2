"""What a parameter of Megatron holds of a tensor of Hugging Face, in the coordinates of the latter. Moves no number."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from rl_parallel_plans import Box

__all__ = ["HeldTensor", "names_in_hugging_face"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """This rank's part of one tensor of the Hugging Face model; several of them may be of one parameter.

    Every box spans whole rows of the parameter, so that it is contiguous in the parameter's memory.
    """

    name: str
    """In the model of transformers."""
    shape: tuple[int, ...]
    """Of the whole tensor there."""
    parameter: nn.Parameter
    """Megatron's."""
    megatron_name: str
    """Its name there, on this pipeline stage."""
    parts: tuple[Box, ...]
    """Where in the whole tensor, and where in `local`."""
    duplicate: bool = False
    """A second copy on this or another stage, as of tied embeddings: filled as the first, and never written."""

    def view(self, tensor: Tensor) -> Tensor:
        """A tensor shaped like the parameter, with as many dims as the whole one; its memory and not a copy."""
        return tensor.view((1,) * (len(self.shape) - tensor.ndim) + tuple(tensor.shape))

    @property
    def local(self) -> Tensor:
        """The parameter as `view` shows it: this rank's memory."""
        return self.view(self.parameter.detach())

    def boxes(self, tensor: Tensor | None = None) -> list[Box]:
        """The parts of the whole that `local` holds, or any tensor that is cut like it."""
        del tensor
        return list(self.parts)


def names_in_hugging_face(held: Iterable[HeldTensor]) -> dict[str, str]:
    """What messages call each of Megatron's parameters: the tensors that it holds parts of, by its name."""
    names: dict[str, list[str]] = {}
    for each in held:
        names.setdefault(each.megatron_name, []).append(each.name)
    return {megatron_name: " + ".join(several) for megatron_name, several in names.items()}
