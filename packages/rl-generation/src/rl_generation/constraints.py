"""What a request does to the logits of its response beside temperature and cuts, token by token.

    z' = z + bias                                 then -inf where a bad word, the grammar or `min_new_tokens` excludes
    z' = z' / r if z' > 0 else z' r               of tokens in the prompt or the response (r is `repetition_penalty`)
    z' = z' - frequency count - presence          of tokens in the response

The order is vLLM's. A bad word is banned as it reads at the start of a text and, with a space before it, inside one;
only its last token is ever excluded, where those before it are what the response ends with. Grammars, JSON schemas and
regular expressions, are llguidance's (github.com/guidance-ai/llguidance), as in vLLM and SGLang.
Reference: vLLM's `SamplingParams.update_from_tokenizer` and its sampler (github.com/vllm-project/vllm).
"""

import json
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rl_generation.detokenizer import StopStrings
from rl_generation.errors import EngineOptionError, PromptError
from rl_generation.requests import Limits, Request, Sampling, check_token_ids

BadWords = tuple[tuple[int, ...], ...]


class Constraints:
    """What restricts one response, and the text that it is searched for.

    `grammar` is llguidance's matcher of the response's grammar; None where there is none.
    """

    def __init__(
        self, request: Request, limits: Limits, *, bad_words: BadWords, grammar: Any, stop_token_ids: Sequence[int]
    ) -> None:
        self._sampling: Sampling = request.sampling
        self._bad_words, self._grammar, self._stop_token_ids = bad_words, grammar, list(stop_token_ids)
        stop = request.sampling.stop
        self._stop = StopStrings(stop, limits.tokenizer, request.prompt) if stop else None
        self._prompt = sorted(set(request.prompt))
        self._tokens: list[int] = []
        self._counts: Counter[int] = Counter()

    def adjust(self, logits: Tensor) -> Tensor:
        """Return float32 logits [V] of the next token, -inf where it is excluded, from the model's own."""
        how, changed = self._sampling, logits.float().clone()
        if how.logit_bias:
            tokens, biases = zip(*how.logit_bias, strict=True)
            changed[list(tokens)] += torch.tensor(biases, device=changed.device)
        if self._grammar is not None:
            changed = changed.masked_fill(~self._admitted(changed), -torch.inf)
        banned = banned_next(self._bad_words, self._tokens)
        if len(self._tokens) < how.min_new_tokens:
            banned += self._stop_token_ids
        if banned:
            changed[banned] = -torch.inf
        seen = list(self._counts)
        if how.repetition_penalty != 1.0:
            repeated = sorted({*self._prompt, *seen})
            values = changed[repeated]
            changed[repeated] = torch.where(
                values > 0, values / how.repetition_penalty, values * how.repetition_penalty
            )
        if seen and (how.presence_penalty or how.frequency_penalty):
            counts = torch.tensor([self._counts[token] for token in seen], device=changed.device)
            changed[seen] -= how.frequency_penalty * counts + how.presence_penalty
        return changed

    def push(self, token: int, *, is_stop_token: bool) -> str | None:
        """Take the next token; return the stop string that it completed."""
        self._tokens.append(token)
        self._counts[token] += 1
        if self._grammar is not None and not is_stop_token and not self._grammar.is_stopped():
            self._grammar.consume_token(token)
        return None if self._stop is None or is_stop_token else self._stop.push(token)

    def _admitted(self, logits: Tensor) -> Tensor:
        """Which tokens [V] the grammar admits: its own, and the stop tokens once the text is complete."""
        complete = self._grammar.is_accepting()
        admitted = torch.zeros(len(logits), dtype=torch.bool)
        if not self._grammar.is_stopped():
            packed = torch.frombuffer(bytearray(self._grammar.compute_bitmask()), dtype=torch.uint8)
            bits = (packed[:, None] >> torch.arange(8) & 1).bool().reshape(-1)[: len(logits)]
            admitted[: len(bits)] = bits
        admitted[self._stop_token_ids] = complete or self._grammar.is_stopped()
        return admitted.to(logits.device)


