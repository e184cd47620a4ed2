"""vLLM: whole answers in the caller's thread, or one request, stream or call at a time from any thread and event loop.

One engine with two faces. Inside is vLLM's `AsyncLLM` on an event loop in a thread of its own; its core is in processes
of its own, whose death this process survives. Does not know how new weights are made; who refits talks to `vllm`
through `loop`.
"""

import asyncio
import math
import threading
import warnings
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, final

from rl_generation.engine import EngineMetrics, RolloutDelta, check_single, check_version, failed_request
from rl_generation.errors import EngineDeadError, EngineOptionError, ModelError, PromptError
from rl_generation.event_loop import EventLoop
from rl_generation.model_flags import installed_version
from rl_generation.requests import Limits, Sampling, make_requests
from rl_generation.rollout import LogpOf, Rollout
from rl_generation.vllm.options import LoraAdapter, VllmOptions, check_lora
from rl_generation.vllm.preparing import NO_WEIGHTS, prepare, stop_tokens
from rl_generation.vllm.running import RunningLLM, check_not_importing_main, start
from rl_generation.vllm.samples import (
    DEFAULT_TIMEOUT_S,
    Sample,
    Samples,
    check_for_vllm,
    check_timeout,
    logp_hint,
    sample_timeout_s,
    to_sampling_params,
)

T = TypeVar("T")

Pause = Literal["wait", "keep", "abort"]
"""What becomes of unfinished requests: they are finished first, frozen until `resume`, or ended as they are."""

CALL_TIMEOUT_S = 600.0
"""How long any one answer of the engine may take, other than a sample, where the caller does not say."""


