"""What one rank does for all, such that no rank waits for one that has failed."""

from collections.abc import Callable

import torch
import torch.distributed as dist

__all__ = ["on_rank_0"]


def on_rank_0(action: Callable[[], None]) -> None:
    """Let rank 0 act while the others wait; if it fails, every rank raises.

    Raises:
        OSError: on the other ranks, for whatever rank 0 raises there.
    """
    error: BaseException | None = None
    if dist.get_rank() == 0:
        try:
            action()
        except BaseException as caught:  # noqa: BLE001 - raised below, once the others know
            error = caught
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    failed = torch.tensor([error is not None], dtype=torch.int32, device=device)
    dist.broadcast(failed, src=0)
    if error is not None:
        raise error
    if failed.item():
        raise OSError(f"rank 0 failed where rank {dist.get_rank()} waited for it; its error says why")
