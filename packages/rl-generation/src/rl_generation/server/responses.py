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
from rl_generation.engine import RolloutDelta
from rl_generation.requests import Request
from rl_generation.rollout import LogpOf, Rollout, TopLogp
from rl_generation.server.generation_request import GenerationRequest
from rl_generation.server.text_stream import TextStream
from rl_generation.server.tools import Reply, ReplyStream, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ChoiceText", "Kind", "Shapes", "usage", "versions"]

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

    def tokens(
        self, tokens: Sequence[int], *, logp: Sequence[float], top_logp: TopLogp, offsets: Sequence[int]
    ) -> dict[str, Any] | None:
        """The `logprobs` of some tokens, in the shape of the route; None where nobody asked."""
        if not self.asked.logp:
            return None
        names = [self._name(token) for token in tokens]
        if self.kind == "completion":
            best: list[dict[str, float]] | None = None
            if self.asked.top_logp:  # with the sampled token itself, as at OpenAI
                best = [
                    {name: value} | {self._name(other): each for other, each in places}
                    for name, value, places in zip(names, logp, top_logp, strict=True)
                ]
            return {
                "tokens": names,
                "token_logprobs": list(logp),
                "top_logprobs": best,
                "text_offset": list(offsets),
            }
        places = top_logp or [()] * len(tokens)
        content = [
            {**self._entry(token, value), "top_logprobs": [self._entry(other, each) for other, each in best]}
            for token, value, best in zip(tokens, logp, places, strict=True)
        ]
        return {"content": content, "refusal": None}

    def choice_text(self, sample: Request) -> "ChoiceText":
        """What reads one answer of a request."""
        return ChoiceText(self, sample)

    def _entry(self, token: int, logp: float) -> dict[str, Any]:
        text = self._token_text(token)
        # The tokenizer does not say which bytes a token is that is no whole character.
        return {
            "token": self._name(token),
            "logprob": logp,
            "bytes": None if "\ufffd" in text else list(text.encode()),
        }

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.asked.tokens_as_token_ids else self._token_text(token)

    def prompt_of_completion(self, request: Request) -> dict[str, Any]:
        """The field of a completion's choice that repeats its prompt, where it was asked for."""
        wanted = self.kind == "completion" and self.asked.token_ids
        return {"prompt_token_ids": list(request.prompt)} if wanted else {}

    def token_ids(self, tokens: Sequence[int]) -> dict[str, Any]:
        """The field of a choice that holds its token ids, where it was asked for."""
        return {"token_ids": list(tokens)} if self.asked.token_ids else {}

    def _choice(self, index: int, rollout: Rollout) -> dict[str, Any]:
        request = self.asked.requests[index // self.asked.n]
        calls: tuple[ToolCall, ...] = ()
        offsets: list[int] = []
        if self.asked.logp or self.asked.tools or self.asked.kept:
            text, offsets, reply = self.choice_text(request).take(
                RolloutDelta(sample_index=0, tokens=rollout.tokens, logp=rollout.logp, rollout=rollout)
            )
            calls = reply.calls
        else:
            include = self.asked.include_stop_string
            text = decode_rollout(self.tokenizer, rollout, prompt=request.prompt, include_stop_string=include)
        message: dict[str, Any] = {"role": "assistant", "content": text or None if calls else text}
        if calls:
            message["tool_calls"] = [call.body for call in calls]
        return {
            "index": index,
            **({"message": message} if self.kind == "chat" else {"text": text}),
            "logprobs": self.tokens(rollout.tokens, logp=rollout.logp, top_logp=rollout.top_logp, offsets=offsets),
            **ending(rollout, calls),
            **self.token_ids(rollout.tokens),
            **self.prompt_of_completion(request),
        }

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model_name}
        return {**head, "logp_of": self.logp_of}

    def _prompt_of_chat(self) -> dict[str, Any]:
        wanted = self.kind == "chat" and self.asked.token_ids
        return {"prompt_token_ids": list(self.asked.requests[0].prompt)} if wanted else {}

    def _token_text(self, token: int) -> str:
        return str(self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))


@final
class ChoiceText:
    """The text of one choice while it grows, and the calls that it turns out to hold."""

    def __init__(self, shapes: Shapes, sample: Request) -> None:
        self._text = TextStream(
            shapes.tokenizer,
            stop=sample.sampling.stop,
            include_stop_string=shapes.asked.include_stop_string,
            prompt=sample.prompt,
            kept=shapes.asked.kept,
        )
        self._reply = ReplyStream(shapes.asked.tools)

    def take(self, delta: RolloutDelta) -> tuple[str, list[int], Reply]:
        """Return what is certainly said now, the offset of each new token, and, with the last delta, the calls."""
        offsets, said = [], ""
        last = len(delta.tokens) - 1 if delta.rollout and isinstance(delta.rollout.stop_reason, int) else None
        for place, token in enumerate(delta.tokens):
            offsets.append(self._text.length)
            said += self._reply.push(self._text.push(token, is_last=place == last))
        if delta.rollout is None:
            return said, offsets, Reply(content="", calls=())
        said += self._reply.push(self._text.finish(delta.rollout))
        reply = self._reply.finish()
        return said + reply.content, offsets, reply


def ending(rollout: Rollout, calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
    """The fields of a choice that say how it ended."""
    return {
        "finish_reason": "tool_calls" if calls and rollout.finish_reason == "stop" else rollout.finish_reason,
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
