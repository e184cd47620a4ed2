"""Gather the tensors of the Hugging Face model, unsharded, on every rank, one after the other and bit for bit.

Each box comes from the lowest rank that holds it, and every other rank has zeros there. What is summed over the ranks
are bytes, so that nothing is rounded and -0.0 stays what it is. Every rank must take part.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backends.checkpoints.shards import num_ranks, this_rank
from rl_backends.errors import ModelError
from rl_backends.megatron.mapping import HeldTensor
from rl_backends.rank_agreement import gather_text, on_every_rank
from rl_parallel_plans import Box


class Gatherer:
    """Which rank gives which box, and the gather itself; made once, by all ranks together.

    Args:
        held: of this rank, in one dtype.
        shapes: of all tensors, in the order in which they are wanted.

    Raises:
        ModelError: on every rank; the ranks together do not hold all of some tensor.
    """

    def __init__(self, held: Sequence[HeldTensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = dict(shapes)
        self._dtype, self._device = held[0].parameter.dtype, held[0].parameter.device
        own = [(each, box) for each in held if not each.duplicate for box in each.parts]
        told = gather_text(json.dumps([[each.name, box.offsets, torch.Size(box.sizes).numel()] for each, box in own]))
        giver: dict[tuple[str, tuple[int, ...]], int] = {}  # of each box
        gathered = dict.fromkeys(self._shapes, 0)  # elements
        for rank, text in enumerate(told):
            for name, offsets, size in json.loads(text):
                if giver.setdefault((name, tuple(offsets)), rank) == rank:
                    gathered[name] = gathered.get(name, 0) + size
        if wrong := [name for name, size in gathered.items() if size != torch.Size(shapes.get(name, (-1,))).numel()]:
            raise ModelError(
                f"the ranks together do not hold the whole of {', '.join(wrong[:3])}"
                f"{f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''}: Megatron has no place for it, or it is of "
                f"another model"
            )
        self._given: dict[str, list[tuple[HeldTensor, Box]]] = {}
        for each, box in own:
            if giver[each.name, box.offsets] == this_rank():
                self._given.setdefault(each.name, []).append((each, box))

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor by name, whole, where the parameters lie.

        A rank that stops early still takes part in the rest, when the iterator is closed: none waits for it.

        Raises:
            BaseException: this rank's own: no memory for a tensor.
            RankError: on the ranks that did not fail.
        """
        rounds = self._rounds()
        try:
            for each in rounds:  # not `yield from`, which would close it
                yield each
                del each  # before the next tensor is made
        finally:
            for _ in rounds:
                pass

    def _rounds(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._shapes:
            tensor = on_every_rank(partial(self._own_part, name))
            if num_ranks() > 1:
                dist.all_reduce(tensor.view(-1).view(torch.uint8))
            yield name, tensor
            del tensor

    def _own_part(self, name: str) -> Tensor:
        whole = torch.zeros(self._shapes[name], dtype=self._dtype, device=self._device)
        for each, box in self._given.get(name, ()):
            box.of_whole(whole).copy_(box.of_local(each.local))
        return whole
