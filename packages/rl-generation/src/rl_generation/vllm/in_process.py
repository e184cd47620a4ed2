"""vLLM's engine core on the event loop that asks it, in place of a process of its own.

vLLM has this for its synchronous `LLM` alone. Nothing is serialised, breakpoints work, and an engine starts in seconds;
but while a step runs, the loop does nothing else. The engine above is the same: requests, outputs, pauses and calls to
the workers go through the methods of vLLM's own client and core, without their sockets and processes.

Imports vLLM.
"""

import asyncio
import contextlib
import functools
import queue
import random
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import numpy as np
import torch
from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import uniproc_executor

from rl_generation.errors import EngineOptionError

__all__ = ["check_process_group", "core_in_this_process"]


def check_process_group() -> None:
    """Refuse where vLLM would take over, and in the end destroy, the default process group of somebody else."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        raise EngineOptionError(
            f"torch.distributed has a process group in this process (backend {distributed.get_backend()!r}, world size "
            f"{distributed.get_world_size()}), of a trainer or of another engine in process; vLLM would take it over, "
            f"and destroy it at its end: make the engine with own_process=True, or close the other one first"
        )


@contextlib.contextmanager
def core_in_this_process(*, owns_process_group: bool, folder: Path) -> Iterator[None]:
    """Have the `AsyncLLM` that is made meanwhile keep its core here, on the event loop of its maker.

    One engine at a time is made in a process (`runtime.environment` sees to that).

    Args:
        owns_process_group: Whether a start that fails destroys the default process group, which vLLM has made by then
            and which would stand in the way of the next engine.
        folder: For the file by which the ranks of its process group find one another.
    """
    randomness, theirs = Randomness(), EngineCoreClient.make_async_mp_client
    store_of = getattr(uniproc_executor, "get_file_store_init_method", None)  # since 0.32; before, they had a port
    EngineCoreClient.make_async_mp_client = staticmethod(functools.partial(_Client, randomness=randomness))
    if store_of is not None:
        uniproc_executor.get_file_store_init_method = lambda: f"file://{folder}/{uuid.uuid4().hex}"
    try:
        with randomness.while_started():
            yield
    except BaseException:
        if owns_process_group:
            from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

            destroy_model_parallel()
            destroy_distributed_environment()
        raise
    finally:
        EngineCoreClient.make_async_mp_client = staticmethod(theirs)
        if store_of is not None:
            uniproc_executor.get_file_store_init_method = store_of


@final
class Randomness:
    """vLLM's own course of torch's generators, apart from the host's; a trainer's dropout draws from the same ones.

    In process, vLLM seeds them, and draws from them for each request without a seed of its own.
    """

    def __init__(self) -> None:
        self._kept: tuple[torch.Tensor, torch.Tensor | None] | None = None

    @contextlib.contextmanager
    def while_started(self) -> Iterator[None]:
        """Let vLLM seed what it likes; what it has seeded is its own afterwards."""
        state, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002  (the global one is what vLLM seeds)
        try:
            with self.in_place():
                yield
        finally:
            random.setstate(state)
            np.random.set_state(arrays)  # noqa: NPY002

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Let vLLM draw from where it stopped; afterwards, the host goes on where it stopped."""
        before = _generators()
        if self._kept is not None:
            _set_generators(*self._kept)
        try:
            yield
        finally:
            self._kept = _generators()
            _set_generators(*before)


def _generators() -> tuple[torch.Tensor, torch.Tensor | None]:
    """The states of the host's generator, and of the current device's once CUDA is initialised."""
    cuda: Any = torch.cuda
    return torch.get_rng_state(), cuda.get_rng_state() if cuda.is_initialized() else None


def _set_generators(host: torch.Tensor, device: torch.Tensor | None) -> None:
    cuda: Any = torch.cuda
    torch.set_rng_state(host)
    if device is not None:
        cuda.set_rng_state(device)
    elif cuda.is_initialized():  # since then, by vLLM: as it would be had the host initialised it
        cuda.manual_seed(torch.initial_seed())


@final
class _Core(EngineCoreProc):  # type: ignore[misc]
    """The core of vLLM's engine process, with its pauses and its queue of outputs, and without sockets and threads."""

    def __init__(self, vllm_config: Any, executor_class: Any, log_stats: bool) -> None:  # noqa: FBT001 - vLLM's order
        self.output_queue = queue.SimpleQueue[tuple[int, Any]]()
        self.engine_index, self.engines_running = 0, False
        self.shutdown_state = EngineShutdownState.RUNNING
        EngineCore.__init__(self, vllm_config, executor_class, log_stats)

    def take(self, request: Any) -> None:
        """Take a request in; what is wrong with it is the end of it alone, as in vLLM's process."""
        try:
            self.add_request(*self.preprocess_add_request(request))
        except Exception:  # noqa: BLE001 - see above
            self._handle_request_preproc_error(request)

    def advance(self) -> None:
        """Step, and clear up behind the last answers before they are handed out.

        Whoever gets them may go on to draw from this process's generators, which are vLLM's within a step.
        """
        self._process_engine_step()
        while (self.scheduler.finished_req_ids or self.batch_queue) and not self.scheduler.has_unfinished_requests():
            self._process_engine_step()

    def rest(self) -> None:
        """Tell whoever waits for a pause that nothing runs."""
        self._notify_idle_state_callbacks()


@final
class _Client(AsyncMPClient):  # type: ignore[misc]
    """What an `AsyncLLM` asks: vLLM's own client, whose messages are calls of a core that it steps itself."""

    def __init__(
        self,
        vllm_config: Any,
        executor_class: Any,
        log_stats: bool,  # noqa: FBT001 - vLLM's order
        *,
        randomness: Randomness,
        **_others: Any,
    ) -> None:
        self.vllm_config = vllm_config
        self.resources = SimpleNamespace(engine_dead=False)
        self.failure: BaseException | None = None
        """What ended the core within a step."""
        self.engine_ranks_managed, self.client_index = [0], 0
        self._randomness, self._news = randomness, asyncio.Event()
        self.core: Any = None
        self.core = _Core(vllm_config, executor_class, log_stats)

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        self.ensure_alive()
        self._news.set()
        answer = getattr(self.core, method)(*args)
        return await asyncio.wrap_future(answer) if isinstance(answer, Future) else answer

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        return [await self.call_utility_async(method, *args)]

    async def add_request_async(self, request: Any) -> None:
        self.ensure_alive()
        self._news.set()
        request.client_index = self.client_index
        self.core.take(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if request_ids and not self.resources.engine_dead:
            self._news.set()
            self.core.abort_requests(request_ids)

    async def get_output_async(self) -> Any:
        while True:
            await asyncio.sleep(0)  # for what has come meanwhile, which then joins the next step
            self.ensure_alive()
            if not self.core.output_queue.empty():
                return self.core.output_queue.get()[1]
            if self.core.has_work():
                self._step()
            else:
                self.core.rest()
                self._news.clear()
                await self._news.wait()

    def shutdown(self, timeout: float | None = None) -> None:
        core, self.core = self.core, None
        self.resources.engine_dead = True
        if core is not None:
            core.shutdown()

    def _step(self) -> None:
        try:
            with self._randomness.in_place():
                self.core.advance()
        except BaseException as error:
            self.failure, self.resources.engine_dead = error, True
            raise EngineDeadError from error
