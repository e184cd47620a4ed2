"""An `AsyncLLM` from its start to its end: what it does, whether it lives, and what must be gone after it."""

import asyncio
import copy
import getpass
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from multiprocessing import process
from pathlib import Path
from typing import Any, TypeVar

from rl_generation.engine import EngineMetrics
from rl_generation.errors import EngineDeadError, EngineOptionError, ModelError
from rl_generation.event_loop import EventLoop
from rl_generation.vllm.preparing import Prepared, check_interface, environment, main_guard_hint, refusal
from rl_generation.vllm.processes import EngineFolder, EngineProcesses

T = TypeVar("T")
PERIOD_S = 0.25
"""Between two looks at the processes."""

PATIENCE_S = 5.0
"""How long a process may take to end once vLLM has said that its engine failed, and its threads once they may end."""

SETTLED_S = 30.0
"""In which the tokens of a paused engine have all been handed on."""

SHUTDOWN_TIMEOUT_S = 20.0
"""Of processes that are asked to end, before they are killed; Python takes seconds to end one that has run torch."""


class RunningLLM:
    """vLLM's asynchronous engine on an event loop, made by `start`.

    Attributes:
        llm: The `AsyncLLM`.
        processes: Those of the engine.
        health: Runs what waits for it.
        version: Of the weights, as last committed by anybody who tells the `AsyncLLM`.
        seams: By request, the versions of the weights that made its tokens before the present ones, each with how many
            tokens there were when the next one came. Only of a vLLM before 0.32, which does not say it itself.
        fed: Whether the weights are ones to sample from.
        asleep: Whether the device's memory was given away.
        statistics: What it has done.
    """

    def __init__(self, events: EventLoop, llm: Any, *, statistics: "Statistics", folder: EngineFolder) -> None:
        self.llm, self.statistics = llm, statistics
        self.version, self.fed, self.asleep = 0, False, False
        self.seams: dict[str, list[tuple[int, int]]] = {}
        self._events, self._folder = events, folder
        # Its engines, and what coordinates them.
        resources = llm.engine_core.resources
        coordinators = () if resources.coordinator is None else (resources.coordinator.proc,)
        self.processes = EngineProcesses((*getattr(resources.engine_manager, "processes", ()), *coordinators))
        folder.watch(self.processes.started)
        self.health = Health(llm, self.processes)
        self._tell_vllm = llm.update_weight_version
        llm.update_weight_version = self._commit

    async def call(self, what: Callable[[], Coroutine[Any, Any, T]], *, timeout_s: float, name: str) -> T:
        """Await the answer that `what` asks for, on the engine's loop; EngineDeadError where it died or is late."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.health.run(what())
        except TimeoutError:
            raise EngineDeadError(
                f"the engine did not answer {name} within {timeout_s:g} seconds, though its processes live: it is busy "
                f"or hangs; give it longer, or restart()"
            ) from None

    async def ask_workers(
        self, method: str, args: Sequence[object], kwargs: Mapping[str, object], *, timeout_s: float, name: str
    ) -> list[Any]:
        """What each worker answers to `method`, those of replica 0 first; as `call`."""
        core, asked = self.llm.engine_core, ("collective_rpc", method, timeout_s, tuple(args), dict(kwargs))

        async def ask() -> Any:
            if hasattr(core, "call_utility_all_async"):
                return await core.call_utility_all_async(*asked)
            # Before 0.32 vLLM's client had the answer of the first replica alone.
            calls = [core._call_utility_async(*asked, engine=each) for each in core.core_engines]  # noqa: SLF001
            return await asyncio.gather(*calls)

        return [answer for replica in await self.call(ask, timeout_s=timeout_s, name=name) for answer in replica]

    def stop(self) -> None:
        """End what waits, then all processes, and remove what they leave behind; not from the loop."""
        resources, handler = self.llm.engine_core.resources, self.llm.output_handler
        timeout_s = SHUTDOWN_TIMEOUT_S if self.health.death is None else 1.0

        async def end() -> None:
            self.processes.survey()
            self.health.end("the engine was closed or restarted; restart() makes a new one")
            if handler is not None:
                handler.cancel()  # else it logs the end of the engine as a failure
            await asyncio.sleep(0)

        async def settle() -> None:
            """Let vLLM's own tasks end, and with them the sockets that they hold."""
            tasks = [task for task in (resources.output_queue_task, resources.stats_update_task, handler) if task]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._events.run(end())
        self.llm.shutdown(timeout=timeout_s)
        self.processes.end(timeout_s=timeout_s)
        self._events.run(settle())
        # vLLM leaves the threads of its ZeroMQ context running. Their end waits for sockets, so not for ever.
        ending = threading.Thread(target=resources.ctx.term, daemon=True, name="rl-generation-zmq")
        ending.start()
        ending.join(PATIENCE_S)
        self._folder.remove()

    async def _commit(self, new_version: str) -> None:
        """What `AsyncLLM.update_weight_version` does here: a refit calls that, and knows nothing of this engine."""
        from vllm.outputs import CompletionOutput

        version = version_of(new_version)
        if "weight_versions" not in CompletionOutput.__dataclass_fields__:  # as before 0.32
            await self._note_seams()
        await self._tell_vllm(new_version)
        self.version, self.fed = version, True

    async def _note_seams(self) -> None:
        """Note how many tokens each request has, all by the weights so far: the engine is paused, or has none."""
        limit = asyncio.get_running_loop().time() + SETTLED_S
        counts, before = self._tokens_of_requests(), None
        while counts != before:  # tokens of before the pause may still wait for the task that hands them on
            if asyncio.get_running_loop().time() > limit:
                raise ModelError(
                    "new weights are committed while the engine generates, and vLLM before 0.32 does not say which "
                    "weights made which tokens: pause() the engine first, or use vLLM 0.32 or later"
                )
            await asyncio.sleep(0.01)
            counts, before = self._tokens_of_requests(), counts
        for name, count in counts.items():
            self.seams.setdefault(name, []).append((self.version, count))

    def _tokens_of_requests(self) -> dict[str, int]:
        states = self.llm.output_processor.request_states.values()
        return {state.external_req_id: state.detokenizer.num_output_tokens() for state in states}


