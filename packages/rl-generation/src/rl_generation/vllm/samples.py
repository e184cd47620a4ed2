"""Requests to vLLM: what is checked before any is submitted, how samples run beside one another, and what they become.

Every sample is a request of its own, so that a timeout or an abort costs one and the others go on. A log-probability
that is missing or not finite is an error here, never a zero. Importing this does not import vLLM.
"""

import asyncio
import contextlib
import itertools
import math
import os
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from rl_generation.constraints import encode_bad_words
from rl_generation.detokenizer import INCOMPLETE, decode
from rl_generation.engine import RolloutDelta
from rl_generation.errors import (
    EngineDeadError,
    EngineOptionError,
    LogpError,
    ModelError,
    PromptError,
    SampleTimeoutError,
    TimedOutSample,
)
from rl_generation.event_loop import MOST_UNREAD, UNREAD_PERIOD_S
from rl_generation.requests import Limits, Request, Sampling
from rl_generation.rollout import FinishReason, LogpOf, Rollout, VersionSpan, in_order
from rl_generation.vllm.options import VllmOptions
from rl_generation.vllm.running import RunningLLM, version_of

TIMEOUT_VARIABLE = "NRL_VLLM_ASYNC_TIMEOUT_SECONDS"
"""The environment variable that bounds each sample of a `VllmEngine`, in seconds."""

DEFAULT_TIMEOUT_S = 600.0
"""Of a request that is awaited, streamed or submitted, where nobody says."""

PATIENCE_S = 5.0
"""How long vLLM may take to let go of requests that are cancelled."""

MAX_TEMPERATURE = 2.0
"""vLLM refuses what is above."""

EMBEDDED_ONLY = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_new_tokens",
    "json_schema",
    "regex",
    "top_logp",
)
"""Fields of Sampling that this engine refuses."""

ENOUGH_TOKENS = 8
"""At the end of a prompt, to tell whether it ends inside a character of at most four bytes."""

MAX_BAD_WORDS = ("VLLM_MAX_NUM_BAD_WORDS", 128)
"""Sequences of tokens; vLLM refuses more than this variable says, or else this number."""


_numbers: Iterator[int] = itertools.count()


@dataclass(slots=True, kw_only=True, eq=False)
class Sample:
    """One answer, and what there is of it."""

    prompt: Any
    """Token ids, or as vLLM's renderer made it."""
    params: Any
    """vLLM's SamplingParams, whose `n` is 1, and which ask for the sampled token's logp."""
    prompt_index: int = 0
    index: int
    timeout_s: float
    """From its submission; may be infinite."""
    lora: Any = None
    """vLLM's LoRARequest; None for the model as it is."""
    how: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `AsyncLLM.generate`."""
    id: str = field(default_factory=lambda: f"rl-generation-{next(_numbers)}")
    """vLLM's name for it."""
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    expired: bool = False
    """Whether its time was over before it had ended."""
    late: bool = False
    """Whether it was aborted for that, and not for another reason in the same moment."""
    versions: tuple[VersionSpan, ...] = ()
    """Which weights made which of its tokens, once it has ended."""
    rollout: Rollout | None = None


