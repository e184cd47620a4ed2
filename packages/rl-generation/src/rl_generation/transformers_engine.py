"""The embedded engine: a Hugging Face model in the caller's process.

Does not know text beyond stop strings and bad words, rewards or training; how new weights arrive is its caller's
affair, who writes them into `model` between two calls or steps and says so with `commit_version`.

Randomness: each answer has a seed, and its token t is drawn by a number that is a function of that seed and t alone. An
answer to a seeded request therefore depends on the weights, its prompt and its Sampling; not on `max_batch_size`, on
other requests, or on when rows come and go, up to the rounding of matrix products, which differs with their shape by
about 1e-6 in a logit. Answers without a seed take one each from the engine's generator.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from rl_generation.embedded.choice import ContinuousBatchingChoice, make_runner
from rl_generation.embedded.inspection import inspect_model
from rl_generation.embedded.rows import Row, make_rows, make_texts
from rl_generation.embedded.runner import Progress
from rl_generation.engine import EngineMetrics, RolloutDelta
from rl_generation.errors import EngineOptionError, ModelError
from rl_generation.requests import Limits, Request, check_token_ids, make_requests
from rl_generation.rollout import LogpOf, Rollout, in_order
from rl_generation.sampling import MAX_SEED, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["TransformersEngine"]


@final
class TransformersEngine:
    """Generates with a `transformers` causal language model, on whatever device the model is. One thread at a time.

    Args:
        model: Has its own weights, which nothing else trains or uses. The engine switches it to eval mode.
        stop_token_ids: Tokens that end an answer unless `ignore_eos`; may be empty.
        pad_token_id: Any id of the vocabulary; fills shorter prompts, where nothing sees it.
        tokenizer: Of the model; needed for stop strings and bad words only.
        max_batch_size: Rows decoded together at most; more is faster until the cache fills the memory.
        max_cache_tokens: Tokens that the key/value cache holds at most, of all rows together, empty ends of rows
            included; None takes half of the free memory of a CUDA device, and 4 GiB elsewhere.
        logp_of: Which distribution logp refer to; see `LogpOf`.
        continuous_batching: Whether finished rows are replaced underway. Models that it cannot serve (recurrent states,
            attention outside of transformers' interface) are generated with by `model.generate`, after a warning;
            `"required"` refuses them, `"off"` generates with any model so.
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
        continuous_batching: ContinuousBatchingChoice = "auto",
        seed: int = 0,
        version: int = 0,
        ready: Callable[[], None] | None = None,
    ) -> None:
        _check_sizes(max_batch_size=max_batch_size, max_cache_tokens=max_cache_tokens)
        _check_choices(logp_of=logp_of, continuous_batching=continuous_batching)
        self._support = inspect_model(model)
        check_token_ids(stop_token_ids, vocab_size=self._support.vocab_size, name="stop_token_ids")
        check_token_ids([pad_token_id], vocab_size=self._support.vocab_size, name="pad_token_id")
        self.model = model.train(mode=False)
        self._tokenizer, self._ready, self._logp_of = tokenizer, ready, logp_of
        self._stop_token_ids, self._pad_token_id = tuple(stop_token_ids), pad_token_id
        self._max_batch_size = max_batch_size
        self._generator = torch.Generator().manual_seed(seed)
        self._finished: Counter[str] = Counter()
        self._unfinished: Counter[str] = Counter()
        self._aborted: list[Progress] = []
        self._version = _checked_version(version)
        self._runner = make_runner(
            model,
            support=self._support,
            choice=continuous_batching,
            pad_token_id=pad_token_id,
            max_batch_size=max_batch_size,
            max_cache_tokens=max_cache_tokens,
            logp_of=logp_of,
            version=version,
        )

    @property
    def version(self) -> int:
        """Number of optimizer steps that the weights have seen, as last committed."""
        return self._version

    @property
    def logp_of(self) -> LogpOf:
        """Which distribution the logp of its rollouts refers to."""
        return self._logp_of

    @property
    def limits(self) -> Limits:
        """What it can be asked for."""
        positions, cache = self._support.max_positions, self._runner.max_cache_tokens
        if cache is not None and (positions is None or cache < positions):
            return Limits(
                vocab_size=self._support.vocab_size,
                max_length=cache,
                max_length_name="max_cache_tokens",
                tokenizer=self._tokenizer,
            )
        return Limits(vocab_size=self._support.vocab_size, max_length=positions, tokenizer=self._tokenizer)

    def commit_version(self, version: int) -> None:
        """State that `model` now holds the weights of `version`; an earlier one than before is a rollback, and right.

        Answers underway go on with the new weights over the keys and values of the old; their `versions` say so.

        Raises:
            ValueError: `version` is negative.
        """
        self._version = _checked_version(version)
        self._runner.commit_version(version)

    def get_rng_state(self) -> Tensor:
        """The state of the generator behind unseeded answers, uint8, for `set_rng_state`."""
        return self._generator.get_state()

    def set_rng_state(self, state: Tensor) -> None:
        """Go on drawing as the engine did when `get_rng_state` gave `state`."""
        self._generator.set_state(state)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]) -> list[Rollout]:
        """Answer each prompt `n` times; all answers to prompt 0 come first. No prompts, no rollouts.

        Greedy and seeded answers draw nothing from the engine's generator.

        Raises:
            PromptError: Before generation: a prompt or its Sampling cannot be served.
            LogpError: The logits of a generated token are not finite.
            ModelError: The model was put into training mode.
            RuntimeError: Requests that `add_request` brought are unfinished.
        """
        if self.has_unfinished_requests():
            raise RuntimeError(
                f"generate was called while {len(self._unfinished)} requests of add_request are unfinished: step until "
                f"has_unfinished_requests() is False, or abort them"
            )
        self._refuse_unready()
        requests = make_requests(prompts, sampling, self.limits)
        answers = list(zip(requests, self._rows("", requests), strict=True))
        # Longest first: what does not fit into memory shows at once. Equal prompts end up side by side.
        answers.sort(key=lambda answer: (-answer[1][0].longest, -len(answer[0].prompt), answer[0].prompt))
        rollouts: list[Rollout] = []
        with self._clearing():
            self._runner.add(list(chain.from_iterable(rows for _, rows in answers)))
            while self._runner.running or self._runner.waiting:
                rollouts += self._ended(self._runner.advance(stream=False))
        return in_order(rollouts)

    # -- a token at a time

    def add_request(self, request_id: str, prompt: Sequence[int], sampling: Sampling) -> None:
        """Take a request in.

        Raises:
            ValueError: A request of this id is unfinished.
            PromptError: As `generate`.
            ModelError: As `generate`.
        """
        if request_id in self._unfinished:
            raise ValueError(f"request_id={request_id!r} is of a request that is unfinished: give each its own")
        self._refuse_unready()
        (request,) = make_requests([prompt], sampling, self.limits)
        (rows,) = self._rows(request_id, [request])
        self._unfinished[request_id] = len(rows)
        self._runner.add(rows)

    def step(self) -> list[tuple[str, RolloutDelta]]:
        """Generate the next tokens of what is running, and return them with the ids of their requests.

        Raises:
            LogpError: The logits of a generated token are not finite; every request is lost.
        """
        aborted, self._aborted = self._aborted, []
        with self._clearing():
            news = [*aborted, *self._runner.advance(stream=True)]
        for item in news:
            if item.rollout is not None:
                self._unfinished[item.row.request_id] -= 1
                if not self._unfinished[item.row.request_id]:
                    del self._unfinished[item.row.request_id]
        self._ended(news)
        return [
            (
                item.row.request_id,
                RolloutDelta(
                    sample_index=item.row.sample_index, tokens=item.tokens, logp=item.logp, rollout=item.rollout
                ),
            )
            for item in news
        ]

    def abort_request(self, request_id: str) -> None:
        """End a request: the next step returns its answers as they are, with finish reason `"abort"`.

        A request that is unknown, or has finished, stays as it is.
        """
        self._aborted += self._runner.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether a step has something to do."""
        return bool(self._unfinished)

    # -- what people and dashboards ask

    def metrics(self) -> EngineMetrics:
        """What it is doing now."""
        runner = self._runner
        return EngineMetrics(
            time_s=monotonic(),
            running=runner.running,
            waiting=runner.waiting,
            prompt_tokens=runner.counters.prompt_tokens,
            cached_prompt_tokens=runner.counters.cached_prompt_tokens,
            generated_tokens=runner.counters.generated_tokens,
            preemptions=runner.counters.preemptions,
            cache_usage=runner.cache_usage,
            finished=dict(self._finished),
            version=self._version,
        )

    def explain(self) -> str:
        """Say which engine this is, how it decodes, and what is special about this model. For people."""
        support = self._support
        lines = [
            f"engine: TransformersEngine over {type(self.model).__name__}, {self.model.dtype} on {self.model.device}",
            f"version: {self._version}",
            *self._runner.explain(),
            f"attention: {support.attention}",
            f"limits: vocabulary {support.vocab_size}, positions {support.max_positions}, batch {self._max_batch_size}",
            f"logp: {self._logp_of}",
            f"stop tokens: {list(self._stop_token_ids)}; pad token: {self._pad_token_id}",
            *(f"quirk: {quirk}" for quirk in support.quirks),
        ]
        return "\n".join(lines)

    def close(self) -> None:
        """Drop every request, and give the cache back; the engine can go on afterwards, and be closed again."""
        self._forget()

    # -- inside

    def _rows(self, request_id: str, requests: Sequence[Request]) -> list[list[Row]]:
        """Return the answers of each request; where one is refused, none has drawn a seed."""
        vocab_size = self._support.vocab_size
        texts = [make_texts(request, tokenizer=self._tokenizer, vocab_size=vocab_size) for request in requests]
        return [
            make_rows(
                request_id,
                request,
                texts=read,
                seeds=self._seeds(request.sampling),
                stop_token_ids=self._stop_token_ids,
            )
            for request, read in zip(requests, texts, strict=True)
        ]

    def _seeds(self, sampling: Sampling) -> list[int]:
        if sampling.greedy:
            return [0] * sampling.n
        if sampling.seed is not None:
            return [sampling.seed + index for index in range(sampling.n)]
        seeds: list[int] = torch.randint(MAX_SEED - 1, (sampling.n,), generator=self._generator).tolist()
        return seeds

    def _ended(self, news: Sequence[Progress]) -> list[Rollout]:
        rollouts = [item.rollout for item in news if item.rollout is not None]
        self._finished.update(rollout.finish_reason for rollout in rollouts)
        return rollouts

    @contextmanager
    def _clearing(self) -> Iterator[None]:
        """Leave nothing of a call that failed."""
        try:
            yield
        except BaseException:
            self._forget()
            raise

    def _forget(self) -> None:
        self._runner.clear()
        self._unfinished.clear()
        self._aborted.clear()

    def _refuse_unready(self) -> None:
        if self._ready is not None:
            self._ready()
        training = next((name for name, module in self.model.named_modules() if module.training), None)
        if training is not None:
            raise ModelError(
                f"the engine's model is in training mode (module {training!r}): something else uses this model. "
                f"Give the engine a model of its own, or call model.eval() before generate"
            )


def _check_sizes(**sizes: int | None) -> None:
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise EngineOptionError(f"{name} must be at least 1; got {name}={value}")


def _check_choices(*, logp_of: str, continuous_batching: str) -> None:
    if logp_of not in {"sampled", "raw"}:
        raise EngineOptionError(f"logp_of must be 'sampled' or 'raw'; got logp_of={logp_of!r}")
    if continuous_batching not in {"auto", "required", "off"}:
        raise EngineOptionError(
            f"continuous_batching must be 'auto', 'required' or 'off'; got continuous_batching={continuous_batching!r}"
        )


def _checked_version(version: int) -> int:
    if version < 0:
        raise ValueError(f"a version counts optimizer steps and is at least 0; got version={version}")
    return version
