"""The embedded engine: a Hugging Face model in the caller's process.

New weights are written into `model` in place by the caller, between two calls or steps, who then calls
`commit_version`; while requests of `submit` or `stream` are under way, within `between_steps`.

Whoever has the turn steps for all: a caller of `generate`, or the thread that lives as long as requests of `submit` or
`stream` are under way. An idle engine has no thread.

Randomness: each answer has a seed, and its token t is drawn by a number that is a function of that seed and t alone. An
answer to a seeded request therefore depends on the weights, its prompt and its Sampling; not on `max_batch_size`, on
other requests, or on when rows come and go, up to the rounding of matrix products, which differs with their shape: by
about 1e-6 in a logit of a float32 model, by enough to change drawn tokens of a bfloat16 one. Answers without a seed
take one each from the engine's generator.
"""

import asyncio
import contextlib
import threading
import warnings
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, final

import torch

from rl_generation.constraints import make_constraints
from rl_generation.embedded.continuous_batching import ContinuousBatching
from rl_generation.embedded.rows import News, Row, Runner
from rl_generation.embedded.slot_model import SlotModel, inspect_model, why_not_continuous
from rl_generation.embedded.whole_batches import WholeBatches
from rl_generation.engine import EngineMetrics, RolloutDelta, check_single, check_version, failed_request
from rl_generation.errors import EngineDeadError, EngineOptionError, LogpError, ModelError
from rl_generation.requests import MAX_SEED, Limits, Request, Sampling, check_token_ids, make_requests
from rl_generation.rollout import LogpOf, Rollout, in_order

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CPU_CACHE_BYTES = 4 << 30

PAUSE_PERIOD_S = 0.1
"""Between two looks of a thread whether a paused engine may go on, or has lost what the thread waits for."""


class Turns(AbstractContextManager[None]):
    """A lock for threads that step an engine in a loop and for others, who wait for one turn each, or about that.

    Of a `threading.Lock`, the former would have nearly every turn. Who has it may enter again.
    """

    def __init__(self) -> None:
        self._door, self._room = threading.Lock(), threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    @property
    def mine(self) -> bool:
        """Whether this thread has the turn."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        if not self.mine:
            with self._door:  # whoever waits within comes before a thread that has just had its turn
                self._room.acquire()
            self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._room.release()


class Call:
    """The answers that a call of `generate` waits for; they may come in another thread's step."""

    steps = True
    """Whether the caller's thread generates, and not one of the engine's own."""

    def __init__(self, missing: int) -> None:
        self.missing = missing
        """Answers that are not there yet."""
        self.rollouts: list[Rollout] = []
        self.error: BaseException | None = None

    @property
    def over(self) -> bool:
        """Whether there is nothing to wait for."""
        return not self.missing or self.error is not None

    def take(self, news: RolloutDelta | LogpError) -> None:
        """Note what has become of one of the answers."""
        if isinstance(news, LogpError):
            self.error = self.error or news
        elif news.rollout is not None:
            self.rollouts.append(news.rollout)
            self.missing -= 1

    def end(self) -> None:
        """Say that it is over; not in a turn, for whoever hears of it may do anything."""


class SubmitCall(Call):
    """A request of `submit`."""

    steps = False

    def __init__(self) -> None:
        super().__init__(1)
        self.future: Future[Rollout] = Future()

    def end(self) -> None:
        """Complete the future; a cancelled one too, or `Future.wait` would not count it."""
        if not self.future.set_running_or_notify_cancel():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.rollouts[0])


class StreamCall(Call):
    """A request of `stream`, whose consumer lives in the event loop where this is made.

    A consumer that is slower than the engine gets several deltas of an answer as one: no more than one of each answer
    ever waits.
    """

    steps = False

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self._lock = threading.Lock()
        self._news: dict[int, list[RolloutDelta]] = {}
        """Of each answer what its consumer has not seen."""
        self._loop, self._ready = asyncio.get_running_loop(), asyncio.Event()
        self.unseen = samples
        """Answers whose end the consumer has not seen."""

    def take(self, news: RolloutDelta | LogpError) -> None:
        """Hand new tokens over."""
        super().take(news)
        if isinstance(news, RolloutDelta):
            with self._lock:
                known = bool(self._news)
                self._news.setdefault(news.sample_index, []).append(news)
            if not known:
                self._wake()

    def end(self) -> None:
        """Have the consumer look for an error."""
        self._wake()

    async def next(self) -> RolloutDelta:
        """Return what has come, or raise what prevents the rest."""
        while True:
            await self._ready.wait()
            with self._lock:
                if self._news:
                    index = next(iter(self._news))
                    news = self._news.pop(index)
                    break
                if self.error is not None:
                    raise self.error
                self._ready.clear()
        self.unseen -= news[-1].rollout is not None
        return RolloutDelta(
            sample_index=index,
            tokens=tuple(chain.from_iterable(delta.tokens for delta in news)),
            logp=tuple(chain.from_iterable(delta.logp for delta in news)),
            top_logp=tuple(chain.from_iterable(delta.top_logp for delta in news)),
            rollout=news[-1].rollout,
        )

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # a loop that is closed has no consumer any more
            self._loop.call_soon_threadsafe(self._ready.set)


