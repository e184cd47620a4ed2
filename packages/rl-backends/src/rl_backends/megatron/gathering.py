"""Gather the tensors of the Hugging Face model, unsharded, on rank 0, one after the other and bit for bit.

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
from rl_backends.megatron.mapping import HeldTensor
from rl_backends.rank_agreement import gather_text, on_every_rank, raise_together
from rl_parallel_plans import Box

__all__ = ["Gatherer"]

OTHERWISE = ""
"""In place of a name: the dtype of everything that is not named."""


class Gatherer:
    """Which rank gives which box, and the gather itself; made once, by all ranks together.

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
            for each in rounds:  # not `yield from`, which would close it
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
        """Tensor by tensor; rank 0 says that it has room for one before the others send of it, or that all is over."""
        failure: BaseException | None = None
        go = torch.ones(1, dtype=torch.uint8, device=self._device)
        names = list(self._shapes)
        for index, name in enumerate(names):
            try:
                size = self._shapes[name] if self._rank == 0 else (0,)
                tensor = torch.empty(size, dtype=dtypes[name], device=self._device)
                buffer = self._buffer(name, dtype=dtypes[name])
            except (MemoryError, RuntimeError) as caught:
                failure = caught
                go.zero_()
            self._tell([name] if failure is None else names[index:], go)
            if not go.item():
                break
            for rank, box in self._boxes[name]:
                if rank == self._rank:
                    self._give(box.of_local(read(self._held[name, box.offsets])), box, whole=tensor)
                elif self._rank == 0:
                    _take(box, rank, whole=tensor, buffer=buffer)
            yield name, tensor
            del tensor, buffer
        raise_together(failure)

    def _buffer(self, name: str, *, dtype: torch.dtype) -> Tensor:
        """Room on rank 0 for the largest box of a tensor that cannot be received in its place."""
        sizes = (
            torch.Size(box.sizes).numel()
            for rank, box in self._boxes[name]
            if self._rank == 0 < rank and not _lies_in_a_row(box, self._shapes[name])
        )
        return torch.empty(max(sizes, default=0), dtype=dtype, device=self._device)

    def _tell(self, names: Sequence[str], go: Tensor) -> None:
        """From rank 0, once to each of the others that has parts of `names`, which waits for it there."""
        givers = sorted({rank for name in names for rank, _ in self._boxes[name]} - {0})
        if self._rank == 0:
            for rank in givers:
                _exchange(dist.isend, go, rank)
        elif self._rank in givers:
            _exchange(dist.irecv, go, 0)

    def _give(self, part: Tensor, box: Box, *, whole: Tensor) -> None:
        if self._rank == 0:
            box.of_whole(whole).copy_(part)
        else:
            _exchange(dist.isend, part.contiguous(), 0)


def _take(box: Box, rank: int, *, whole: Tensor, buffer: Tensor) -> None:
    target = box.of_whole(whole)
    part = target if target.is_contiguous() else buffer[: target.numel()].view(box.sizes)
    _exchange(dist.irecv, part, rank)
    if part is not target:
        target.copy_(part)


def _lies_in_a_row(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether it is contiguous in the memory of the whole tensor."""
    return box.of_whole(torch.empty(shape, device="meta")).is_contiguous()


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
