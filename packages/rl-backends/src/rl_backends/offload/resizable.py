"""Memory that can be emptied, for tensors that lie in a file or in an array of somebody else.

A model that was loaded on a CPU may still lie in the mapped file. Knows tensors; copies those that it must.
"""

from collections.abc import Iterable

from torch import Tensor

from rl_backends.metrics.storages import plain_tensors

__all__ = ["make_resizable"]


def make_resizable(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Give each of `tensors`, named for messages, memory of its own where what it has cannot be resized. Ties stay.

    Raises:
        RuntimeError: such a tensor is inside of a DTensor or another wrapper, which may know the old address; or other
            processes share the memory, and would see another from then on.
    """
    own: dict[tuple[object, ...], Tensor] = {}
    for name, tensor in tensors:
        for plain in plain_tensors(tensor):
            storage = plain.untyped_storage()
            if plain.device.type == "cpu" and storage.resizable() and storage.is_shared():  # it would not grow again
                raise RuntimeError(
                    f"{name} lies in memory that is shared with other processes, and giving it back would part it from "
                    "theirs; offload another part, or do not share the model's tensors"
                )
            if storage.resizable() or plain.device.type == "meta":
                continue
            if plain is not tensor:
                raise RuntimeError(
                    f"{name} lies in memory that cannot be given back (mapped from a file, or of another library), "
                    f"inside of a {type(tensor).__name__}; load the model into memory of its own"
                )
            place = (storage.data_ptr(), plain.storage_offset(), plain.shape, plain.stride(), plain.dtype)
            if place not in own:
                own[place] = plain.detach().clone()
            plain.data = own[place]