@final
class VllmEngine:
    """A `StreamingEngine` over vLLM, which any number of threads and event loops may call.

    `generate`, `submit`, `pause` and the like block, or return futures; `stream`, `abort` and `check_health` are
    awaited, on any loop. All requests share the running batch. New weights are written between
    `pause` and `resume`, or when nothing is under way.

    Every sample is a request of its own. Where it has a time limit, it is aborted when that has passed since it was
    submitted to vLLM, its wait for a place in the batch included; the others go on. When a process of the engine dies,
    whatever waits ends with EngineDeadError within seconds. The engine ends with `close`, with this object, or with the
    program, whose main module must be importable without running (`if __name__ == "__main__":`).

    Args:
        options: The model and how it is served.
        stop_token_ids: The engine's own stop tokens; None takes the checkpoint's eos tokens and its tokenizer's.
        logp_of: Which distribution the logp of a rollout refers to.
        ready: Asked before each call generates; raises to refuse, as `check` of rl-refit's sink does.
        version: Of the checkpoint's weights: optimizer steps that they have seen.
        timeout_s: Of each sample; None takes `NRL_VLLM_ASYNC_TIMEOUT_SECONDS`, or, where that is not set, 600 for a
            request that is awaited, streamed or submitted, and no limit for the batch of a `generate`. `math.inf` is
            no limit for any.

    Raises:
        EngineOptionError: vLLM is missing or does not fit, or an option is impossible here; nothing was started.
        ModelError: There is no such model or tokenizer; nothing was started.
        PromptError: A stop token is outside the vocabulary.
        EngineDeadError: vLLM could not start; its log says why.
    """

    def __init__(
        self,
        options: VllmOptions,
        *,
        stop_token_ids: Sequence[int] | None = None,
        logp_of: LogpOf = "sampled",
        ready: Callable[[], None] | None = None,
        version: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        check_version(version)
        given: object = options
        if not isinstance(given, VllmOptions):
            raise EngineOptionError(f"options must be VllmOptions(model={given!r}); got {type(given).__name__}")
        if timeout_s is None:
            self._timeout_s = sample_timeout_s()
        else:
            self._timeout_s = math.inf if timeout_s == math.inf else check_timeout(timeout_s)
        check_not_importing_main()
        self._prepared = prepare(options, logp_of=logp_of)
        self.ready = ready
        self.logp_of: LogpOf = logp_of
        """Which distribution the logp of its rollouts refers to."""
        self._start_version = version
        self._restarting = threading.RLock()
        self._start(stop_token_ids)

    # -- What it is ----------------------------------------------------------------------------------------------

    @property
    def vllm(self) -> Any:
        """The `AsyncLLM`, for whoever refits it; another one after `restart`."""
        return self._running.llm

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that runs `vllm`; nothing may block it."""
        return self._events.loop

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of the processes that the engine started."""
        return tuple(self._running.processes.started)

    @property
    def version(self) -> int:
        """Number of optimizer steps that the weights have seen, as last told to this engine or to `vllm`."""
        return self._running.version

    def commit_version(self, version: int) -> None:
        """State that the workers now hold the weights of `version`, and forget what was cached under other ones.

        For transports that write into the workers themselves, between `pause` and `resume`; rl-refit's sink does all
        of this.

        Raises:
            ValueError: `version` is no integer of at least 0.
            ModelError: Requests are under way, and would go on with a cache of other weights.
        """
        check_version(version)
        self._call(self.vllm.reset_encoder_cache, name="commit_version")
        self.reset_prefix_cache()
        self._call(lambda: self.vllm.update_weight_version(str(version)), name="commit_version")

    def explain(self) -> str:
        """Return which engine this is, with which limits, sizes and quirks. For people."""
        prepared, limits = self._prepared, self.limits
        options = prepared.options
        rows = {
            "engine": f"vLLM {installed_version()}, in its own processes",
            "model": options.model + ("" if options.revision is None else f" at {options.revision}"),
            "load_format": "dummy (the first refit feeds it)" if prepared.unfed else prepared.arguments["load_format"],
            "dtype": str(self.vllm.vllm_config.model_config.dtype).removeprefix("torch."),
            "version": str(self.version) if self._running.fed else "none: no refit has been committed",
            "parallel": f"tensor {options.tensor_parallel_size}, pipeline {options.pipeline_parallel_size}, "
            f"data {options.data_parallel_size}"
            + (", experts whole on their ranks" if options.enable_expert_parallel else ""),
            "vocabulary": f"{limits.vocab_size} tokens",
            limits.max_length_name: f"{limits.max_length} tokens of prompt and answer",
            "stop_token_ids": ", ".join(map(str, self.stop_token_ids)) or "none: answers end at max_new_tokens only",
            "tokenizer": "none: no stop strings, no bad words" if limits.tokenizer is None else "loaded",
            "logp_of": self.logp_of,
            **{f"quirk {quirk.name}": quirk.explain() for quirk in prepared.quirks},
            **{f"vllm_kwargs.{key}": repr(value) for key, value in options.vllm_kwargs.items()},
        }
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())

    def metrics(self) -> EngineMetrics:
        """Return what it is doing now, as of the last step, and has done since it was started."""
        running = self._running
        busy = running.llm.output_processor.has_unfinished_requests()  # what vLLM said last is that of a step before
        return running.statistics.metrics(version=running.version, busy=busy)

    # -- Answers -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling],
        *,
        lora: LoraAdapter | None = None,
        timeout_s: float | None = None,
    ) -> list[Rollout]:
        """Answer each prompt `n` times; all answers to prompt 0 come first, then all to prompt 1, and so on.

        Args:
            prompts: Token ids.
            sampling: One for all prompts, which is spread over them, or one for each.
            lora: The adapter to answer with; None is the model as it is.
            timeout_s: Of each sample; None is the engine's, or none where that has none.

        Raises:
            PromptError: A request cannot be served; none was begun.
            ModelError: The weights are not there: no refit has been committed yet, or the engine sleeps.
            SampleTimeoutError: Samples were not done in time; all others are, and are in `rollouts`.
            EngineDeadError: A process of the engine is gone; what had finished is in `rollouts`.
            LogpError: A log-probability is missing or not finite; all answers of the call are lost.
        """
        samples = self._begin(prompts, sampling, lora=lora, timeout_s=timeout_s, otherwise_s=math.inf)
        return self._events.run(self._samples.generate(samples))

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        seed: int,
        lora: LoraAdapter | None = None,
        timeout_s: float | None = None,
    ) -> "Future[Rollout]":
        """Begin to answer one prompt, beside whatever is under way; from any thread.

        Sampled, it is what `generate([prompt], [sampling.for_request(seed)])` returns. Cancelling the future aborts the
        request. It raises what `generate` raises, and no other request is touched by that.
        """
        try:
            check_single(sampling)
            samples = self._begin([prompt], [sampling.for_request(seed)], lora=lora, timeout_s=timeout_s)
            running = self._samples

            async def answer() -> Rollout:
                (rollout,) = await running.generate(samples)
                return rollout

            return self._events.start(answer())
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer to this request
            return failed_request(error)

    def stream(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        lora: LoraAdapter | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RolloutDelta, None]:
        """Yield new tokens of the `n` answers as they come, on any event loop; closing it aborts what is unfinished.

        It raises what `generate` raises, a timeout once the other samples have ended.
        """
        samples = self._begin([prompt], [sampling], lora=lora, timeout_s=timeout_s, streaming=True)
        running = self._samples
        return self._events.iterate(lambda: running.stream(samples))

    def outputs(
        self, prompt: Any, params: Sequence[Any], *, lora_request: Any = None, **how: Any
    ) -> AsyncGenerator[tuple[Sample, Any, tuple[float, ...]], None]:
        """Yield what vLLM itself puts out, on any event loop, for vLLM's own server; closing it aborts the rest.

        Args:
            prompt: As vLLM's renderer made it.
            params: vLLM's SamplingParams of each answer, whose `n` is 1, and which ask for the sampled token's logp.
            lora_request: vLLM's.
            how: Further arguments of `AsyncLLM.generate`.

        Yields:
            An answer, whose `versions` are there once it has ended, a `vllm.RequestOutput` of it, and its tokens' logp.

        Raises:
            What `stream` raises, a PromptError excepted: what vLLM refuses, it says itself.
        """
        self.check_ready()
        same: dict[str, Any] = {"timeout_s": self._timeout_s or DEFAULT_TIMEOUT_S, "lora": lora_request, "how": how}
        samples = [Sample(prompt=dict(prompt), params=each, index=index, **same) for index, each in enumerate(params)]
        running = self._samples
        return self._events.iterate(lambda: running.outputs(samples))

    async def abort(self) -> int:
        """Abort every sample that is under way, and return how many.

        Whoever waits for one gets it as it is, with finish reason `"abort"`.
        """
        return await self._events.wait(self._samples.abort())

    def check_ready(self) -> None:
        """Raise what `generate` would, where it would refuse whatever it is asked for now.

        Raises:
            ModelError: The weights are not there, as `ready` or the engine itself says.
            EngineDeadError: The engine is known to be dead.
        """
        if self.ready is not None:
            self.ready()
        running = self._running
        if running.health.death is not None:
            raise EngineDeadError(running.health.death)
        if not running.fed:
            raise ModelError(NO_WEIGHTS)
        if running.asleep:
            raise ModelError("the engine sleeps; wake_up() before it generates")

    # -- What a trainer asks of it -------------------------------------------------------------------------------

    def pause(self, *, mode: Pause = "wait", clear_cache: bool = True, timeout_s: float | None = None) -> None:
        """Stop generating until `resume`; what is asked for meanwhile waits, and its time runs.

        Args:
            mode: What becomes of unfinished requests.
            clear_cache: Whether keys and values are forgotten: those of frozen requests too, which are prefilled anew.
            timeout_s: How long it may take; with `"wait"`, that is as long as the longest answer.

        Raises:
            EngineOptionError: There is no such mode.
            EngineDeadError: The engine is dead, or did not pause in time; then `resume` lets it go on.
        """
        if mode not in ("wait", "keep", "abort"):
            raise EngineOptionError(f"mode must be 'wait', 'keep' or 'abort'; got mode={mode!r}")
        llm = self.vllm
        self._call(lambda: llm.pause_generation(mode=mode, clear_cache=clear_cache), name="pause", timeout_s=timeout_s)

    def resume(self) -> None:
        """Generate again."""
        self._call(self.vllm.resume_generation, name="resume")

    @property
    def is_paused(self) -> bool:
        """Whether it is paused, by anybody."""
        paused: bool = self._call(self.vllm.is_paused, name="is_paused")
        return paused

    def sleep(self, *, level: int = 1) -> None:
        """Free the device's memory until `wake_up`: 1 keeps the weights in the host's memory, 2 discards them.

        After level 2 the engine refuses to generate until a refit has been committed. On a CPU nothing is freed.

        Raises:
            EngineOptionError: The engine was made without `enable_sleep_mode`, or there is no such level.
            ModelError: Requests are under way.
        """
        from vllm.platforms import current_platform

        able = self._prepared.options.enable_sleep_mode
        if level not in (1, 2) or not (
            able or not current_platform.is_sleep_mode_available()
        ):  # on a CPU: does nothing
            raise EngineOptionError(
                f"sleep needs an engine made with enable_sleep_mode=True, and level 1 or 2; got level={level!r}, "
                f"enable_sleep_mode={able}"
            )
        if self._samples.under_way:
            raise ModelError("requests are under way; finish or abort them before the engine sleeps")
        self._running.asleep = True
        self._running.fed &= level == 1
        self._call(lambda: self.vllm.sleep(level=level), name="sleep")

    def wake_up(self, *, tags: Sequence[str] | None = None) -> None:
        """Take memory back: of "weights", of "kv_cache", or, with None, of both."""
        self._call(lambda: self.vllm.wake_up(None if tags is None else list(tags)), name="wake_up")
        self._running.asleep = self._call(self.vllm.is_sleeping, name="wake_up")

    def reset_prefix_cache(self) -> None:
        """Forget the keys and values of earlier prompts.

        Raises:
            ModelError: Requests are under way, which use them.
        """
        if not self._call(self.vllm.reset_prefix_cache, name="reset_prefix_cache"):
            raise ModelError("the prefix cache is in use by requests under way; finish or abort them first")

    def collective_rpc(
        self,
        method: str,
        *,
        timeout_s: float | None = None,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> list[Any]:
        """Have every worker run `method`, one of vLLM's or of the worker extension; return what each answers.

        All workers of replica 0 come first. Answers cross processes as msgpack, which makes lists of tuples.
        """
        name, limit_s = f"collective_rpc({method!r})", self._limit(timeout_s)
        return self._events.run(self._running.ask_workers(method, args, kwargs or {}, timeout_s=limit_s, name=name))

    # -- Life and death ------------------------------------------------------------------------------------------

    async def check_health(self, *, timeout_s: float = 60.0) -> None:
        """Return once the engine core and every worker have answered.

        Raises:
            EngineDeadError: A process is gone, or there was no answer within `timeout_s`.
        """
        name = "check_health"
        await self._events.wait(self._running.ask_workers(name, (), {}, timeout_s=timeout_s, name=name))

    def restart(self) -> None:
        """End the engine, and start it anew with the checkpoint's weights, or dummy ones: refit it.

        Samples under way end with EngineDeadError, and adapters are forgotten. `version` is what it was at first, and
        `vllm` and `loop` are others, so that a sink must be made anew too, and its `check` assigned to `ready`.

        Raises:
            EngineDeadError: vLLM could not start; its log says why.
        """
        with self._restarting:
            self._end()
            self._start(self.stop_token_ids)

    def close(self) -> None:
        """End the engine, with all of its processes; it can be called again."""
        with self._restarting:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- Inside --------------------------------------------------------------------------------------------------

    def _start(self, stop_token_ids: Sequence[int] | None) -> None:
        self._events = EventLoop("rl-generation-vllm")
        try:
            self._running = self._events.run(start(self._events, self._prepared, version=self._start_version))
        except BaseException:
            self._events.close()
            raise
        self._end = weakref.finalize(self, _end, self._events, self._running)
        try:
            config, prepared = self.vllm.vllm_config, self._prepared
            self.limits: Limits = Limits(
                vocab_size=config.model_config.get_vocab_size(),
                max_length=config.model_config.max_model_len,
                max_length_name="max_model_len",
                tokenizer=self.vllm.tokenizer,
                prefill_chunk=config.scheduler_config.max_num_batched_tokens,
            )
            """What it can be asked for."""
            self.stop_token_ids: tuple[int, ...] = stop_tokens(stop_token_ids, prepared, self.limits)
            """Its own stop tokens, which `ignore_eos` switches off."""
            given, served = prepared.checkpoint_dtype, str(config.model_config.dtype).removeprefix("torch.")
            if prepared.options.dtype == "auto" and given not in (None, served):  # vLLM only logs that
                warnings.warn(
                    f"dtype='auto' serves in {served} a checkpoint whose weights are {given}, so its log-probabilities "
                    f"are not those of a trainer in {given}; give dtype={given!r}, or dtype={served!r} where that is "
                    f"meant",
                    UserWarning,
                    stacklevel=3,
                )
        except (PromptError, UserWarning):
            self._end()
            raise
        self._samples = Samples(self._running, logp_of=self.logp_of, hint=logp_hint(self._prepared.options))

    def _begin(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling],
        *,
        lora: LoraAdapter | None,
        timeout_s: float | None,
        otherwise_s: float = DEFAULT_TIMEOUT_S,
        streaming: bool = False,
    ) -> list[Sample]:
        """Make the samples of a call; nothing is begun before everything is checked.

        Each may take `timeout_s`, or what the engine was made with, or else `otherwise_s`.
        """
        self.check_ready()
        requests = make_requests(prompts, sampling, self.limits)
        for request in requests:
            check_for_vllm(request, self.limits)
        if lora is not None:
            check_lora(lora, self._prepared.options)
        limit_s = self._timeout_s or otherwise_s if timeout_s is None else check_timeout(timeout_s)
        adapter, own = None if lora is None else lora.request(), self.stop_token_ids
        return [
            Sample(
                prompt=request.prompt,
                params=to_sampling_params(
                    request.sampling, stop_token_ids=own, sample_index=index, streaming=streaming
                ),
                prompt_index=request.prompt_index,
                index=index,
                timeout_s=limit_s,
                lora=adapter,
            )
            for request in requests
            for index in range(request.sampling.n)
        ]

    def _call(self, what: Callable[[], Coroutine[Any, Any, T]], *, name: str, timeout_s: float | None = None) -> T:
        return self._events.run(self._running.call(what, timeout_s=self._limit(timeout_s), name=name))

    def _limit(self, timeout_s: float | None) -> float:
        if timeout_s is not None:
            return check_timeout(timeout_s)
        samples_s = self._timeout_s or 0.0
        return CALL_TIMEOUT_S if samples_s == math.inf else max(CALL_TIMEOUT_S, samples_s)


def _end(events: EventLoop, running: RunningLLM) -> None:
    """End an engine, which blocks; in another thread where garbage is collected on the event loop."""
    if events.is_current:
        threading.Thread(target=_end, args=(events, running)).start()
        return
    running.stop()
    events.close()
