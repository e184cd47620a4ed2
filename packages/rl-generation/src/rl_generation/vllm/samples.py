"""Samples on an `AsyncLLM`, each a request of its own, so that a timeout or an abort costs one and the others go on.

Everything here runs on the event loop of the engine. Callers check the arguments.
"""

import asyncio
import contextlib
import functools
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from rl_generation.engine import RolloutDelta
from rl_generation.errors import EngineDeadError, LogpError, TimedOutSample
from rl_generation.requests import Request
from rl_generation.rollout import LogpOf, Rollout, VersionSpan, in_order
from rl_generation.vllm.admission import Manner
from rl_generation.vllm.outputs import logp_of_tokens, rollout_of, spans_of, timing_of
from rl_generation.vllm.running import RunningLLM
from rl_generation.vllm.sampling_params import to_sampling_params
from rl_generation.vllm.timeouts import timeout_error

__all__ = ["Samples"]

PATIENCE_S = 5.0
"""How long vLLM may take to let go of requests that are cancelled."""


_Follow = Callable[[Callable[[Any], None]], Coroutine[Any, Any, Sequence[int]]]
"""Runs a sample, gives what comes of it to its argument, and returns the tokens that it got to."""


@final
@dataclass(slots=True, kw_only=True, eq=False)
class _Sample:
    """One answer under way."""

    prompt_index: int
    index: int
    manner: Manner
    id: str
    """vLLM's name for it."""
    expired: bool = False
    """Whether it was aborted because its time was over."""
    seams: Sequence[tuple[int, int]] = ()
    """See `RunningLLM.seams`, where they are until it has ended."""


