"""What an engine is called with: a `Sampling`, the engine's `Limits`, and the `Request`s checked against them.

Everything here is checked before anything runs.
"""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

from rl_generation.errors import PromptError

MAX_SEED = 2**63
MIN_TEMPERATURE = 0.01
"""Below it, and above 0, vLLM puts this value in place of the one that was asked for; every engine refuses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BasicSampling:
    """What requests and the recipes of training runs alike say of how a response is sampled."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    max_new_tokens: int
    """Length limit of a response in tokens, its stop token included; longer ones are cut off and count as truncated."""

    temperature: float = 1.0
    """Divides the logits: below 1 the likely becomes likelier, above 1 rarer; 0 is greedy, whatever the cuts below."""

    top_p: float = 1.0
    """Draw from the likeliest tokens that together reach this probability (nucleus); 1 draws from all of them."""

    top_k: int = 0
    """Draw from this many likeliest tokens, and those tied with the last of them; 0 draws from all of them."""

    min_p: float = 0.0
    """Draw from the tokens at least this likely relative to the likeliest one; 0 draws from all of them."""

    min_new_tokens: int = 0
    """No stop token ends a response before it has this many tokens; 0 is off. Not beside `stop` strings."""

    stop: tuple[str, ...] = ()
    """Strings that end a response as soon as its text holds one; the tokens that completed it are kept. Asks for a
    tokenizer."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, besides the engine's own; a response includes the one that ended it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(BasicSampling):
    """How the answers to a prompt are sampled, in every engine alike.

    First `logit_bias` is added; then tokens that would end a bad word, break the grammar or end the response too early
    are excluded; then the penalties apply; then logits are divided by the temperature, then cut by min-p, by top-k and
    by top-p, in this order, which is vLLM's.
    """

    n: int = 1
    """Answers to each prompt, which share its prefill where the engine can; sample j of them draws with `seed + j`."""

    bad_words: tuple[str, ...] = ()
    """Words whose last token is never drawn where it would complete one. Asks for a tokenizer."""

    ignore_eos: bool = False
    """True generates past the engine's own stop tokens; `stop_token_ids` and `stop` still end an answer."""

    seed: int | None = None
    """Makes answers repeatable whatever was generated before; None continues the engine's running generator."""

    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the response holds already; 0 is off."""

    frequency_penalty: float = 0.0
    """Subtracted from a token's logit as often as the response holds the token; 0 is off."""

    repetition_penalty: float = 1.0
    """Divides the positive logit of each token that the prompt or the response holds, and multiplies a negative one;
    1 is off (Keskar et al., arXiv:1909.05858)."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and what is added to its logit, -inf to exclude it; a mapping is taken too."""

    json_schema: str | None = None
    """JSON text of a schema that the response follows; tokens that would break it are excluded. Asks for a tokenizer
    and a stop token, and on the embedded engine for llguidance."""

    regex: str | None = None
    """A regular expression that the whole response matches; as `json_schema`, and one of the two at most."""

    top_logp: int = 0
    """The rollout also reports the logp of this many likeliest tokens at each place; see `Rollout.top_logp`."""

    def __post_init__(self) -> None:
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", tuple(self.logit_bias.items()))
        for name in ("stop_token_ids", "stop", "bad_words", "logit_bias"):
            if isinstance(getattr(self, name), list):  # else it could not be hashed, and be changed behind our back
                object.__setattr__(
                    self, name, tuple(tuple(each) if isinstance(each, list) else each for each in getattr(self, name))
                )
        for name, least in (("max_new_tokens", 1), ("n", 1), ("top_k", 0), ("min_new_tokens", 0), ("top_logp", 0)):
            count = getattr(self, name)
            if not _is_count(count) or count < least:
                off = "" if least else " (0 is off)"
                raise ValueError(f"{name} must be an integer of at least {least}{off}; got {name}={count!r}")
        stops, pairs, seed, least = self.stop_token_ids, self.logit_bias, self.seed, self.min_new_tokens
        grammars = [each for each in (self.json_schema, self.regex) if each is not None]
        checks: dict[str, tuple[bool, str]] = {
            # The distribution.
            "temperature": (
                self.temperature == 0.0 or MIN_TEMPERATURE <= self.temperature < math.inf,
                f"0 (greedy) or finite and at least {MIN_TEMPERATURE}",
            ),
            "top_p": (0.0 < self.top_p <= 1.0, "in (0, 1] (1 is off)"),
            "min_p": (0.0 <= self.min_p <= 1.0, "in [0, 1] (0 is off)"),
            # What ends a response, and what may not be in it.
            "stop_token_ids": (
                isinstance(stops, tuple) and all(_is_count(token) for token in stops),
                "a tuple of token ids, 0 or more",
            ),
            "stop": (_are_words(self.stop), "a tuple of strings that are not empty, as stop=('END',)"),
            "bad_words": (_are_words(self.bad_words), "a tuple of strings that are not empty, as bad_words=('END',)"),
            "min_new_tokens": (
                least <= self.max_new_tokens and not (least and self.stop),
                f"at most max_new_tokens={self.max_new_tokens}, and 0 beside stop={self.stop!r}: use stop_token_ids",
            ),
            # What is done to logits before the temperature.
            "presence_penalty": (-2.0 <= self.presence_penalty <= 2.0, "in [-2, 2] (0 is off)"),
            "frequency_penalty": (-2.0 <= self.frequency_penalty <= 2.0, "in [-2, 2] (0 is off)"),
            "repetition_penalty": (0.0 < self.repetition_penalty <= 10.0, "in (0, 10] (1 is off)"),
            "logit_bias": (
                isinstance(pairs, tuple) and all(map(_is_bias, pairs)) and len(dict(pairs)) == len(pairs),
                "pairs of a token id, 0 or more, and a number below infinity, with each token once",
            ),
            "json_schema": (self.json_schema is None or _are_words((self.json_schema,)), "None or a text, not empty"),
            "regex": (
                len(grammars) < 2 and (self.regex is None or _are_words((self.regex,))),
                "None or a text, not empty, and None beside a json_schema: a response follows one grammar",
            ),
            "seed": (
                seed is None or (_is_count(seed) and seed <= MAX_SEED - self.n),
                f"None or an integer of at least 0 with seed + n <= 2**63, for n={self.n}",
            ),
        }
        for name, (holds, wanted) in checks.items():
            if not holds:
                raise ValueError(f"{name} must be {wanted}; got {name}={getattr(self, name)!r:.200}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0

    @property
    def constrained(self) -> bool:
        """Whether the distribution of a token depends on more than the model's logits and the cuts of this class."""
        return bool(
            self.bad_words
            or self.logit_bias
            or self.min_new_tokens
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.json_schema
            or self.regex
        )

    def spread(self, count: int) -> "list[Sampling]":
        """Return one Sampling for each of `count` prompts, whose seeds differ; the first is this one itself.

        This is what a single Sampling for many prompts means: without it, two equal prompts would get equal answers.
        """
        if self.seed is None:
            return [self] * count
        return [self._of_prompt(index) for index in range(count)]

    def for_request(self, seed: int) -> "Sampling":
        """Return the Sampling of one request of many, which has a seed of its own.

        A Sampling without a seed takes it; of one that has a seed, it is that of prompt number `seed` of `spread`, so
        that equal prompts get different answers here too. A greedy one stays as it is.
        """
        if self.greedy:
            return self
        return replace(self, seed=seed) if self.seed is None else self._of_prompt(seed)

    def _of_prompt(self, index: int) -> "Sampling":
        if self.seed is None or index == 0:
            return self
        # splitmix64's finaliser (Steele et al. 2014): the bits of any two indices differ in about half of them.
        bits = index * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        bits ^= bits >> 31
        return replace(self, seed=(self.seed ^ bits) % (MAX_SEED - self.n + 1))


Prompt = tuple[int, ...]
"""Token ids."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an engine can be asked for."""

    vocab_size: int
    """Every token id is below."""

    max_length: int | None
    """Tokens of a prompt and its answer together; None where the engine knows no limit."""

    max_length_name: str = "max_position_embeddings"
    """Where that limit comes from, for messages."""

    tokenizer: Any = None
    """The tokenizer behind stop strings and bad words; None where the engine was made without one."""

    prefill_chunk: int | None = None
    """Tokens of a prompt that one forward takes; longer ones are prefilled in pieces. None where none is."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how to answer it; `sampling.n` answers are wanted."""

    prompt: Prompt
    sampling: Sampling
    prompt_index: int = 0
    """Place of the prompt in the call."""

    sample_index: int = 0
    """Which of the prompt's answers the first of these is, where somebody asks for each by itself."""


def make_requests(
    prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling], limits: Limits
) -> list[Request]:
    """Pair each prompt with its Sampling, or raise naming the first bad one and its values.

    One Sampling for all prompts is spread over them (`Sampling.spread`), so that equal prompts get different answers;
    a sequence of them is taken as it is, and each request then depends on its own prompt and Sampling alone.

    Raises:
        PromptError: A prompt is empty, too long, or outside the vocabulary; its stop tokens are outside; it needs a
            tokenizer that is missing; or there are not as many Samplings as prompts.
    """
    samplings: list[Any] = sampling.spread(len(prompts)) if isinstance(sampling, Sampling) else list(sampling)
    if not all(isinstance(each, Sampling) for each in samplings):
        raise PromptError(f"sampling must be a Sampling, or a sequence with one for each prompt; got {sampling!r:.100}")
    if len(samplings) != len(prompts):
        raise PromptError(
            f"a sequence of Sampling holds one for each prompt; got {len(samplings)} for {len(prompts)} prompts"
        )
    requests: list[Request] = []
    given: Any
    for index, (given, each) in enumerate(zip(prompts, samplings, strict=True)):
        # The prompt is a sequence of token ids, all of them in the vocabulary.
        if isinstance(given, str):
            raise PromptError(
                f"prompt {index} is text, {given!r:.60}, and engines take token ids: encode_text(tokenizer, text) or "
                f"encode_chat(tokenizer, messages) makes them"
            )
        if isinstance(given, int):
            raise PromptError(
                f"prompt {index} is the number {given}; prompts are a list of lists of token ids: [[5, 6, 7]]"
            )
        try:
            prompt: Prompt = tuple(map(operator.index, given))
        except TypeError as error:
            raise PromptError(f"prompt {index} must be a sequence of integer token ids; {error}") from None
        if not prompt:
            raise PromptError(f"prompt {index} is empty: a model continues at least one token, such as the bos token")
        if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
            position, token = next((p, t) for p, t in enumerate(prompt) if not 0 <= t < limits.vocab_size)
            raise PromptError(
                f"prompt {index} has token id {token} at position {position}; "
                f"the model's vocabulary is [0, {limits.vocab_size}): is this the model's own tokenizer?"
            )
        # The longest response fits behind it.
        if limits.max_length is not None and len(prompt) + each.max_new_tokens > limits.max_length:
            room = limits.max_length - len(prompt)
            remedy = f"or lower max_new_tokens to {room} or less" if room > 0 else "which leaves no room for an answer"
            raise PromptError(
                f"prompt {index} has {len(prompt)} tokens, and with max_new_tokens={each.max_new_tokens} passes the "
                f"model's {limits.max_length_name}={limits.max_length}: shorten the prompt, {remedy}"
            )
        # Stop tokens are in the vocabulary too, and text is only asked for where a tokenizer can read it.
        if each.stop_token_ids:
            check_token_ids(each.stop_token_ids, vocab_size=limits.vocab_size, name="stop_token_ids")
        if each.logit_bias:
            check_token_ids([token for token, _ in each.logit_bias], vocab_size=limits.vocab_size, name="logit_bias")
        for name in ("stop", "bad_words", "json_schema", "regex"):
            if getattr(each, name) and limits.tokenizer is None:
                raise PromptError(
                    f"prompt {index} asks for {name}={getattr(each, name)!r}, which is text, and the engine has no "
                    f"tokenizer: make it with tokenizer=…, or use stop_token_ids"
                )
        requests.append(Request(prompt=prompt, sampling=each, prompt_index=index))
    return requests


def _is_count(value: object) -> bool:
    """Whether it is an integer of at least 0; True is an int to Python, and no count."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_bias(pair: Any) -> bool:
    if not (isinstance(pair, tuple) and len(pair) == 2 and _is_count(pair[0])):
        return False
    return isinstance(pair[1], int | float) and pair[1] < math.inf


def _are_words(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(word, str) and word for word in value)


def check_token_ids(token_ids: Iterable[int], *, vocab_size: int, name: str) -> None:
    """Raise PromptError where one of `token_ids` is no row of the embedding; `name` says whose they are."""
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise PromptError(f"{name} must hold ids in [0, {vocab_size}), the model's vocabulary; got {token}")
