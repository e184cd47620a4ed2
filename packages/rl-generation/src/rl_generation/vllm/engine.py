"""vLLM, synchronous: whole answers, or token by token, in the caller's thread.

The engine lives in this process, where breakpoints work and nothing is serialised, or in one of its own, whose death
this process survives. Does not know how new weights are made; who refits talks to `llm`.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Self, final

from rl_generation.engine import EngineMetrics, RolloutDelta
from rl_generation.errors import EngineDeadError, LogpError, ModelError, PromptError
from rl_generation.requests import Limits, Request, Sampling, make_requests
from rl_generation.rollout import LogpOf, Rollout, in_order
from rl_generation.submitting import Call, Outcome, SubmittedRequests, Turns, check_single, failed_request
from rl_generation.vllm.admission import check_version
from rl_generation.vllm.explanation import explain
from rl_generation.vllm.in_flight import Answer, StreamedAnswer, Streams
from rl_generation.vllm.llm import OwnedLlm
from rl_generation.vllm.lora import LoraAdapter, check_lora, check_removed
from rl_generation.vllm.options import VllmOptions, check_options
from rl_generation.vllm.outputs import version_of
from rl_generation.vllm.preparing import NO_WEIGHTS, limits_of, prepare, stop_tokens, warn_of_dtype
from rl_generation.vllm.running import check_not_importing_main
from rl_generation.vllm.sampling_params import check_for_vllm, for_sample, to_sampling_params

__all__ = ["VllmEngine"]

UNFED = "default"
"""vLLM's label of weights that nobody has labelled: none came after the dummy ones, or after those were discarded."""


