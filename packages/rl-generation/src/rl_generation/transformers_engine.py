"""The embedded engine: a Hugging Face model in the caller's process.

New weights are written into `model` in place by the caller, between two calls or steps, who then calls
`commit_version`; while requests of `submit` are under way, within `between_steps`.

Whoever has the turn steps for all: a caller of `generate` or `step`, or the thread that lives as long as requests of
`submit` are under way. An idle engine has no thread.

Randomness: each answer has a seed, and its token t is drawn by a number that is a function of that seed and t alone. An
answer to a seeded request therefore depends on the weights, its prompt and its Sampling; not on `max_batch_size`, on
other requests, or on when rows come and go, up to the rounding of matrix products, which differs with their shape: by
about 1e-6 in a logit of a float32 model, by enough to change drawn tokens of a bfloat16 one. Answers without a seed
take one each from the engine's generator.
"""

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, final

import torch

from rl_generation.constraints import make_constraints
from rl_generation.embedded.continuous_batching import ContinuousBatching
from rl_generation.embedded.rows import Row, Runner
from rl_generation.embedded.slot_model import SlotModel, inspect_model, why_not_continuous
from rl_generation.embedded.whole_batches import WholeBatches
from rl_generation.engine import EngineMetrics, RolloutDelta, check_single, check_version, failed_request
from rl_generation.errors import EngineDeadError, EngineOptionError, LogpError, ModelError
from rl_generation.requests import MAX_SEED, Limits, Request, Sampling, check_token_ids, make_requests
from rl_generation.rollout import LogpOf, Rollout, in_order

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CPU_CACHE_BYTES = 4 << 30

Outcome = tuple["Future[Rollout]", Rollout | BaseException]
"""A request of `submit`, and what has become of it."""


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


@dataclass(slots=True, eq=False)
class Call:
    """A call of `generate`, whose answers may come in another thread's step."""

    missing: int
    """Answers that are not there yet."""

    rollouts: list[Rollout] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def over(self) -> bool:
        """Whether there is nothing to wait for."""
        return not self.missing or self.error is not None


