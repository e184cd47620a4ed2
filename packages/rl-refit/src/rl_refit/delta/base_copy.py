"""One end's copy of what a source rank last sent, box by box, which can go one version back.

Versions are told apart by names, "version 7 (refit 3)", since a refit that failed may be tried again.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from rl_refit.delta.codec import apply, revert
from rl_refit.delta.format import DeltaInfo
from rl_refit.digest import digest_tensor
from rl_refit.errors import DigestError, RefitError

__all__ = ["BaseCopy"]


@final
class BaseCopy:
    """Boxes by the names that they have in files.

    It holds all of one version, or is on the way from one to another: then it can still go back. Whatever may have torn
    it makes it forget what it holds, so that it is sent whole the next time.

    Args:
        device: Where it is kept.
    """

    def __init__(self, device: torch.device) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.digests: dict[str, str] = {}
        """`digest_tensor` of each."""
        self._device = device
        self._at: str | None = None
        self._before: str | None = None
        self._steps: dict[str, Tensor] = {}

    @property
    def within_reach(self) -> tuple[str, ...]:
        """The versions that `go_to` leads to, the newest first."""
        return tuple(name for name in (self._at, self._before) if name is not None)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def forget(self) -> None:
        """Hold no version; the memory is kept."""
        self._at = self._before = None
        self._steps = {}

    def go_to(self, name: str) -> None:
        """Hold version `name`.

        Raises:
            RefitError: It is not within reach.
            DigestError: The copy is not what it was; it is forgotten.
        """
        if name not in self.within_reach:
            held = " and ".join(self.within_reach) or "none"
            raise RefitError(f"a delta against {name} is of no use here: the versions held are {held}")
        if name == self._at:
            return
        self._at = None
        for key in list(self._steps):
            self._exchange(key, self._steps[key], back=True)
            del self._steps[key]
        self._at, self._before = name, None

    def begin(self) -> None:
        """Leave the version held for another one: `step` for every box that changes, then `end`."""
        self._at, self._before, self._steps = None, self._at, {}

    def begin_whole(self) -> None:
        """Leave it for one that comes whole: `put` every box, then `end`."""
        self.forget()

    def step(self, key: str, delta: Tensor) -> DeltaInfo:
        """Apply a delta, whose memory must stay as long as this version may be undone.

        Raises:
            RefitError: The delta is corrupted; the box is as it was.
            DigestError: The box is not what it was; the copy is forgotten.
        """
        info = self._exchange(key, delta, back=False)
        self._steps[key] = delta
        return info

    def put(self, key: str, tensor: Tensor, digest: str) -> None:
        """Copy a whole box, and compare it with its digest.

        Raises:
            DigestError: It is another one.
        """
        mine = self.tensors.get(key)
        if mine is None or (mine.shape, mine.dtype) != (tensor.shape, tensor.dtype):
            mine = self.tensors[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        mine.copy_(tensor)
        found = digest_tensor(mine)
        if found != digest:
            raise DigestError(f"{key} arrived with digest {found}, and was written with {digest}", tensors=(key,))
        self.digests[key] = digest

    def end(self, name: str) -> None:
        """All boxes are those of version `name`."""
        self._at = name

    def _exchange(self, key: str, delta: Tensor, *, back: bool) -> DeltaInfo:
        try:
            info = (revert if back else apply)(self.tensors[key], delta)
        except DigestError as error:
            self.forget()
            raise DigestError(f"{key}: {error}", tensors=(key,)) from error
        except RefitError as error:  # found before anything was written
            raise RefitError(f"{key}: {error}", tensor=key) from error
        except BaseException:
            self.forget()
            raise
        self.digests[key] = info.base_digest if back else info.result_digest
        return info
