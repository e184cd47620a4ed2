"""Whole tensors of Hugging Face out of what ranks hold, one after the other, bit for bit.

Each box is taken from the lowest rank that holds it. Ranks add up bytes, of which all but one are 0: a sum of numbers
would turn -0.0 into 0.0. Every rank must take part; rank 0 holds one whole tensor at a time.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backends.errors import ModelError
from rl_backends.megatron.mapping.held import HeldTensor
from rl_backends.ranks import gather_text
from rl_parallel_plans import Box

__all__ = ["Gatherer"]


class Gatherer:
    """Knows which rank gives which box; made once, by all ranks together.

    Args:
        held: of this rank.
        shapes: of all tensors, in the order in which they are wanted.

    Raises:
        ModelError: on every rank; the ranks together do not hold all of some tensor.
    """

    def __init__(self, held: Sequence[HeldTensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = dict(shapes)
        self._given = _given_by_this_rank(held)
        self._example = held[0]
        _require_all(self._shapes, gather_text(json.dumps(_volumes(self._given))))

    @property
    def given(self) -> Mapping[str, Sequence[tuple[HeldTensor, Box]]]:
        """By name, the boxes that this rank gives, each box of the model once over all ranks."""
        return self._given

    @torch.no_grad()
    def tensors(self, local: Callable[[HeldTensor], Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Each tensor by name: whole on rank 0, undefined on the others.

        local: what to gather instead of the weights, shaped like them: `held.view(of another tensor)`.
        """
        read = (lambda each: each.local) if local is None else local
        for name, shape in self._shapes.items():
            pieces = [(read(held), box) for held, box in self._given.get(name, ())]
            yield name, _assembled(pieces, shape, like=read(self._example))


def _given_by_this_rank(held: Sequence[HeldTensor]) -> dict[str, list[tuple[HeldTensor, Box]]]:
    own = [(each, box) for each in held if not each.duplicate for box in each.parts]
    texts = gather_text(json.dumps([[each.name, box.offsets] for each, box in own]))
    mine = dist.get_rank() if dist.is_initialized() else 0
    lower = {(name, tuple(offsets)) for text in texts[:mine] for name, offsets in json.loads(text)}
    given: dict[str, list[tuple[HeldTensor, Box]]] = {}
    for each, box in own:
        if (each.name, box.offsets) not in lower:
            given.setdefault(each.name, []).append((each, box))
    return given


def _volumes(given: Mapping[str, Sequence[tuple[HeldTensor, Box]]]) -> dict[str, int]:
    return {name: sum(torch.Size(box.sizes).numel() for _, box in boxes) for name, boxes in given.items()}


def _require_all(shapes: Mapping[str, tuple[int, ...]], texts: Sequence[str]) -> None:
    held = dict.fromkeys(shapes, 0)
    for text in texts:
        for name, volume in json.loads(text).items():
            held[name] = held.get(name, 0) + volume
    if wrong := [name for name, volume in held.items() if volume != torch.Size(shapes.get(name, ())).numel()]:
        raise ModelError(
            f"the ranks together do not hold the whole of {', '.join(wrong[:3])}"
            f"{f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''}: Megatron has no place for it, or it is of "
            f"another model"
        )


def _assembled(pieces: Sequence[tuple[Tensor, Box]], shape: tuple[int, ...], *, like: Tensor) -> Tensor:
    whole = torch.zeros(shape, dtype=like.dtype, device=like.device)
    for local, box in pieces:
        box.of_whole(whole).copy_(box.of_local(local))
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.reduce(whole.view(torch.uint8).flatten() if whole.ndim else whole, dst=0, op=dist.ReduceOp.SUM)
    return whole