class Samples:
    """Runs samples on one engine, on its event loop; `hint` is added to a LogpError."""

    def __init__(self, running: RunningLLM, *, logp_of: LogpOf, hint: str) -> None:
        self._running, self._logp_of, self._hint = running, logp_of, hint
        self.under_way: dict[str, Sample] = {}
        """Those that vLLM has, and that nobody has got to the end of."""
        self._aborting: set[asyncio.Task[None]] = set()

    async def generate(self, samples: Sequence[Sample]) -> list[Rollout]:
        """Answer all of them, in order; raise what `VllmEngine.generate` says."""
        async with contextlib.aclosing(self.outputs(samples)) as outputs:
            async for sample, output, _ in outputs:
                if output.finished:
                    sample.rollout = rollout_of(sample, output, logp_of=self._logp_of)
        return _rollouts(samples)

    async def stream(self, samples: Sequence[Sample]) -> AsyncGenerator[RolloutDelta, None]:
        """Yield new tokens as they come; raise as `generate` does, a timeout after the end of the other samples."""
        async with contextlib.aclosing(self.outputs(samples)) as outputs:
            async for sample, output, logp in outputs:
                tokens = tuple(output.outputs[0].token_ids)
                if output.finished:
                    sample.rollout = rollout_of(sample, output, logp_of=self._logp_of)
                if tokens or output.finished:
                    yield RolloutDelta(sample_index=sample.index, tokens=tokens, logp=logp, rollout=sample.rollout)

    async def abort(self) -> int:
        """Abort all samples under way; return how many. Whoever waits gets them as they are."""
        chosen = [*self.under_way]
        self._running.statistics.count_aborted(len(chosen))
        await self._running.llm.abort(chosen)
        return len(chosen)

    async def outputs(self, samples: Sequence[Sample]) -> AsyncGenerator[tuple[Sample, Any, tuple[float, ...]], None]:
        """Run samples beside one another; yield each `vllm.RequestOutput`, whose it is, and the logp of its tokens."""
        queue: asyncio.Queue[Any] = asyncio.Queue()
        tasks = [self._running.health.start(self._run(sample, queue, len(samples))) for sample in samples]
        for task in tasks:
            task.add_done_callback(queue.put_nowait)
        ended = 0
        try:
            while ended < len(tasks):
                item = await queue.get()
                if not isinstance(item, asyncio.Task):
                    yield item
                    continue
                ended += 1
                if item.cancelled() or item.exception() is not None:
                    await self._running.health.result(item)
        except EngineDeadError as error:
            raise EngineDeadError(str(error), rollouts=_rollouts(samples)) from error.__cause__
        except LogpError as error:
            raise LogpError(f"{error}{self._hint}") from error
        finally:
            pending = [task for task in tasks if not task.done()]
            for task in pending:
                task.cancel()
            if pending:
                await asyncio.wait(pending, timeout=PATIENCE_S)
            for task in tasks:  # where several have failed, one was raised, and asyncio would log the others
                if task.done() and not task.cancelled():
                    task.exception()
        if late := [sample for sample in samples if sample.late]:
            raise timeout_error(late, _rollouts(samples))

    async def _run(self, sample: Sample, queue: asyncio.Queue[Any], count: int) -> None:
        """Submit a sample, one of `count`, and put what comes of it, until it is finished, aborted or expired."""
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        running = self._running
        prompt = sample.prompt if isinstance(sample.prompt, dict) else tokens_input(list(sample.prompt))
        in_pieces = sample.params.output_kind is RequestOutputKind.DELTA
        timer = asyncio.get_running_loop().call_later(sample.timeout_s, self._expire, sample)
        self.under_way[sample.id] = sample
        try:
            answering = running.llm.generate(prompt, sample.params, sample.id, lora_request=sample.lora, **sample.how)
            async with contextlib.aclosing(answering) as outputs:  # which aborts it where a logp is broken
                async for output in outputs:
                    completion = output.outputs[0]
                    if not in_pieces:
                        sample.tokens, sample.logp = [], []
                    logp = logp_of_tokens(sample, completion)
                    sample.tokens.extend(completion.token_ids)
                    sample.logp.extend(logp)
                    if output.finished:
                        seams = running.seams.get(sample.id, ())
                        sample.versions = spans_of(completion, len(sample.tokens), running.version, seams=seams)
                        sample.late = sample.expired and completion.finish_reason == "abort"
                    if not sample.late:
                        queue.put_nowait((sample, output, logp))
                    # A slow consumer: meanwhile vLLM puts new tokens together.
                    while not output.finished and queue.qsize() >= MOST_UNREAD * count:  # noqa: ASYNC110
                        await asyncio.sleep(UNREAD_PERIOD_S)
        except asyncio.CancelledError:
            running.statistics.count_aborted(1)
            raise
        finally:
            timer.cancel()
            del self.under_way[sample.id]
            running.seams.pop(sample.id, None)

    def _expire(self, sample: Sample) -> None:
        sample.expired = True
        self._running.statistics.count_aborted(1)
        aborting = asyncio.create_task(self._running.llm.abort(sample.id))
        self._aborting.add(aborting)
        aborting.add_done_callback(self._aborting.discard)


def _rollouts(samples: Sequence[Sample]) -> list[Rollout]:
    """Those of the samples that have ended, in order."""
    return in_order([sample.rollout for sample in samples if sample.rollout is not None])


# -- What is asked of vLLM --------------------------------------------------------------------------------------------