class Health:
    """Runs what waits for the engine, and ends all of it with EngineDeadError when a process of the engine dies.

    vLLM notices the death of its engine process within a second and ends the requests that wait for tokens; whoever
    waits for the answer of another call waits for ever, and nobody learns which process died of what. Lives on the
    event loop of the engine.
    """

    def __init__(self, llm: Any, processes: EngineProcesses) -> None:
        self.death: str | None = None
        self._llm, self._processes = llm, processes
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watch = asyncio.create_task(self._look_now_and_then())

    def start(self, what: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Begin `what`, which is cancelled when the engine dies."""
        task = asyncio.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self.death is not None:
            task.cancel()
        return task

    async def run(self, what: Coroutine[Any, Any, T]) -> T:
        """Await `what`; EngineDeadError where the engine is dead, or dies meanwhile."""
        task = self.start(what)
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
        return await self.result(task)

    async def result(self, task: "asyncio.Task[T]") -> T:
        """Return what `task`, which is done, returned; where it failed because the engine is dead, say so instead."""
        if not task.cancelled():
            error = task.exception()
            if error is None:
                return task.result()
            if not isinstance(error, EngineDeadError):
                await self._look()
            if self.death is None:
                raise error
        raise EngineDeadError(self.death or "the call was cancelled")

    def end(self, reason: str) -> None:
        """Cancel whatever waits; from now on, everything raises EngineDeadError with `reason`."""
        if self.death is None:
            self.death = reason
        self._watch.cancel()
        for task in tuple(self._tasks):
            task.cancel()

    async def _look_now_and_then(self) -> None:
        while self.death is None:
            await self._look()
            await asyncio.sleep(PERIOD_S)

    async def _look(self) -> None:
        """End what waits if a process is dead; vLLM may say that its engine failed before one has, or without that."""
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while self.death is None:
            if (found := self._processes.dead()) is not None:
                self.end(f"{found}; what had finished is in this error's `rollouts`, and restart() makes a new engine")
            elif not self._llm.errored:
                return
            elif asyncio.get_running_loop().time() > deadline:
                self.end("vLLM's engine failed, and its log says why; restart() makes a new engine")
            else:
                await asyncio.sleep(PERIOD_S)


class Statistics:
    """What all replicas tell of their work, in the place of vLLM's loggers; prints nothing."""

    def __init__(self) -> None:
        self._now: dict[int, tuple[int, int, float]] = {}
        """By replica: requests that run and that wait, and the share of the cache in use."""
        self._done = Counter(prompt_tokens=0, cached_prompt_tokens=0, generated_tokens=0, preemptions=0)
        self._finished: Counter[str] = Counter()

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, *, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Add what one step of a replica did."""
        if scheduler_stats is not None:
            waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self._now[engine_idx] = scheduler_stats.num_running_reqs, waiting, scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self._done["prompt_tokens"] += iteration_stats.prompt_token_stats.total
            self._done["cached_prompt_tokens"] += iteration_stats.prompt_token_stats.cached_tokens
            self._done["generated_tokens"] += iteration_stats.num_generation_tokens
            self._done["preemptions"] += iteration_stats.num_preempted_reqs
            self._finished.update(str(each.finish_reason) for each in iteration_stats.finished_requests)

    def count_aborted(self, count: int) -> None:
        """Add answers that were aborted on this side of vLLM, which leaves them out."""
        self._finished["abort"] += count

    def metrics(self, *, version: int, busy: bool) -> EngineMetrics:
        """Return all of it, with the mean usage of the replicas' caches; nothing runs or waits where none is `busy`."""
        now = self._now.values() if busy else ()
        return EngineMetrics(
            running=sum(running for running, _, _ in now),
            waiting=sum(waiting for _, waiting, _ in now),
            **self._done,
            cache_usage=sum(usage for _, _, usage in now) / max(len(now), 1),
            finished=dict(self._finished),
            version=version,
        )

    def _nothing(self, *_: Any, **__: Any) -> None:
        """What else vLLM tells its loggers."""

    log = log_engine_initialized = record_sleep_state = record_admission_rejection = _nothing


def version_of(label: str) -> int:
    """Return the version that vLLM's label of its weights means; ModelError where that is no number of steps."""
    if label.isdecimal():
        return int(label)
    raise ModelError(
        f"the engine's weights are labelled {label!r}, which is no number of optimizer steps; whoever updates them "
        f"calls commit_version(steps), or vLLM's update_weight_version(str(steps))"
    )


def check_not_importing_main() -> None:
    """Raise EngineOptionError where an engine is just starting this process, which runs the caller's script again."""
    if getattr(process.current_process(), "_inheriting", False):
        raise EngineOptionError(
            "the processes of an engine import the script that makes it: make it under "
            '`if __name__ == "__main__":` there'
        )


async def start(events: EventLoop, prepared: Prepared, *, version: int) -> RunningLLM:
    """Start an engine on `events`, whose loop this runs on; returns once it has loaded its model.

    Raises:
        EngineOptionError: vLLM refuses the options.
        EngineDeadError: It could not start.
    """
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    check_interface(AsyncLLM)
    statistics, folder = Statistics(), EngineFolder()
    arguments = AsyncEngineArgs(**copy.deepcopy(dict(prepared.arguments)))  # vLLM writes into what it is given
    kernels = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    variables = {
        "VLLM_RPC_BASE_PATH": str(folder.path),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        # What its processes leave among temporary files goes with the folder, but not compiled kernels.
        "TMPDIR": str(folder.path),
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(kernels)),
    }
    try:
        with environment(variables):
            llm = AsyncLLM.from_engine_args(
                arguments,
                usage_context=UsageContext.LLM_CLASS,  # of the batch sizes that vLLM chooses, those for throughput
                stat_loggers=[lambda _config, _replica=0: statistics],
            )
        running = RunningLLM(events, llm, statistics=statistics, folder=folder)
        await running.health.run(llm.get_supported_tasks())  # else the first request asks, before it can be aborted
        stages = llm.vllm_config.parallel_config.pipeline_parallel_size
        if stages > 1 and llm.vllm_config.device_config.device_type == "cpu":
            # Without a run of the model, which it leaves out, vLLM 0.32 has nowhere on a CPU to receive what a stage
            # sends.
            await running.health.run(llm.collective_rpc("execute_dummy_batch"))
        await running.health.run(llm.update_weight_version(str(version)))
    except BaseException as error:
        folder.remove()
        if isinstance(error, EngineOptionError | EngineDeadError | ModelError):
            raise
        if isinstance(error, ValueError):
            raise refusal(error) from error
        if isinstance(error, RuntimeError):
            raise EngineDeadError(
                f"vLLM's engine did not start, and its log says why: {error}{main_guard_hint()}"
            ) from error
        raise
    running.fed = not prepared.unfed
    return running
