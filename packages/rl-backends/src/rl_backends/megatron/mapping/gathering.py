"""Whole tensors of Hugging Face on rank 0 out of what all ranks hold, one after the other, bit for bit.

Each box is taken from the lowest rank that holds it, and sent to rank 0 alone: rank 0 holds one whole tensor and one
box of it at a time, and the others nothing but their own. Boxes cross as bytes, so that nothing is rounded and -0.0
stays what it is. Every rank must take part.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backends.errors import ModelError
from rl_backends.megatron.mapping.held import HeldTensor
from rl_backends.ranks import gather_text, on_every_rank, raise_together
from rl_parallel_plans import Box

__all__ = ["Gatherer"]

OTHERWISE = ""
"""In place of a name: the dtype of everything that is not named."""


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
        own = [(each, box) for each in held if not each.duplicate for box in each.parts]
        self._held = {(each.name, box.offsets): each for each, box in own}
        told = [[each.name, box.offsets, box.sizes, box.local_offsets] for each, box in own]
        self._boxes = _lowest_holders(gather_text(json.dumps(told)))
        self._device = held[0].parameter.device
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        _require_all(self._shapes, self._boxes)
        if dist.is_initialized():
            # NCCL connects all ranks in a collective; a group whose first act is to send would wait for the rest.
            dist.all_reduce(torch.zeros((), device=self._device))

    @torch.no_grad()
    def tensors(self, local: Callable[[HeldTensor], Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Each tensor by name: whole on rank 0, where the parameters lie; empty on the others.

        A rank that stops early still gives or takes the rest, unseen, when the iterator is closed: none waits for it.

        local: what to gather instead of the weights, shaped like them: `held.view(of another tensor)`. Called twice for
            each, and of any dtype, the same on all ranks that hold parts of one tensor.

        Raises:
            BaseException: this rank's own: what `local` raised, or no memory for a tensor on rank 0.
            ModelError: on every rank: a tensor is of several dtypes.
            RankError: on the ranks that did not fail.
        """
        read = (lambda each: each.local) if local is None else local
        rounds = self._rounds(read, self._dtypes(read))
        try:
            for each in rounds:  # noqa: UP028 - `yield from` would close it, which must go on
                yield each
                del each  # before the next tensor is made
        finally:
            for _ in rounds:
                pass

    def _dtypes(self, read: Callable[[HeldTensor], Tensor]) -> dict[str, torch.dtype]:
        """Of every tensor, from the ranks that give it; all that may fail in reading them does so here, on all."""
        given = {name for name, boxes in self._boxes.items() for rank, _ in boxes if rank == self._rank}
        own = on_every_rank(
            lambda: {name: str(read(each).dtype) for (name, _), each in self._held.items() if name in given}
        )
        usual = next(iter(own.values()), OTHERWISE)
        told = {OTHERWISE: usual, **{name: dtype for name, dtype in own.items() if dtype != usual}}
        of_ranks = [json.loads(text) for text in gather_text(json.dumps(told))]
        found = {
            name: {of_ranks[rank].get(name, of_ranks[rank][OTHERWISE]) for rank, _ in boxes}
            for name, boxes in self._boxes.items()
        }
        if mixed := [f"{name} ({', '.join(sorted(each))})" for name, each in found.items() if len(each) > 1]:
            raise ModelError(f"parts of one tensor are of several dtypes, so that none is its own: {mixed[0]}")
        return {name: getattr(torch, each.pop().removeprefix("torch.")) for name, each in found.items()}

    def _rounds(
        self, read: Callable[[HeldTensor], Tensor], dtypes: Mapping[str, torch.dtype]
    ) -> Iterator[tuple[str, Tensor]]:
        """Tensor by tensor. Where rank 0 has no memory for one, it lets the others finish before all raise."""
        failure: BaseException | None = None
        for name, shape in self._shapes.items():
            tensor = None
            if failure is None:
                try:
                    size = shape if self._rank == 0 else (0,)
                    tensor = torch.empty(size, dtype=dtypes[name], device=self._device)
                except (MemoryError, RuntimeError) as caught:
                    failure = caught
            for rank, box in self._boxes[name]:
                if rank == self._rank:
                    self._give(box.of_local(read(self._held[name, box.offsets])), box, whole=tensor)
                elif self._rank == 0:
                    self._take(box, rank, whole=tensor, dtype=dtypes[name])
            if tensor is not None:
                yield name, tensor
        raise_together(failure)

    def _give(self, part: Tensor, box: Box, *, whole: Tensor | None) -> None:
        if self._rank != 0:
            _exchange(dist.isend, part.contiguous(), 0)
        elif whole is not None:
            box.of_whole(whole).copy_(part)

    def _take(self, box: Box, rank: int, *, whole: Tensor | None, dtype: torch.dtype) -> None:
        target = None if whole is None else box.of_whole(whole)
        in_place = target is not None and target.is_contiguous()
        part = target if in_place else torch.empty(box.sizes, dtype=dtype, device=self._device)
        assert part is not None
        _exchange(dist.irecv, part, rank)
        if target is not None and not in_place:
            target.copy_(part)


def _lowest_holders(texts: Sequence[str]) -> dict[str, list[tuple[int, Box]]]:
    """By name, each box once: the lowest rank that holds it, and where; the same on every rank."""
    found: dict[str, dict[tuple[int, ...], tuple[int, Box]]] = {}
    for rank, text in enumerate(texts):
        for name, offsets, sizes, local_offsets in json.loads(text):
            box = Box(offsets=tuple(offsets), sizes=tuple(sizes), local_offsets=tuple(local_offsets))
            found.setdefault(name, {}).setdefault(box.offsets, (rank, box))
    return {name: list(boxes.values()) for name, boxes in found.items()}


def _require_all(shapes: Mapping[str, tuple[int, ...]], boxes: Mapping[str, Sequence[tuple[int, Box]]]) -> None:
    wrong = [
        name
        for name in dict.fromkeys([*shapes, *boxes])
        if sum(torch.Size(box.sizes).numel() for _, box in boxes.get(name, ())) != _volume(shapes.get(name))
    ]
    if wrong:
        raise ModelError(
            f"the ranks together do not hold the whole of {', '.join(wrong[:3])}"
            f"{f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''}: Megatron has no place for it, or it is of "
            f"another model"
        )


def _volume(shape: tuple[int, ...] | None) -> int:
    return 0 if shape is None else torch.Size(shape).numel()


def _exchange(operation: Callable[..., Any], tensor: Tensor, peer: int) -> None:
    """Send or receive its memory, as a batch of one: NCCL connects each pair of ranks anew for what is no batch."""
    sent = dist.P2POp(operation, tensor.flatten().view(torch.uint8), peer)
    for work in dist.batch_isend_irecv([sent]):
        work.wait()