@final
class VllmEngine:
    """A `SteppingEngine` over `vllm.LLM`.

    Any thread may call `submit` and `generate`, at any time: all requests share the running batch. The token-wise
    methods, from `add_request` to `has_unfinished_requests`, are for one thread. Nothing may write new weights while a
    request is under way, except within `between_steps`.

    In process, vLLM takes this process's default process group, and makes `torch.set_num_threads` do nothing on a CPU.
    One engine at a time can be in process.

    Args:
        options: The model and how it is served.
        own_process: True gives vLLM's engine core a process of its own: half a minute more to start, but it can be
            killed and restarted. The main module of the program must then be importable without running
            (`if __name__ == "__main__":`).
        stop_token_ids: The engine's own stop tokens; None takes the checkpoint's eos tokens and its tokenizer's.
        logp_of: Which distribution the logp of a rollout refers to.
        ready: Asked before each call generates; raises to refuse, as `check` of rl-refit's sink does.
        version: Of the checkpoint's weights: optimizer steps that they have seen.

    Raises:
        EngineOptionError: vLLM is missing or does not fit, or an option is impossible here; nothing was started.
        PromptError: A stop token is outside the vocabulary.
        RuntimeError: vLLM could not start.
    """

    def __init__(
        self,
        options: VllmOptions,
        *,
        own_process: bool = False,
        stop_token_ids: Sequence[int] | None = None,
        logp_of: LogpOf = "sampled",
        ready: Callable[[], None] | None = None,
        version: int = 0,
    ) -> None:
        self._owned: OwnedLlm | None = None
        check_version(version)
        check_options(options, most_replicas=1)
        if own_process:
            check_not_importing_main()
        self._prepared = prepare(options, logp_of=logp_of, asynchronous=False)
        self._own_process, self._logp_of, self._ready = own_process, logp_of, ready
        self._start_version = version
        self._numbers = itertools.count()
        self._turns = Turns()
        self._submitted = SubmittedRequests(begin=self._begin, abort=self._abort, step=self._advance)
        # Answers of generate and submit that vLLM is working on, by the number that it knows them by; and why requests
        # of add_request were lost, for the next step to raise.
        self._answers: dict[str, Answer] = {}
        self._lost: BaseException | None = None
        self._start()
        self._limits = limits_of(self._running.engine.vllm_config, self._running.engine.tokenizer)
        try:
            self._stop_token_ids = stop_tokens(stop_token_ids, self._prepared, self._limits)
            warn_of_dtype(self._prepared, self._running.engine.vllm_config)
        except (PromptError, UserWarning):
            self.close()
            raise

    # -- What it is ----------------------------------------------------------------------------------------------

    @property
    def llm(self) -> Any:
        """The `vllm.LLM`, for whoever refits it; another one after `restart`."""
        return self._running.llm

    @property
    def logp_of(self) -> LogpOf:
        """Which distribution the logp of its rollouts refers to."""
        return self._logp_of

    @property
    def limits(self) -> Limits:
        """What it can be asked for."""
        return self._limits

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Its own stop tokens, which `ignore_eos` switches off."""
        return self._stop_token_ids

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of the processes that the engine started; none in process with one rank."""
        return self._running.processes.process_ids

    @property
    def version(self) -> int:
        """Number of optimizer steps that the weights have seen, as last committed; the given one before the first."""
        label = self._running.label()
        return self._unfed_version if label == UNFED else version_of(label)

    def commit_version(self, version: int) -> None:
        """State that the workers now hold the weights of `version`, and forget what was cached under other ones.

        For transports that write into the workers themselves; rl-refit's sink does all of this.

        Raises:
            ValueError: `version` is no integer of at least 0.
            ModelError: Requests are under way, and would go on with a cache of other weights.
        """
        check_version(version)
        self._running.reset_caches()
        self._running.set_label(str(version))

    def explain(self) -> str:
        """Return which engine this is, with which limits, sizes and quirks. For people."""
        return explain(
            self._prepared,
            kind=f"vLLM, synchronous, {'in its own process' if self._own_process else 'in this process'}",
            limits=self._limits,
            dtype=self._running.engine.vllm_config.model_config.dtype,
            logp_of=self._logp_of,
            stop_token_ids=self._stop_token_ids,
            version=None if self._running.label() == UNFED else self.version,
        )

    def metrics(self) -> EngineMetrics:
        """Return what it is doing now, as of the last step, and has done since it was started."""
        busy = self._running.engine.has_unfinished_requests()
        return self._running.statistics.metrics(version=self.version, busy=busy)

    # -- Whole answers -------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling],
        *,
        lora: LoraAdapter | None = None,
    ) -> list[Rollout]:
        """Answer each prompt `n` times; all answers to prompt 0 come first, then all to prompt 1, and so on.

        Requests of `add_request` go on meanwhile; their tokens are returned by the next `step`.

        Args:
            prompts: Token ids.
            sampling: One for all prompts, which is spread over them, or one for each.
            lora: The adapter to answer with.

        Raises:
            PromptError: A request cannot be served; none was begun.
            ModelError: The weights are not there: no refit has been committed yet, or the engine sleeps.
            LogpError: A log-probability is missing or not finite; all answers of the call are lost.
            EngineDeadError: A process of the engine is gone; what had finished is in `rollouts`.
        """
        with self._turns:
            version = self._check_ready()
            requests = self._requests(prompts, sampling, lora)
            call = Call(sum(request.sampling.n for request in requests))
        try:
            with self._running.calls():
                for request in requests:
                    self._add(request, call, version=version, lora=lora)
            while not call.over:
                self._advance(call)
            if call.error is not None:
                raise call.error
        except EngineDeadError as error:
            raise EngineDeadError(str(error), rollouts=in_order(call.rollouts)) from error
        finally:
            if call.missing:
                self._drop(call)
        return in_order(call.rollouts)

    # -- One request at a time -----------------------------------------------------------------------------------

    def submit(
        self, prompt: Sequence[int], sampling: Sampling, *, seed: int, lora: LoraAdapter | None = None
    ) -> "Future[Rollout]":
        """Begin to answer one prompt, beside whatever is under way; from any thread.

        Sampled, it is what `generate([prompt], [sampling.for_request(seed)])` returns. A thread generates as long as
        such requests are under way. Cancelling the future aborts the request.

        Args:
            prompt: Token ids.
            sampling: How it is answered; `n` is 1.
            seed: Of this request alone; see `Sampling.for_request`.
            lora: The adapter to answer with.

        Returns:
            Its future, which raises what `generate` raises; no other request is touched by it, unless the engine dies.
        """
        try:
            check_single(sampling)
            (request,) = self._requests([prompt], [sampling.for_request(seed)], lora)
            return self._submitted.submit(request, lora)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer to this request
            return failed_request(error)

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Have the engine not generate within the block; what is under way goes on afterwards.

        Requests may be submitted meanwhile, and wait.
        """
        with self._turns:
            yield

    # -- Step by step --------------------------------------------------------------------------------------------

    def add_request(
        self, request_id: str, prompt: Sequence[int], sampling: Sampling, *, lora: LoraAdapter | None = None
    ) -> None:
        """Take a request in; raise what `generate` would raise of it, or PromptError where the id is under way."""
        self._check_ready()
        if self._streams.holds(request_id):
            raise PromptError(f"request {request_id!r} is under way already")
        (request,) = self._requests([prompt], [sampling], lora)
        params = to_sampling_params(sampling, stop_token_ids=self._stop_token_ids, streaming=True)
        with self._running.calls():
            for sample in range(sampling.n):
                number = f"step-{next(self._numbers)}"
                internal = self._running.submit(number, request.prompt, for_sample(params, sample), lora=lora)
                self._streams.add(number, StreamedAnswer(request_id, internal, request=request, sample_index=sample))

    def step(self) -> list[tuple[str, RolloutDelta]]:
        """Generate the next tokens of what is running, and return them with the ids of their requests.

        Raises:
            LogpError: A log-probability is missing or not finite; every request that is under way is lost.
            EngineDeadError: A process of the engine is gone, with every request that was under way.
        """
        if self._streams.running and not self._streams.waiting:
            self._advance()
        with self._turns:
            lost, self._lost = self._lost, None
            if lost is not None:
                raise lost
            return self._streams.deltas()

    def abort_request(self, request_id: str) -> None:
        """End a request: the next step returns its answers as they are, with finish reason `"abort"`.

        One that is not under way is left alone.
        """
        with self._turns:
            if not self._streams.holds(request_id):
                return
            states = self._running.engine.output_processor.request_states
            ended = self._streams.abort(request_id, states, logp_of=self._logp_of, version=self.version)
            with self._running.calls():
                self._running.engine.abort_request(ended)
            self._running.statistics.count_aborted(len(ended))

    def has_unfinished_requests(self) -> bool:
        """Whether a step has something to do."""
        return self._streams.running or self._streams.waiting or self._lost is not None

    # -- What a trainer asks of it -------------------------------------------------------------------------------

    def collective_rpc(
        self,
        method: str,
        *,
        timeout_s: float | None = None,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> list[Any]:
        """Have every worker run `method`, one of vLLM's or of the worker extension; return what each answers."""
        with self._running.calls():
            answers: list[Any] = self.llm.collective_rpc(method, timeout_s, tuple(args), dict(kwargs or {}))
        return answers

    def reset_prefix_cache(self) -> None:
        """Forget the keys and values of earlier prompts.

        Raises:
            ModelError: Requests are under way, which use them.
        """
        self._running.reset_caches()

    def sleep(self, *, level: int = 1) -> None:
        """Free the device's memory until `wake_up`: 1 keeps the weights in the host's memory, 2 discards them.

        After level 2 the engine refuses to generate until a refit has been committed. On a CPU nothing is freed.

        Raises:
            EngineOptionError: The engine was made without `enable_sleep_mode`, or there is no such level.
            ModelError: Requests are under way.
        """
        self._prepared.check_sleep(level)
        if self.has_unfinished_requests() or self._answers:
            raise ModelError("requests are under way; finish or abort them before the engine sleeps")
        version = self.version
        with self._running.calls():
            self.llm.sleep(level=level)
        if level == 2:
            self._unfed_version = version
            self._running.set_label(UNFED)

    def wake_up(self, *, tags: Sequence[str] | None = None) -> None:
        """Take memory back: of "weights", of "kv_cache", or, with None, of both."""
        with self._running.calls():
            self.llm.wake_up(None if tags is None else list(tags))

    def add_lora(self, adapter: LoraAdapter) -> None:
        """Load an adapter before it is asked for.

        Raises:
            EngineOptionError: The engine was made without `enable_lora`.
        """
        check_lora(adapter, self._prepared.options)
        with self._running.calls():
            self._running.engine.add_lora(adapter.request())

    def remove_lora(self, adapter: LoraAdapter) -> None:
        """Forget an adapter; EngineOptionError where it is not loaded."""
        check_lora(adapter, self._prepared.options)
        with self._running.calls():
            check_removed(adapter, removed=self._running.engine.remove_lora(adapter.number))

    # -- Life and death ------------------------------------------------------------------------------------------

    def check_health(self, *, timeout_s: float = 60.0) -> None:
        """Return once the engine core has answered.

        Raises:
            EngineDeadError: A process is gone, or there was no answer within `timeout_s`.
        """
        self._running.check_health(timeout_s=timeout_s)

    def restart(self) -> None:
        """End the engine, and start it anew with the checkpoint's weights, or dummy ones: refit it.

        Requests and loaded adapters are forgotten, `version` is what it was at first, and `llm` is another one, so that
        a sink must be made anew too.
        """
        self.close()
        self._start()

    def close(self) -> None:
        """End the engine, with all of its processes; it can be called again.

        Requests of `submit` and calls of `generate` in other threads end with EngineDeadError.
        """
        with self._turns:
            owned, self._owned = self._owned, None
            if owned is not None:
                self._lose(EngineDeadError("the engine was closed while this request was under way"))
                self._lost = None
                owned.close()
        if not self._turns.mine:
            self._submitted.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- Inside --------------------------------------------------------------------------------------------------

    @property
    def _running(self) -> OwnedLlm:
        if self._owned is None:
            raise EngineDeadError("the engine is closed; restart() makes a new one")
        if self._owned.interrupted:
            raise EngineDeadError("a step of the engine was interrupted half-way; restart() makes a new one")
        return self._owned

    def _start(self) -> None:
        self._owned = OwnedLlm(self._prepared, own_process=self._own_process, turns=self._turns)
        self._streams = Streams()
        self._answers, self._lost = {}, None
        self._unfed_version = self._start_version
        if not self._prepared.unfed:
            self._owned.set_label(str(self._start_version))

    def _check_ready(self) -> int:
        """Refuse to generate from weights that are not there; return their version."""
        if self._ready is not None:
            self._ready()
        label = self._running.label()
        if label == UNFED:
            raise ModelError(NO_WEIGHTS)
        with self._running.calls():
            if self._running.engine.is_sleeping():
                raise ModelError("the engine sleeps; wake_up() before it generates")
        return version_of(label)

    def _requests(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling],
        lora: LoraAdapter | None,
    ) -> list[Request]:
        if lora is not None:
            check_lora(lora, self._prepared.options)
        requests = make_requests(prompts, sampling, self._limits)
        for request in requests:
            check_for_vllm(request, self._limits)
        return requests

    # All of it in a turn, `_advance` excepted, which takes one.

    def _add(
        self, request: Request, owner: "Call | Future[Rollout]", *, version: int, lora: LoraAdapter | None
    ) -> None:
        params = to_sampling_params(request.sampling, stop_token_ids=self._stop_token_ids)
        for sample in range(request.sampling.n):
            number = f"answer-{next(self._numbers)}"
            self._answers[number] = Answer(request=request, sample_index=sample, owner=owner, version=version)
            self._running.submit(number, request.prompt, for_sample(params, sample), lora=lora)

    def _begin(self, future: "Future[Rollout]", request: Request, lora: Any) -> None:
        version = self._check_ready()
        with self._running.calls():
            self._add(request, future, version=version, lora=lora)

    def _abort(self, future: "Future[Rollout]") -> None:
        self._running.statistics.count_aborted(self._drop(future))

    def _drop(self, owner: object) -> int:
        """Take the answers that somebody wanted out of the engine; return how many."""
        with self._turns:
            numbers = [number for number, answer in self._answers.items() if answer.owner is owner]
            for number in numbers:
                del self._answers[number]
            if numbers and self._owned is not None and not self._owned.interrupted:
                self._owned.engine.abort_request(numbers)
        return len(numbers)

    def _advance(self, call: Call | None = None) -> None:
        """Step once for all, and tell who waits for an answer; nothing, where `call` was served meanwhile."""
        outcomes: list[Outcome] = []
        with self._turns:
            if call is not None and call.over:
                return
            outcomes += self._submitted.admit()
            try:
                with self._running.calls():
                    # With nothing to do, an engine in its own process would wait for ever.
                    outputs = self._running.step() if self._running.engine.has_unfinished_requests() else []
                    for output in outputs:
                        outcomes += self._route(output)
            except BaseException as error:
                interrupt = EngineDeadError(f"a step was interrupted by {type(error).__name__}: the requests are lost")
                self._lose(error if isinstance(error, Exception) else interrupt)
                raise
        self._submitted.settle(outcomes)

    def _route(self, output: Any) -> list[Outcome]:
        """Note what has become of an answer where its owner finds it, or return it where that is a future."""
        answer = self._answers.pop(output.request_id, None)
        result: Rollout | Exception
        try:
            if answer is None:
                self._streams.take(output, logp_of=self._logp_of, version=self._start_version)
                return []
            result = answer.rollout(output, logp_of=self._logp_of)
        except (LogpError, ModelError) as error:
            result = self._running.explained(error)
        if answer is None:
            self._running.engine.abort_request(self._streams.drop())
            assert isinstance(result, Exception)
            self._lost = result
            return []
        if isinstance(answer.owner, Future):
            return [(answer.owner, result)]
        answer.owner.settle(result)
        return []

    def _lose(self, error: BaseException) -> None:
        """Drop everything that is under way, and have whoever waits for it get `error`."""
        numbers = [*self._answers, *self._streams.drop()]
        if len(numbers) > len(self._answers):
            self._lost = error
        answers, self._answers = self._answers, {}
        if self._owned is not None and not self._owned.interrupted and not isinstance(error, EngineDeadError):
            self._owned.engine.abort_request(numbers)
        for answer in answers.values():
            if isinstance(answer.owner, Call):
                answer.owner.settle(error)
        self._submitted.fail(error)