def check_for_vllm(request: Request, limits: Limits) -> None:
    """Raise PromptError for what vLLM, alone of the engines, does not do, or would refuse after others have begun."""
    index, sampling = request.prompt_index, request.sampling
    if sampling.temperature > MAX_TEMPERATURE:
        raise PromptError(
            f"prompt {index} asks for temperature={sampling.temperature}, and vLLM goes up to {MAX_TEMPERATURE}"
        )
    why = "which the embedded engine alone does, not vLLM's: leave it out, or use TransformersEngine"
    refuse_fields(request, EMBEDDED_ONLY, why)
    if sampling.stop and decode(limits.tokenizer, request.prompt[-ENOUGH_TOKENS:]).endswith(INCOMPLETE):
        raise PromptError(
            f"prompt {index} ends inside a character, and asks for stop={sampling.stop!r}, which vLLM would then look "
            f"for in the prompt too: end it with a whole character, or use stop_token_ids"
        )
    if sampling.bad_words:
        sequences = encode_bad_words(sampling.bad_words, limits.tokenizer, vocab_size=limits.vocab_size)
        variable, default = MAX_BAD_WORDS
        most = int(os.environ.get(variable, default))
        if len(sequences) > most:
            raise PromptError(
                f"prompt {index} has {len(sampling.bad_words)} bad_words, which make {len(sequences)} sequences of "
                f"tokens, with and without a space before them, and vLLM takes {most}; set {variable} to change that"
            )


def refuse_fields(request: Request, names: Sequence[str], why: str) -> None:
    """Raise PromptError where the Sampling of a request sets one of these fields."""
    asked, off = request.sampling, Sampling(max_new_tokens=1)
    for name in names:
        if getattr(asked, name) != getattr(off, name):
            raise PromptError(f"prompt {request.prompt_index} asks for {name}={getattr(asked, name)!r:.100}, {why}")