@final
class TransformersEngine:
    """Generates with a `transformers` causal language model, on whatever device the model is.

    Any thread may call `submit` and `generate`, at any time: all requests share the running batch. The token-wise
    methods, from `add_request` to `has_unfinished_requests`, are for one thread.

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
        ready: Called at the start of every `generate` and `add_request`; raises to refuse, as when the last refit left
            torn weights.

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
        self._calls: set[Call] = set()
        # Of submit, guarded by a lock of their own, for which nobody waits as long as for a turn. Whoever takes a
        # future out of those under way completes it; cancelled ones too, or `Future.wait` would not count them.
        self._submitting = threading.Lock()
        self._submitted: set[Future[Rollout]] = set()
        self._arrived: list[tuple[Future[Rollout], Request]] = []
        self._cancelled: list[Future[Rollout]] = []
        self._thread: threading.Thread | None = None
        # Of add_request: its requests, what the next step returns of them, and why they were lost.
        self._unfinished: Counter[str] = Counter()
        self._news: list[tuple[str, RolloutDelta]] = []
        self._lost: BaseException | None = None

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

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]) -> list[Rollout]:
        """Answer each prompt `n` times; all answers to prompt 0 come first. No prompts, no rollouts.

        Greedy and seeded answers draw nothing from the engine's generator.

        Raises:
            PromptError: Before generation: a prompt or its Sampling cannot be served.
            LogpError: The logits of a generated token are not finite.
            ModelError: The model was put into training mode.
            RuntimeError: Requests that `add_request` brought are unfinished.
        """
        with self._turns:
            if self._unfinished:
                raise RuntimeError(
                    f"generate was called while {len(self._unfinished)} requests of add_request are unfinished: step "
                    f"until has_unfinished_requests() is False, or abort them"
                )
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
            self._calls.add(call)
        try:
            while not call.over:
                self._advance(call)
            if call.error is not None:
                raise call.error
        finally:
            with self._turns:
                self._calls.discard(call)
                if call.missing:
                    self._runner.abort(call)  # leave nothing of a call that failed
        return in_order(call.rollouts)

    # -- one request at a time

    def submit(self, prompt: Sequence[int], sampling: Sampling, *, seed: int) -> "Future[Rollout]":
        """Begin to answer one prompt, beside whatever is under way; from any thread.

        Sampled, it is what `generate([prompt], [sampling.for_request(seed)])` returns. A thread generates as long as
        such requests are under way. Cancelling the future aborts the request.

        Its future raises PromptError or ModelError where the request is refused, LogpError where the logits of one of
        its tokens were not finite, and EngineDeadError where the engine was closed. Any error touches no other request,
        unless the model's forward fails, which loses all.
        """
        try:
            self._check_weights()
            check_single(sampling)
            (request,) = make_requests([prompt], [sampling.for_request(seed)], self.limits)
            future: Future[Rollout] = Future()
            with self._submitting:
                self._submitted.add(future)
                self._arrived.append((future, request))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._serve, name="rl-generation submitted")
                    self._thread.start()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer to this request
            return failed_request(error)

        def notice_cancelled(done: "Future[Rollout]") -> None:
            if done.cancelled():
                with self._submitting:
                    self._cancelled.append(done)

        future.add_done_callback(notice_cancelled)
        return future

    # -- a token at a time

    def add_request(self, request_id: str, prompt: Sequence[int], sampling: Sampling) -> None:
        """Take a request in.

        Raises:
            ValueError: A request of this id is unfinished.
            PromptError: As `generate`.
            ModelError: As `generate`.
        """
        with self._turns:
            if request_id in self._unfinished:
                raise ValueError(f"request_id={request_id!r} is of a request that is unfinished: give each its own")
            self._check_weights()
            (rows,) = self._rows_of(make_requests([prompt], [sampling], self.limits), request_id)
            self._unfinished[request_id] = len(rows)
            self._runner.add(rows)

    def step(self) -> list[tuple[str, RolloutDelta]]:
        """Generate the next tokens of what is running, and return them with the ids of their requests.

        Raises:
            LogpError: The logits of a generated token are not finite; every request of `add_request` is lost.
        """
        if not self._news and self._lost is None:
            self._advance()
        with self._turns:
            lost, self._lost = self._lost, None
            if lost is not None:
                raise lost
            news, self._news = self._news, []
        return news

    def abort_request(self, request_id: str) -> None:
        """End a request: the next step returns its answers as they are, with finish reason `"abort"`.

        A request that is unknown, or has finished, stays as it is.
        """
        with self._turns:
            for item in self._runner.abort(request_id):
                self._route(*item)

    def has_unfinished_requests(self) -> bool:
        """Whether a step has something to do."""
        return bool(self._unfinished or self._news or self._lost)

    # -- what people and dashboards ask

    def metrics(self) -> EngineMetrics:
        """What it is doing now."""
        runner = self._runner
        with self._turns:
            return EngineMetrics(
                time_s=monotonic(),
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

        Requests of `submit` and calls of `generate` in other threads end with EngineDeadError.
        """
        with self._turns:
            self._lose(EngineDeadError("the engine was closed while this request was under way"))
            self._lost = None
        thread = self._thread
        if thread is not None and not self._turns.mine and thread is not threading.current_thread():
            thread.join()  # it ends once no request is under way

    # -- inside: all of it in a turn, `_serve`, `_advance` and `_settle` excepted

    def _serve(self) -> None:
        """Step as long as requests of `submit` are under way."""
        while True:
            with self._submitting:
                if not self._submitted:
                    self._thread = None
                    return
            # Nobody is left to read the answers, and the interpreter waits for this thread before it ends.
            if not threading.main_thread().is_alive():
                self._fail_submitted(EngineDeadError("the program ended while this request was under way"))
                continue
            try:
                self._advance()
            except BaseException as error:  # noqa: BLE001 - raised again where the answers are taken
                self._fail_submitted(error)

    def _advance(self, call: Call | None = None) -> None:
        """Generate some more for all, and tell who waits for it; nothing, where `call` was served meanwhile."""
        with self._turns:
            if call is not None and call.over:
                return
            outcomes = self._admit()
            try:
                news = self._runner.advance(stream=bool(self._unfinished))
            except BaseException as error:
                # An interrupt is this thread's own; the others only learn that their requests are lost.
                interrupt = EngineDeadError(f"a step was interrupted by {type(error).__name__}: the requests are lost")
                self._lose(error if isinstance(error, Exception) else interrupt)
                raise
            for item in news:
                outcomes += self._route(*item)
        for outcome in outcomes:
            self._settle(*outcome)

    def _admit(self) -> list[Outcome]:
        """Take in the requests of `submit` that have arrived, and out those that were cancelled."""
        with self._submitting:
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
        outcomes: list[Outcome] = []
        for future, request in arrived:
            try:
                (rows,) = self._rows_of([request], future)
                self._runner.add(rows)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer to this request
                outcomes.append((future, error))
        for future in cancelled:
            for item in self._runner.abort(future):
                self._route(*item)
            outcomes.append((future, CancelledError()))
        return outcomes

    def _route(self, row: Row, news: RolloutDelta | LogpError) -> list[Outcome]:
        """Note what has become of a row where its owner finds it, or return it where that is a future."""
        owner, rollout = row.owner, None if isinstance(news, LogpError) else news.rollout
        if rollout is not None:
            self._finished[rollout.finish_reason] += 1
        if isinstance(owner, str):
            if isinstance(news, LogpError):
                self._lose_stepwise(news)
            elif owner in self._unfinished:
                self._news.append((owner, news))
                self._unfinished[owner] -= rollout is not None
                if not self._unfinished[owner]:
                    del self._unfinished[owner]
            return []
        result = news if isinstance(news, LogpError) else rollout
        if result is None:
            return []  # it goes on, and nobody asked for its tokens one by one
        if isinstance(owner, Future):
            return [(owner, result)]
        assert isinstance(owner, Call)
        if isinstance(result, Rollout):
            owner.rollouts.append(result)
            owner.missing -= 1
        else:
            owner.error = owner.error or result
        return []

    def _settle(self, future: "Future[Rollout]", result: Rollout | BaseException) -> None:
        """Complete a future; not in a turn, for its callbacks may do anything."""
        with self._submitting:
            mine = future in self._submitted
            self._submitted.discard(future)
        if not mine or not future.set_running_or_notify_cancel():
            return
        if isinstance(result, Rollout):
            future.set_result(result)
        else:
            future.set_exception(result)

    def _fail_submitted(self, error: BaseException) -> None:
        """End all requests of `submit`; the engine has forgotten them, or is about to."""
        with self._submitting:
            lost = list(self._submitted)
            self._arrived.clear()
        for future in lost:
            self._settle(future, error)

    def _lose_stepwise(self, error: BaseException) -> None:
        """Drop the requests of `add_request`; the next `step` raises `error`."""
        for request_id in self._unfinished:
            self._runner.abort(request_id)
        self._unfinished.clear()
        self._news.clear()
        self._lost = error

    def _lose(self, error: BaseException) -> None:
        """Drop everything that is under way, and have whoever waits for it get `error`."""
        self._runner.clear()
        if self._unfinished:
            self._lose_stepwise(error)
        self._news.clear()
        for call in self._calls:
            call.error = error
        self._calls.clear()
        self._fail_submitted(error)

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
