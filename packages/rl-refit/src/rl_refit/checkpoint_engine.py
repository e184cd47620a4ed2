"""Engines that checkpoint-engine's `ParameterServer` updates, as the sink of weights: `pip install rl-refit[files]`.

Each rank of the server is a rank of the sink, and stages its share of the tensors; all are verified there. Only when
all parties have decided to commit does the server gather, broadcast and hand over, as it does without us: into the
weights that serve, and with pickled handles over sockets that every program of the host reaches. It makes and destroys
the default group of torch.distributed, so it runs in processes of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, final

from torch import Tensor

from rl_refit.errors import RefitError
from rl_refit.staged import StagedSink, empty_like
from rl_refit.stores import in_thread
from rl_refit.transports.base import PATIENCE_S

__all__ = ["CheckpointEngineSink"]

_NAME = "rl-refit"
_GRACE_S = 10.0
"""How long an update may take to end by itself after its request has failed."""


@final
class CheckpointEngineSink(StagedSink):
    """One rank of checkpoint-engine's parameter server. A `WeightSink`.

    A share of the weights is staged in this process's memory, and copied into the server's pinned pool before the
    parties decide. What the engines then hold is not read back: `report.unreadable` names every tensor.

    Args:
        server: This rank's `checkpoint_engine.ParameterServer`, whose pool of shared memory nobody else uses.
        request: Given the sockets of all ranks, has the engines of this rank take the update and waits for them; does
            nothing on a rank that asks none. It is called in a thread.
        like: The checkpoint folder that the engines were started with: every refit brings the tensors of its files.
        rank: This process's, of the server and of the sink.
        num_ranks: Of the server, and of the sink where nothing else is refitted with it.
        paused: Makes the context in which a commit runs: it keeps the engines of this rank from generating, which the
            server does not, and forgets their prefix caches before they go on. It sees the exception of a commit that
            fails.
        timeout_s: Seconds that the server may take for an update, such as in waiting for a rank that gave up.

    Raises:
        RefitError: `like` is no checkpoint of safetensors files, or the release of checkpoint-engine is not known.
        ValueError: `rank` is none of `num_ranks`, or has no tensor.
    """

    def __init__(
        self,
        server: Any,
        request: Callable[[list[tuple[str, str]]], object],
        *,
        like: Path | str,
        rank: int,
        num_ranks: int,
        paused: Callable[[], AbstractContextManager[object]],
        timeout_s: float = 600.0,
    ) -> None:
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank={rank} is no rank of num_ranks={num_ranks}")
        share = _share(empty_like(Path(like)), rank, num_ranks)
        if not share:
            raise ValueError(
                f"num_ranks={num_ranks} leaves no tensor of {like} for rank {rank}; start a smaller server"
            )
        super().__init__(share, engine="the engines")
        self._server, self._request, self._paused, self._timeout_s = server, request, paused, timeout_s
        self._is_registered = False
        self._refusals: list[str] = []
        """What this rank's engine has answered to a bucket that it did not load."""
        if not hasattr(server, "_bind_zmq_socket"):
            raise RefitError(
                "this release of checkpoint-engine has no ParameterServer._bind_zmq_socket, by which the engines' "
                "answers are heard: 0.4.2 is known to have it"
            )
        bind = server._bind_zmq_socket  # noqa: SLF001  (see `_Listening`)

        def bind_and_listen() -> tuple[_Listening, Any]:
            socket, sockets = bind()
            return _Listening(socket, self._refusals), sockets

        server._bind_zmq_socket = bind_and_listen  # noqa: SLF001

    def abort(self) -> None:
        """Forget what was staged and registered. The engines go on with what they have."""
        super().abort()
        self._unregister()

    def _prepare_to_hand_over(self, version: int) -> None:
        """Copy the share into the server's pinned pool, which has room or not; of no concern to other ranks."""
        try:
            self._server.register_checkpoint(_NAME, named_tensors=self._fresh, use_shared_memory_pool=True)
        except Exception as error:
            raise RefitError(
                f"checkpoint-engine did not register version {version}: {type(error).__name__}: {error}", phase="commit"
            ) from error
        self._is_registered = True

    def _hand_over(self, version: int) -> None:
        """Have the server update the engines, together with all its ranks, while they are paused."""
        with self._paused():
            self._update()
        self._unregister()

    def _update(self) -> None:
        """In a thread, since the server waits without end for ranks that died and engines that were not asked."""
        failures: list[BaseException] = []
        self._refusals.clear()

        def request(sockets: list[tuple[str, str]]) -> None:
            try:
                self._request(sockets)
            except BaseException as error:
                failures.append(error)
                raise

        devices = self._server.device_manager.device_module
        device = devices.current_device()

        def update() -> None:
            devices.set_device(device)  # a new thread is on GPU 0
            self._server.gather_metas(_NAME)
            self._server.update(_NAME, request, timeout=timedelta(seconds=self._timeout_s))

        updating = in_thread(update, name="checkpoint-engine")
        until, failed_at = time.monotonic() + self._timeout_s, float("inf")
        while not wait([updating], PATIENCE_S).done:
            now = time.monotonic()
            failed_at = min(failed_at, now) if failures else failed_at
            if now > min(until, failed_at + _GRACE_S):
                self._lost = (
                    "it waits for ranks or engines that do not come, and nobody can end that: start a new "
                    "ParameterServer in a new process, and make a new CheckpointEngineSink"
                )
                why = f"the request failed with {failures[0]!r}" if failures else f"{self._timeout_s:g} s have passed"
                raise RefitError(f"checkpoint-engine has not ended its update: {why}", phase="commit")
        if self._refusals:
            raise RefitError(f"an engine did not load what it was sent: {self._refusals[0].strip()}", phase="commit")
        if failures:
            raise RefitError(f"the engines were not asked to take the update: {failures[0]!r}", phase="commit")
        if (error := updating.exception()) is not None:
            raise RefitError(f"checkpoint-engine gave its update up: {error!r}", phase="commit") from error

    def _unregister(self) -> None:
        if self._is_registered and self._lost is None:
            self._server.unregister_checkpoint(_NAME)  # the pool stays, for the next version
            self._is_registered = False


@final
class _Listening:
    """The server's socket to the engine of its GPU, which notes refusals.

    The server of checkpoint-engine 0.4.2 does not look at the answer to the last bucket: what an engine did not load of
    that stays old, and nothing says so.
    """

    def __init__(self, socket: Any, refusals: list[str]) -> None:
        self._socket, self._refusals = socket, refusals

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recv(self) -> bytes:
        answer: bytes = self._socket.recv()
        if answer:
            self._refusals.append(answer.decode(errors="replace"))
        return answer


def _share(tensors: dict[str, Tensor], rank: int, num_ranks: int) -> dict[str, Tensor]:
    """What one of the ranks stages: about the same number of bytes each."""
    loads = [0] * num_ranks
    mine: dict[str, Tensor] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):
        least = loads.index(min(loads))
        loads[least] += tensor.nbytes
        if least == rank:
            mine[name] = tensor
    return mine
