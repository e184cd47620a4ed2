"""OpenAI's shapes of answers, and vLLM's extensions of them. Knows tokens and text; does not know HTTP or the engine.

Beyond OpenAI's fields: `stop_reason`, `token_ids` and `prompt_token_ids` are vLLM's; `weight_version` (of the oldest
weights that made any token) and `logp_of` of a response, and `weight_versions` of a choice (which weights made which
tokens, `[start, end)`), are this package's.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, final

from rl_generation.chat import decode_rollout
from rl_generation.requests import Request
from rl_generation.rollout import LogpOf, Rollout
from rl_generation.server.generation_request import GenerationRequest
from rl_generation.server.text_stream import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Kind", "Shapes", "usage", "versions"]

Kind = Literal["chat", "completion"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Writes the parts of one response."""

    kind: Kind
    model_name: str
    tokenizer: "PreTrainedTokenizerBase"
    logp_of: LogpOf
    asked: GenerationRequest
    number: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        """Of the response."""
        return f"{'chatcmpl' if self.kind == 'chat' else 'cmpl'}-{self.number}"

    def whole(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        """The response that is not streamed; rollouts in order of prompt, then of sample."""
        choices = [self._choice(index, rollout) for index, rollout in enumerate(rollouts)]
        return {
            **self._head("chat.completion" if self.kind == "chat" else "text_completion"),
            "choices": choices,
            "usage": usage(self.asked.requests, sum(len(rollout.tokens) for rollout in rollouts)),
            "weight_version": min(rollout.version for rollout in rollouts),
            **self._prompt_of_chat(),
        }

    def chunk(self, choices: Sequence[Mapping[str, Any]], **others: Any) -> dict[str, Any]:
        """One event of a stream."""
        unknown = {"usage": None} if self.asked.include_usage else {}
        kind = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        return {**self._head(kind), "choices": list(choices), **unknown, **others}

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk of a chat's choice, which says whose message it is."""
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        return self.chunk([{**choice, "finish_reason": None}], **self._prompt_of_chat())

    def tokens(self, tokens: Sequence[int], logp: Sequence[float], offsets: Sequence[int]) -> dict[str, Any] | None:
        """The `logprobs` of some tokens, in the shape of the route; None where nobody asked."""
        if not self.asked.logp:
            return None
        texts = [self._token_text(token) for token in tokens]
        names = [f"token_id:{token}" for token in tokens] if self.asked.tokens_as_token_ids else texts
        if self.kind == "completion":
            offsets = list(offsets)
            return {"tokens": names, "token_logprobs": list(logp), "top_logprobs": None, "text_offset": offsets}
        content = [
            {
                "token": name,
                "logprob": value,
                # The tokenizer does not say which bytes a token is that is no whole character.
                "bytes": None if "\ufffd" in text else list(text.encode()),
                "top_logprobs": [],
            }
            for name, value, text in zip(names, logp, texts, strict=True)
        ]
        return {"content": content, "refusal": None}

    def text_stream(self, sample: Request) -> TextStream:
        """What decodes one answer of a request."""
        include = self.asked.include_stop_string
        stop = sample.sampling.stop
        return TextStream(self.tokenizer, stop=stop, include_stop_string=include, prompt=sample.prompt)

    def prompt_of_completion(self, request: Request) -> dict[str, Any]:
        """The field of a completion's choice that repeats its prompt, where it was asked for."""
        wanted = self.kind == "completion" and self.asked.token_ids
        return {"prompt_token_ids": list(request.prompt)} if wanted else {}

    def token_ids(self, tokens: Sequence[int]) -> dict[str, Any]:
        """The field of a choice that holds its token ids, where it was asked for."""
        return {"token_ids": list(tokens)} if self.asked.token_ids else {}

    def _choice(self, index: int, rollout: Rollout) -> dict[str, Any]:
        request = self.asked.requests[index // self.asked.n]
        include = self.asked.include_stop_string
        text = decode_rollout(self.tokenizer, rollout, prompt=request.prompt, include_stop_string=include)
        content = {"message": {"role": "assistant", "content": text}} if self.kind == "chat" else {"text": text}
        return {
            "index": index,
            **content,
            "logprobs": self.tokens(rollout.tokens, rollout.logp, self._offsets(request, rollout)),
            **ending(rollout),
            **self.token_ids(rollout.tokens),
            **self.prompt_of_completion(request),
        }

    def _offsets(self, request: Request, rollout: Rollout) -> list[int]:
        """Where in the text each token begins; only completions tell."""
        if self.kind == "chat" or not self.asked.logp:
            return []
        decoding, offsets = self.text_stream(request), []
        for token in rollout.tokens:
            offsets.append(decoding.length)
            decoding.push(token)
        return offsets

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model_name}
        return {**head, "logp_of": self.logp_of}

    def _prompt_of_chat(self) -> dict[str, Any]:
        wanted = self.kind == "chat" and self.asked.token_ids
        return {"prompt_token_ids": list(self.asked.requests[0].prompt)} if wanted else {}

    def _token_text(self, token: int) -> str:
        return str(self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))


def ending(rollout: Rollout) -> dict[str, Any]:
    """The fields of a choice that say how it ended."""
    return {
        "finish_reason": rollout.finish_reason,
        "stop_reason": rollout.stop_reason,
        "weight_versions": versions(rollout),
    }


def versions(rollout: Rollout) -> list[dict[str, int]]:
    """Which weights made which tokens."""
    return [{"version": span.version, "start": span.start, "end": span.end} for span in rollout.versions]


def usage(requests: Sequence[Request], generated: int) -> dict[str, int]:
    """Tokens that were read and written; a prompt with several answers is read once."""
    read = sum(len(request.prompt) for request in requests)
    return {"prompt_tokens": read, "completion_tokens": generated, "total_tokens": read + generated}