@final
class TransformersEngine:
    """Generates with a `transformers` causal language model, on whatever device the model is.

    Any thread may call `generate` and `submit`, and any event loop `stream`, at any time: all requests share the
    running batch.

    Args:
        model: Has its own weights, which nothing else trains or uses. The engine switches it to eval mode.
        stop_token_ids: Tokens that end an answer unless `ignore_eos`; may be empty.
        pad_token_id: Any id of the vocabulary; fills shorter prompts, where nothing sees it.
        tokenizer: Of the model; needed for what a request says as text: stop strings, bad words, grammars.
        max_batch_size: Rows decoded together at most; more is faster until the cache fills the memory.
        max_cache_tokens: Tokens that the key/value cache holds at most, of all rows together, empty ends of rows
            included; None takes half of the free memory of a CUDA device, and 4 GiB elsewhere.
        logp_of: Which distribution logp refer to; see `LogpOf`.
        continuous_batching: Whether finished rows are replaced underway. Models that it cannot serve (recurrent states,
            attention outside of transformers' interface) are generated with by `model.generate`, after a warning;
            `"required"` refuses them, `"off"` generates with any model so.
        record_decoding: Whether the torch calls of a decoding step are recorded and replayed, instead of running the
            model's own forward at each; results are the same to the bit. Models that cannot be recorded are run as they
            are, and `explain` says why. False is for work on the model itself, whose Python a replay leaves out.
        seed: Of the generator behind answers whose `Sampling.seed` is None.
        version: Number of optimizer steps that `model`'s weights have seen already.
        ready: Called before each request is taken; raises to refuse, as when the last refit left torn weights.

    Raises:
        ModelError: The model cannot be served, or not with continuous batching where that is required.
        PromptError: A stop or pad token is outside the vocabulary.
        EngineOptionError: An option is out of range.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        *,
        stop_token_ids: Sequence[int],
        pad_token_id: int,
        tokenizer: Any = None,
        max_batch_size: int = 256,
        max_cache_tokens: int | None = None,
        logp_of: LogpOf = "sampled",
        continuous_batching: Literal["auto", "required", "off"] = "auto",
        record_decoding: bool = True,
        seed: int = 0,
        version: int = 0,
        ready: Callable[[], None] | None = None,
    ) -> None:
        for name, size in (("max_batch_size", max_batch_size), ("max_cache_tokens", max_cache_tokens)):
            if size is not None and size < 1:
                raise EngineOptionError(f"{name} must be at least 1; got {name}={size}")
        if logp_of not in {"sampled", "raw"}:
            raise EngineOptionError(f"logp_of must be 'sampled' or 'raw'; got logp_of={logp_of!r}")
        if continuous_batching not in {"auto", "required", "off"}:
            raise EngineOptionError(
                f"continuous_batching must be 'auto', 'required' or 'off'; "
                f"got continuous_batching={continuous_batching!r}"
            )
        self._support = inspect_model(model)
        check_token_ids(stop_token_ids, vocab_size=self._support.vocab_size, name="stop_token_ids")
        check_token_ids([pad_token_id], vocab_size=self._support.vocab_size, name="pad_token_id")
        self.model = model.train(mode=False)
        self._modules = list(model.named_modules())  # to walk over the model takes longer than a request may
        self.logp_of: LogpOf = logp_of
        """Which distribution the logp of its rollouts refers to."""
        self._ready = ready
        self._stop_token_ids, self._pad_token_id = tuple(stop_token_ids), pad_token_id
        self._max_batch_size = max_batch_size
        self._generator = torch.Generator().manual_seed(seed)
        self._finished: Counter[str] = Counter()
        self._turns = Turns()
        # Of all calls under way, guarded by a lock of their own, for which nobody waits as long as for a turn. Whoever
        # takes a call out ends it.
        self._lock = threading.Lock()
        self._calls: set[Call] = set()
        self._arrived: list[tuple[Call, Request]] = []
        self._dropped: list[Call] = []
        self._thread: threading.Thread | None = None
        self._step_began_s: float | None = None
        self._going = threading.Event()  # it is not paused
        self._going.set()

        # How it generates.
        slots = SlotModel(model, pad_token_id=pad_token_id, record_decoding=record_decoding)
        off = "continuous_batching='off'" if continuous_batching == "off" else None
        reason = off or why_not_continuous(slots, vocab_size=self._support.vocab_size)
        same: dict[str, Any] = {
            "max_batch_size": max_batch_size,
            "vocab_size": self._support.vocab_size,
            "logp_of": logp_of,
        }
        if reason is None:
            free = CPU_CACHE_BYTES if model.device.type != "cuda" else torch.cuda.mem_get_info(model.device)[0] // 2
            cache_tokens = max_cache_tokens or free // slots.cache.token_bytes
            self._runner: Runner = ContinuousBatching(slots, max_cache_tokens=cache_tokens, **same)
        elif continuous_batching == "required":
            raise ModelError(
                f"continuous_batching='required', but {reason}: pass 'auto' to take model.generate instead"
            )
        else:
            if off is None:
                warnings.warn(
                    f"{reason}: the engine takes model.generate instead of continuous batching, which is slower; pass "
                    f"continuous_batching='off' to agree",
                    stacklevel=2,
                )
            self._runner = WholeBatches(model, reason=reason, pad_token_id=pad_token_id, **same)
        length, cache, name = self._support.max_positions, self._runner.max_cache_tokens, "max_position_embeddings"
        if cache is not None and (length is None or cache < length):
            length, name = cache, "max_cache_tokens"
        self.limits: Limits = Limits(
            vocab_size=self._support.vocab_size, max_length=length, max_length_name=name, tokenizer=tokenizer
        )
        """What it can be asked for."""
        self.commit_version(version)

    def commit_version(self, version: int) -> None:
        """State that `model` now holds the weights of `version`; an earlier one than before is a rollback, and right.

        Answers underway go on with the new weights over the keys and values of the old; their `versions` say so.

        Raises:
            ValueError: `version` is no integer of at least 0.
        """
        check_version(version)
        with self._turns:
            self.version: int = version
            """Number of optimizer steps that the weights have seen, as last committed."""
            self._runner.commit_version(version)

    def between_steps(self) -> AbstractContextManager[None]:
        """Have the engine not generate within the block, where its weights may be changed and its version committed.

        What is under way goes on afterwards. Requests may be submitted meanwhile, and wait.
        """
        return self._turns

    def pause(self, *, mode: Literal["keep"] = "keep") -> None:
        """Stop generating until `resume`; what is under way is frozen, and what is asked for meanwhile waits.

        Returns between two steps. The keys and values of what is frozen stay: a refit meanwhile is one underway.

        Raises:
            EngineOptionError: Another mode than "keep".
        """
        if mode != "keep":
            raise EngineOptionError(f"a TransformersEngine pauses with mode='keep' alone; got mode={mode!r}")
        self._going.clear()
        with self._turns:
            pass  # the step that was under way has ended

    def resume(self) -> None:
        """Generate again."""
        self._going.set()

    @property
    def is_paused(self) -> bool:
        """Whether it is paused, by anybody."""
        return not self._going.is_set()

    # -- answers

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]) -> list[Rollout]:
        """Answer each prompt `n` times; all answers to prompt 0 come first. No prompts, no rollouts.

        Greedy and seeded answers draw nothing from the engine's generator.

        Raises:
            PromptError: Before generation: a prompt or its Sampling cannot be served.
            LogpError: The logits of a generated token are not finite.
            ModelError: The model was put into training mode.
            EngineDeadError: The engine was closed meanwhile.
        """
        with self._turns:
            self._check_weights()
            requests = make_requests(prompts, sampling, self.limits)
            call = Call(sum(request.sampling.n for request in requests))
            answers = self._rows_of(requests, call)
            # Longest first: what does not fit into memory shows at once. Equal prompts end up side by side.
            firsts = [rows[0].request for rows in answers]
            keys = [
                (-len(first.prompt) - first.sampling.max_new_tokens, -len(first.prompt), first.prompt)
                for first in firsts
            ]
            queue = [row for index in sorted(range(len(answers)), key=keys.__getitem__) for row in answers[index]]
            self._runner.add(queue)
            with self._lock:
                self._calls.add(call)
        try:
            while not call.over:
                self._advance(call)
        finally:
            with self._turns:
                if call.missing:
                    self._runner.abort(call)  # leave nothing of a call that was interrupted
            self._end([call])
        if call.error is not None:
            raise call.error
        return in_order(call.rollouts)

    def submit(self, prompt: Sequence[int], sampling: Sampling, *, seed: int) -> "Future[Rollout]":
        """Begin to answer one prompt, beside whatever is under way; from any thread.

        Sampled, it is what `generate([prompt], [sampling.for_request(seed)])` returns. A thread generates as long as
        such requests are under way. Cancelling the future aborts the request.

        Its future raises PromptError or ModelError where the request is refused, LogpError where the logits of one of
        its tokens were not finite, and EngineDeadError where the engine was closed. Any error touches no other request,
        unless the model's forward fails, which loses all.
        """
        call = SubmitCall()
        try:
            check_single(sampling)
            self._bring(call, prompt, sampling.for_request(seed))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer to this request
            return failed_request(error)
        call.future.add_done_callback(lambda future: self._drop(call) if future.cancelled() else None)
        return call.future

    async def stream(self, prompt: Sequence[int], sampling: Sampling) -> AsyncGenerator[RolloutDelta, None]:
        """Yield new tokens of the `n` answers as they come, on any event loop; closing it aborts what is unfinished.

        It raises what the future of `submit` raises. A consumer that is slower than the engine gets several tokens at
        once.
        """
        call = StreamCall(sampling.n)
        self._bring(call, prompt, sampling)
        try:
            while call.unseen:
                yield await call.next()
        finally:
            self._drop(call)

    async def abort(self) -> int:
        """Abort every call that is under way, and return how many; their answers end with reason `"abort"`."""
        return await asyncio.to_thread(self._abort_all)

    async def check_health(self, *, timeout_s: float = 60.0) -> None:
        """Return where no step is under way, or one that is younger than `timeout_s`; else raise EngineDeadError."""
        began_s = self._step_began_s
        if began_s is not None and monotonic() - began_s > timeout_s:
            raise EngineDeadError(f"the engine has been in one step for more than {timeout_s:g} s")

    # -- what people and dashboards ask

    def metrics(self) -> EngineMetrics:
        """What it is doing now, without waiting for a step to end."""
        runner = self._runner
        return EngineMetrics(
            running=len(runner.running),
            waiting=len(runner.waiting),
            **runner.counters,
            cache_usage=runner.cache_usage,
            finished=dict(self._finished),
            version=self.version,
        )

    def explain(self) -> str:
        """Say which engine this is, how it decodes, and what is special about this model. For people."""
        support = self._support
        lines = [
            f"engine: TransformersEngine over {type(self.model).__name__}, {self.model.dtype} on {self.model.device}",
            f"version: {self.version}",
            *self._runner.explain(),
            f"attention: {self.model.config.get_text_config(decoder=True)._attn_implementation}",  # noqa: SLF001
            f"limits: vocabulary {support.vocab_size}, positions {support.max_positions}, batch {self._max_batch_size}",
            f"logp: {self.logp_of}",
            f"stop tokens: {list(self._stop_token_ids)}; pad token: {self._pad_token_id}",
            *(f"quirk: {quirk}" for quirk in support.quirks),
        ]
        return "\n".join(lines)

    def close(self) -> None:
        """Drop every request, and give the cache back; the engine can go on afterwards, and be closed again.

        Requests of `submit` and `stream`, and calls of `generate` in other threads, end with EngineDeadError.
        """
        self._lose(EngineDeadError("the engine was closed while this request was under way"))
        thread = self._thread
        if thread is not None and not self._turns.mine and thread is not threading.current_thread():
            thread.join()  # it ends once no request is under way

    # -- inside

    def _bring(self, call: Call, prompt: Sequence[int], sampling: Sampling) -> None:
        """Have the engine's own thread answer a request."""
        self._check_weights()
        (request,) = make_requests([prompt], [sampling], self.limits)
        with self._lock:
            self._calls.add(call)
            self._arrived.append((call, request))
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="rl-generation requests")
                self._thread.start()

    def _drop(self, call: Call) -> None:
        """Abort what is unfinished of a call for which nobody waits any more."""
        with self._lock:
            if call in self._calls:
                self._dropped.append(call)

    def _serve(self) -> None:
        """Step as long as there are calls that do not step themselves."""
        while True:
            with self._lock:
                if all(call.steps for call in self._calls):
                    self._thread = None
                    return
            # Nobody is left to read the answers, and the interpreter waits for this thread before it ends.
            if not threading.main_thread().is_alive():
                self._lose(EngineDeadError("the program ended while this request was under way"))
            with contextlib.suppress(BaseException):  # it is raised again where the answers are taken
                self._advance()

    def _advance(self, call: Call | None = None) -> None:
        """Generate some more for all, and tell who waits for it; nothing, where `call` was served meanwhile."""
        if not self._going.wait(PAUSE_PERIOD_S):
            return
        over: list[Call] = []
        try:
            with self._turns:
                if self.is_paused or (call is not None and call.over):
                    return
                self._step_began_s = monotonic()
                try:
                    over += self._admit()
                    with self._lock:
                        streaming = any(isinstance(each, StreamCall) for each in self._calls)
                    over += self._tell(self._runner.advance(stream=streaming))
                except BaseException as error:
                    # An interrupt is this thread's own; the others only learn that their requests are lost.
                    why = f"a step was interrupted by {type(error).__name__}: the requests are lost"
                    over += self._forget(error if isinstance(error, Exception) else EngineDeadError(why))
                    raise
                finally:
                    self._step_began_s = None
        finally:
            self._end(over)

    def _admit(self) -> list[Call]:
        """Take in the requests that have arrived, and out those that were dropped; return the calls that are over."""
        with self._lock:
            arrived, self._arrived = self._arrived, []
            dropped, self._dropped = self._dropped, []
        over = [*dropped]
        for call, request in arrived:
            try:
                (rows,) = self._rows_of([request], call)
                self._runner.add(rows)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer to this request
                call.error = error
                over.append(call)
        for call in dropped:
            self._tell(self._runner.abort(call))
        return over

    def _tell(self, news: Sequence[News]) -> list[Call]:
        """Have calls know what has become of their rows; return those that are over by that."""
        over: list[Call] = []
        for row, item in news:
            if isinstance(item, RolloutDelta) and item.rollout is not None:
                self._finished[item.rollout.finish_reason] += 1
            call = row.owner
            assert isinstance(call, Call)
            call.take(item)
            if call.over:
                over.append(call)
                if call.missing:
                    self._runner.abort(call)  # the others of a call that has failed
        return over

    def _abort_all(self) -> int:
        with self._turns:
            over = self._admit()
            with self._lock:
                calls = [*self._calls]
            for call in calls:
                over += self._tell(self._runner.abort(call))
        self._end(over)
        return len(calls)

    def _lose(self, error: BaseException) -> None:
        """Drop everything that is under way, and have whoever waits for it get `error`."""
        with self._turns:
            lost = self._forget(error)
        self._end(lost)

    def _forget(self, error: BaseException) -> list[Call]:
        self._runner.clear()
        with self._lock:
            self._arrived.clear()
            lost = [*self._calls]
        for call in lost:
            if not call.over:  # else another thread is about to end it
                call.error = error
        return lost

    def _end(self, calls: Sequence[Call]) -> None:
        """Take calls that are over out of those under way, each once; not in a turn."""
        for call in calls:
            with self._lock:
                mine = call in self._calls
                self._calls.discard(call)
            if mine:
                call.end()

    def _check_weights(self) -> None:
        """Refuse to generate with torn weights, or with a model that somebody trains."""
        if self._ready is not None:
            self._ready()
        training = next((name for name, module in self._modules if module.training), None)
        if training is not None:
            raise ModelError(
                f"the engine's model is in training mode (module {training!r}): something else uses this model. "
                f"Give the engine a model of its own, or call model.eval() before generate"
            )

    def _rows_of(self, requests: Sequence[Request], owner: object) -> list[list[Row]]:
        """Return the rows of each request, `n` of them; where one is refused, none has drawn a seed."""
        answers: list[list[Row]] = []
        for request in requests:
            how = request.sampling
            stops = how.stop_token_ids if how.ignore_eos else self._stop_token_ids + how.stop_token_ids
            constraints = make_constraints(request, limits=self.limits, stop_token_ids=stops)
            answers.append(
                [
                    Row(
                        owner=owner,
                        request=request,
                        sample_index=index,
                        seed=(how.seed or 0) + index,
                        stop_token_ids=frozenset(stops),
                        constraints=each,
                    )
                    for index, each in enumerate(constraints)
                ]
            )
        for rows in answers:
            how = rows[0].request.sampling
            if how.seed is None and not how.greedy:
                seeds = torch.randint(MAX_SEED - 1, (how.n,), generator=self._generator).tolist()
                for row, seed in zip(rows, seeds, strict=True):
                    row.seed = seed
        return answers