def make_constraints(request: Request, *, limits: Limits, stop_token_ids: Sequence[int]) -> list[Constraints | None]:
    """Return the constraints of each of the `n` responses to a request; None where it has none.

    Raises:
        PromptError: A bad word has no tokens, or tokens that the model does not have; the grammar is none that
            llguidance serves; or there is one, and no stop token could end the response.
        EngineOptionError: There is a grammar, and llguidance is not installed.
    """
    sampling = request.sampling
    if not (sampling.stop or sampling.constrained):
        return [None] * sampling.n
    bad_words = encode_bad_words(sampling.bad_words, limits.tokenizer, vocab_size=limits.vocab_size)
    grammar = None
    if sampling.json_schema or sampling.regex:
        if not stop_token_ids:
            raise PromptError(
                f"prompt {request.prompt_index} asks for a grammar, and no stop token could end its response: leave "
                f"out ignore_eos, or give stop_token_ids"
            )
        grammar = _grammar(request, limits, end_token=stop_token_ids[0])
    return [
        Constraints(
            request,
            limits,
            bad_words=bad_words,
            grammar=None if grammar is None else grammar.deep_copy(),
            stop_token_ids=stop_token_ids,
        )
        for _ in range(sampling.n)
    ]


def _grammar(request: Request, limits: Limits, *, end_token: int) -> Any:
    """Return llguidance's matcher of a response's grammar, at its beginning."""
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise EngineOptionError(
            "json_schema and regex need llguidance: pip install 'rl-generation[server]', or llguidance alone"
        ) from None
    sampling = request.sampling
    name = "json_schema" if sampling.json_schema is not None else "regex"
    try:
        if sampling.json_schema is not None:
            grammar = LLMatcher.grammar_from_json_schema(json.loads(sampling.json_schema))
        else:
            grammar = LLMatcher.grammar_from_regex(str(sampling.regex))
        matcher = LLMatcher(_llguidance_tokenizer(limits.tokenizer, limits.vocab_size, end_token), grammar)
        fault = matcher.get_error() if matcher.is_error() else ""
    except ValueError as error:
        fault = str(error)
    if fault:
        reason = fault.strip().splitlines()[0][:300]
        raise PromptError(f"prompt {request.prompt_index} asks for a {name} that cannot be served: {reason}")
    return matcher


@lru_cache(maxsize=4)
def _llguidance_tokenizer(tokenizer: Any, vocab_size: int, end_token: int) -> Any:
    """Return llguidance's own form of a fast tokenizer, which takes a second for a large vocabulary."""
    import llguidance.hf

    return llguidance.hf.from_tokenizer(tokenizer, n_vocab=max(vocab_size, len(tokenizer)), eos_token=end_token)


def encode_bad_words(words: Sequence[str], tokenizer: Any, *, vocab_size: int) -> BadWords:
    """Return the token sequences to ban for `words`.

    Raises:
        PromptError: A word has no tokens, or tokens that the model does not have.
    """

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    sequences: list[tuple[int, ...]] = []
    for word in words:
        bare = encode(word.lstrip())
        if not bare:
            raise PromptError(f"bad_words holds {word!r}, which the tokenizer turns into no tokens at all")
        spaced = encode(" " + word.lstrip())
        sequences.append(bare)
        # Else the space is a token of its own, after which the bare word is banned already.
        if spaced and spaced[0] != bare[0] and len(spaced) == len(bare):
            sequences.append(spaced)
    for sequence in sequences:
        check_token_ids(sequence, vocab_size=vocab_size, name=f"the tokens of bad_words={tuple(words)!r}")
    return tuple(sequences)


def banned_next(sequences: BadWords, answer: Sequence[int]) -> list[int]:
    """Return the tokens that would complete one of `sequences` behind `answer`."""
    return [
        sequence[-1]
        for sequence in sequences
        if len(answer) >= len(sequence) - 1 and tuple(answer[len(answer) - len(sequence) + 1 :]) == sequence[:-1]
    ]