def to_sampling_params(
    sampling: Sampling, *, stop_token_ids: Sequence[int], sample_index: int = 0, streaming: bool = False
) -> Any:
    """Return the `vllm.SamplingParams` of one answer.

    vLLM's own notion of an eos token is switched off, and what ends an answer is listed instead, so that every engine
    ends answers alike, whatever the checkpoint's generation config says.

    Args:
        sampling: What the caller asked for.
        stop_token_ids: The engine's own, which `ignore_eos` switches off.
        sample_index: Which of the `n` answers.
        streaming: Whether new tokens are handed out as they come, or an answer when it is whole.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams  # `from vllm import` looks it up each time

    own = () if sampling.ignore_eos else tuple(stop_token_ids)
    return SamplingParams(
        n=1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=None if sampling.seed is None else sampling.seed + sample_index,
        stop=list(sampling.stop),
        stop_token_ids=[*sampling.stop_token_ids, *own],
        bad_words=list(sampling.bad_words),
        ignore_eos=True,
        max_tokens=sampling.max_new_tokens,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.DELTA if streaming else RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # made for one answer, and touched by nobody else
    )


# -- What vLLM generated ----------------------------------------------------------------------------------------------


def rollout_of(sample: Sample, output: Any, *, logp_of: LogpOf) -> Rollout:
    """Return the answer whose last, or only, `vllm.RequestOutput` is `output`.

    Raises:
        ModelError: vLLM gave the answer up.
    """
    completion, tokens = output.outputs[0], sample.tokens
    if completion.finish_reason not in ("stop", "length", "abort"):
        raise ModelError(
            f"vLLM ended answer {sample.index} to prompt {sample.prompt_index} with finish_reason="
            f"{completion.finish_reason!r} after {len(tokens)} tokens; its log says why"
        )
    stop_reason = completion.stop_reason if completion.finish_reason == "stop" else None
    if completion.finish_reason == "stop" and stop_reason is None:  # how vLLM says that its own eos token came
        stop_reason = tokens[-1]
    return Rollout(
        tokens=tuple(tokens),
        logp=tuple(sample.logp),
        logp_of=logp_of,
        finish_reason=cast("FinishReason", completion.finish_reason),
        stop_reason=stop_reason,
        versions=sample.versions,
        prompt_index=sample.prompt_index,
        sample_index=sample.index,
    )


def logp_of_tokens(sample: Sample, completion: Any) -> tuple[float, ...]:
    """Return the log-probability of each token of `completion`, which come after those that `sample` has.

    Raises:
        LogpError: One is missing, NaN or infinite.
    """
    tokens, found = completion.token_ids, completion.logprobs
    flat = getattr(found, "logprobs", None)
    if flat is not None:  # one entry a token, since only the chosen one was asked for
        pairs = zip(flat, found.token_ids, tokens, strict=False)
        values = tuple(value for value, of, token in pairs if of == token)
    else:
        chosen = (each.get(token) for token, each in zip(tokens, found or (), strict=False))
        values = tuple(each.logprob for each in chosen if each is not None)
    if len(values) != len(tokens):
        fault = f"has {len(values)} log-probabilities for {len(tokens)} tokens"
    elif not all(map(math.isfinite, values)):
        place = next(i for i, value in enumerate(values) if not math.isfinite(value))
        position = len(sample.tokens) + place
        fault = f"has log-probability {values[place]} for token {tokens[place]} at position {position}"
    else:
        return values
    raise LogpError(f"answer {sample.index} to prompt {sample.prompt_index} {fault}: the model's logits are broken")


def logp_hint(options: VllmOptions) -> str:
    """Return what to add to a LogpError of an engine with these options: nothing, or what is likely the cause."""
    if not options.vllm_kwargs.get("speculative_config"):
        return ""
    return (
        ", or, more likely here, it is speculative decoding: vLLM's rejection sampler may give NaN for a sampled "
        "token, on a CPU above all; switch it off, without speculative_config"
    )


def spans_of(
    completion: Any, length: int, version: int, *, seams: Sequence[tuple[int, int]] = ()
) -> tuple[VersionSpan, ...]:
    """Return which weights made which of the `length` tokens of the answer that ends with `completion`.

    vLLM says so since 0.32. Before, it is what was noted at commits: `seams` are the versions of the weights before
    `version`, that of now, each with how many tokens there were when the next one came.

    Raises:
        ModelError: The weights are labelled with what is no number of steps.
    """
    if not length:
        return (VersionSpan(version=version, start=0, end=0),)
    if said := getattr(completion, "weight_versions", None):
        # An answer that is aborted may have a last span, of weights that made none of its tokens.
        made = [each for each in said if each.start < each.end]
        return tuple(VersionSpan(version=version_of(each.version), start=each.start, end=each.end) for each in made)
    ends = [*seams, (version, length)]
    starts = [0, *(end for _, end in seams)]
    pairs = zip(ends, starts, strict=True)
    return tuple(VersionSpan(version=of, start=start, end=end) for (of, end), start in pairs if start < end)


# -- How long a sample may take ---------------------------------------------------------------------------------------


def sample_timeout_s() -> float | None:
    """Read `NRL_VLLM_ASYNC_TIMEOUT_SECONDS`; None where it is not set, EngineOptionError where it is no time."""
    text = os.environ.get(TIMEOUT_VARIABLE)
    if text is None:
        return None
    try:
        return check_timeout(float(text), name=TIMEOUT_VARIABLE)
    except ValueError:
        raise EngineOptionError(
            f"{TIMEOUT_VARIABLE} must be a positive, finite number of seconds; got {text!r}. Unset it for "
            f"{DEFAULT_TIMEOUT_S:.0f}, and no limit for generate"
        ) from None


def check_timeout(timeout_s: float, *, name: str = "timeout_s") -> float:
    """Return `timeout_s`; EngineOptionError where it is not positive, or not finite."""
    if not 0.0 < timeout_s < math.inf:
        raise EngineOptionError(f"{name} must be a positive, finite number of seconds; got {name}={timeout_s!r}")
    return timeout_s


def timeout_error(late: Sequence[Sample], rollouts: Sequence[Rollout]) -> SampleTimeoutError:
    """What to raise once every other sample has ended."""
    first, others, timeout_s = late[0], len(late) - 1, late[0].timeout_s
    more = f", and so did {others} other{'s' if others > 1 else ''}" if others else ""
    finished = "1 that finished is" if len(rollouts) == 1 else f"{len(rollouts)} that finished are"
    return SampleTimeoutError(
        f"sample {first.index} of prompt {first.prompt_index} was aborted after {timeout_s:g} seconds, having "
        f"reached {len(first.tokens)} tokens{more}; the {finished} in this error's `rollouts`. The time counts from "
        f"the submission of a sample and includes its wait for a place in the batch: lower max_new_tokens or the "
        f"number of prompts in a call, or double it, {TIMEOUT_VARIABLE}={2 * timeout_s:g}",
        timed_out=[
            TimedOutSample(prompt_index=each.prompt_index, sample_index=each.index, tokens=tuple(each.tokens))
            for each in late
        ],
        rollouts=rollouts,
    )