@final
class Samples:
    """Runs samples.

    Args:
        running: The engine.
        stop_token_ids: The engine's own.
        logp_of: What it was made with.
    """

    def __init__(self, running: RunningLLM, *, stop_token_ids: Sequence[int], logp_of: LogpOf) -> None:
        self._running, self._stop_token_ids, self._logp_of = running, tuple(stop_token_ids), logp_of
        self._under_way: dict[str, _Sample] = {}
        self._numbers = itertools.count()
        self._aborting: set[asyncio.Task[None]] = set()

    @property
    def under_way(self) -> int:
        """How many vLLM has that nobody has got to the end of."""
        return len(self._under_way)

    async def generate(self, requests: Sequence[Request], manner: Manner) -> list[Rollout]:
        """Answer all of them, in order.

        Raises:
            SampleTimeoutError: Samples were not done in time; all others are, and are kept.
            EngineDeadError: The engine died; what had finished is kept.
            LogpError: A log-probability is missing or not finite.
        """
        tasks = self._begin(requests, manner)
        if not tasks:
            return []
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            await _let_go(tasks)
        done = [task.result() for task in tasks if task.done() and not task.cancelled() and task.exception() is None]
        rollouts = in_order([each for each in done if isinstance(each, Rollout)])
        if len(done) < len(tasks):
            await self._raise_first(tasks, rollouts)
        timed_out = [each for each in done if isinstance(each, TimedOutSample)]
        if timed_out:
            raise timeout_error(timed_out, rollouts, timeout_s=manner.timeout_s)
        return rollouts

    async def answer(self, request: Request, manner: Manner) -> Rollout:
        """Answer one request, whose `n` is 1; raise as `generate` does."""
        (rollout,) = await self.generate([request], manner)
        return rollout

    async def as_completed(
        self, requests: Sequence[Request], manner: Manner
    ) -> AsyncGenerator[Rollout | TimedOutSample, None]:
        """Yield each answer when it is whole, and each sample that was not done in time; raise as `generate` does."""
        finished: asyncio.Queue[asyncio.Task[Rollout | TimedOutSample]] = asyncio.Queue()
        tasks = self._begin(requests, manner)
        for task in tasks:
            task.add_done_callback(finished.put_nowait)
        rollouts: list[Rollout] = []
        try:
            for _ in tasks:
                task = await finished.get()
                if task.cancelled() or task.exception() is not None:
                    await self._raise_first([task], in_order(rollouts))
                if isinstance(result := task.result(), Rollout):
                    rollouts.append(result)
                yield result
        finally:
            await _let_go(tasks)

    async def stream(self, request: Request, manner: Manner) -> AsyncGenerator[RolloutDelta, None]:
        """Yield new tokens as they come; raise as `generate` does, a timeout after the end of the other samples."""
        samples = [self._sample(manner, request.prompt_index, index) for index in range(request.sampling.n)]
        followed = {sample: functools.partial(self._follow, sample, request) for sample in samples}
        async for delta in self._merged(followed, manner):
            yield delta

    async def outputs(
        self, prompt: Any, params: Sequence[Any], manner: Manner, **how: Any
    ) -> AsyncGenerator[tuple[int, Any, tuple[VersionSpan, ...]], None]:
        """Yield what vLLM itself puts out for several answers to one prompt; raise as `stream` does.

        Args:
            prompt: As vLLM's renderer made it.
            params: vLLM's SamplingParams of each answer, whose `n` is 1, and which ask for the sampled token's logp.
            manner: What holds for all of them.
            how: Further arguments of `AsyncLLM.generate`.

        Yields:
            The index of an answer, a `vllm.RequestOutput`, and, with the last of an answer, which weights made which of
            its tokens.
        """
        followed = {
            sample: functools.partial(self._pass_on, sample, prompt=dict(prompt), params=each, how=how)
            for sample, each in ((self._sample(manner, 0, index), each) for index, each in enumerate(params))
        }
        async for item in self._merged(followed, manner):
            yield item

    async def _merged(self, followed: Mapping[_Sample, _Follow], manner: Manner) -> AsyncGenerator[Any, None]:
        """Yield what several samples give to their `put`, as it comes; each returns the tokens that it got to."""
        queue: asyncio.Queue[Any] = asyncio.Queue()
        tasks = {self._running.health.start(follow(queue.put_nowait)): sample for sample, follow in followed.items()}
        for task in tasks:
            task.add_done_callback(queue.put_nowait)
        rollouts: list[Rollout] = []
        timed_out: list[TimedOutSample] = []
        ended = 0
        try:
            while ended < len(tasks):
                item = await queue.get()
                if not isinstance(item, asyncio.Task):
                    if isinstance(item, RolloutDelta) and item.rollout is not None:
                        rollouts.append(item.rollout)
                    yield item
                    continue
                ended += 1
                if item.cancelled() or item.exception() is not None:
                    await self._raise_first([item], rollouts)
                if (sample := tasks[item]).expired:
                    timed_out.append(self._timed_out(sample, item.result()))
        finally:
            await _let_go(list(tasks))
        if timed_out:
            raise timeout_error(timed_out, in_order(rollouts), timeout_s=manner.timeout_s)

    async def abort(self, request_id: str | None = None) -> int:
        """Abort all samples under way, or those of one call; return how many. Whoever waits gets them as they are."""
        chosen = [sample.id for sample in self._under_way.values() if request_id in (None, sample.manner.request_id)]
        self._count_aborted(len(chosen))
        await self._running.llm.abort(chosen)
        return len(chosen)

    def _sample(self, manner: Manner, prompt_index: int, index: int) -> _Sample:
        return _Sample(prompt_index=prompt_index, index=index, manner=manner, id=f"rl-generation-{next(self._numbers)}")

    def _begin(self, requests: Sequence[Request], manner: Manner) -> "list[asyncio.Task[Rollout | TimedOutSample]]":
        return [
            self._running.health.start(self._answer(self._sample(manner, request.prompt_index, index), request))
            for request in requests
            for index in range(request.sampling.n)
        ]

    async def _answer(self, sample: _Sample, request: Request) -> Rollout | TimedOutSample:
        last: list[Any] = [None]

        def keep(output: Any) -> None:
            last[0] = output

        await self._submit(sample, request, keep, streaming=False)
        completion = last[0].outputs[0]
        if sample.expired and completion.finish_reason == "abort":
            return self._timed_out(sample, completion.token_ids)
        return self._rollout(sample, last[0])

    async def _follow(self, sample: _Sample, request: Request, put: Callable[[RolloutDelta], None]) -> Sequence[int]:
        tokens: list[int] = []
        logp: list[float] = []

        def hand_on(output: Any) -> None:
            completion = output.outputs[0]
            new = tuple(completion.token_ids)
            new_logp = self._logp(sample, completion, start=len(tokens))
            tokens.extend(new)
            logp.extend(new_logp)
            late = sample.expired and completion.finish_reason == "abort"
            whole = self._rollout(sample, output, tokens=tokens, logp=logp) if output.finished and not late else None
            if new or whole is not None:
                put(RolloutDelta(sample_index=sample.index, tokens=new, logp=new_logp, rollout=whole))
            if whole is not None:
                sample.expired = False

        await self._submit(sample, request, hand_on, streaming=True)
        return tokens

    async def _pass_on(
        self, sample: _Sample, put: Callable[[Any], None], *, prompt: Any, params: Any, how: Mapping[str, Any]
    ) -> Sequence[int]:
        from vllm.sampling_params import RequestOutputKind

        tokens: list[int] = []

        def hand_on(output: Any) -> None:
            completion = output.outputs[0]
            if params.output_kind is not RequestOutputKind.DELTA:
                tokens.clear()
            self._logp(sample, completion, start=len(tokens))
            tokens.extend(completion.token_ids)
            if sample.expired and completion.finish_reason == "abort":
                return
            spans: tuple[VersionSpan, ...] = ()
            if output.finished:
                sample.expired = False
                spans = spans_of(
                    getattr(completion, "weight_versions", None),
                    len(tokens),
                    self._running.version,
                    seams=self._running.seams.get(sample.id, sample.seams),
                )
            put((sample.index, output, spans))

        await self._run(sample, hand_on, prompt=prompt, params=params, how=how)
        return tokens

    async def _submit(self, sample: _Sample, request: Request, take: Callable[[Any], None], *, streaming: bool) -> None:
        from vllm.inputs import tokens_input

        params = to_sampling_params(
            request.sampling, stop_token_ids=self._stop_token_ids, sample_index=sample.index, streaming=streaming
        )
        await self._run(sample, take, prompt=tokens_input(list(request.prompt)), params=params, how={})

    async def _run(
        self, sample: _Sample, take: Callable[[Any], None], *, prompt: Any, params: Any, how: Mapping[str, Any]
    ) -> None:
        """Submit a sample, and give every output of it to `take`, until it is finished, aborted or expired."""
        timer = asyncio.get_running_loop().call_later(sample.manner.timeout_s, self._expire, sample)
        self._under_way[sample.id] = sample
        try:
            answering = self._running.llm.generate(prompt, params, sample.id, lora_request=sample.manner.lora, **how)
            async with contextlib.aclosing(answering) as outputs:  # which aborts it where `take` raises
                async for output in outputs:
                    take(output)
        except asyncio.CancelledError:
            self._count_aborted(1)
            raise
        finally:
            timer.cancel()
            del self._under_way[sample.id]
            sample.seams = self._running.seams.pop(sample.id, sample.seams)

    def _logp(self, sample: _Sample, completion: Any, *, start: int) -> tuple[float, ...]:
        return logp_of_tokens(
            completion.token_ids,
            completion.logprobs,
            prompt_index=sample.prompt_index,
            sample_index=sample.index,
            start=start,
        )

    def _expire(self, sample: _Sample) -> None:
        sample.expired = True
        self._count_aborted(1)
        aborting = asyncio.create_task(self._running.llm.abort(sample.id))
        self._aborting.add(aborting)
        aborting.add_done_callback(self._aborting.discard)

    def _count_aborted(self, count: int) -> None:
        self._running.count_aborted(count)

    def _rollout(
        self, sample: _Sample, output: Any, *, tokens: Sequence[int] | None = None, logp: Sequence[float] | None = None
    ) -> Rollout:
        return rollout_of(
            output.outputs[0],
            prompt_index=sample.prompt_index,
            sample_index=sample.index,
            logp_of=self._logp_of,
            version=self._running.version,
            timing=timing_of(output.metrics),
            tokens=tokens,
            logp=logp,
            seams=self._running.seams.get(sample.id, sample.seams),
        )

    def _timed_out(self, sample: _Sample, tokens: Sequence[int]) -> TimedOutSample:
        return TimedOutSample(prompt_index=sample.prompt_index, sample_index=sample.index, tokens=tuple(tokens))

    async def _raise_first(self, tasks: Sequence["asyncio.Task[Any]"], rollouts: Sequence[Rollout]) -> None:
        """Raise why one of `tasks` did not come to its end."""
        failed = [task for task in tasks if not task.cancelled() and task.done() and task.exception() is not None]
        cancelled = [task for task in tasks if task.cancelled()]
        try:
            await self._running.health.result((failed or cancelled)[0])
        except EngineDeadError as error:
            raise EngineDeadError(str(error), rollouts=rollouts) from error.__cause__
        except LogpError as error:
            raise LogpError(f"{error}{self._running.logp_hint}") from error


async def _let_go(tasks: Sequence["asyncio.Task[Any]"]) -> None:
    pending = [task for task in tasks if not task.done()]
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.wait(pending, timeout=PATIENCE_S)
