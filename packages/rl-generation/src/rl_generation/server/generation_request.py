"""What a client asks to be generated, from the fields of its body. Does not run anything.

The fields are OpenAI's, and vLLM's extensions of them: a chat without `max_tokens` has the rest of the context, a
completion 16 tokens. Where they differ from this package: of several prompts in one request each draws by its own seed
(`Sampling.spread`), so that a request is answered as `engine.generate(prompts, sampling)` would. Text parts of a
message are joined by line breaks, and the role "developer" is the template's "system", as in vLLM.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, final

from rl_generation.chat import encode_chat, encode_text
from rl_generation.errors import PromptError
from rl_generation.requests import Limits, Request, Sampling, check_token_ids, make_requests
from rl_generation.server.fields import Fields, is_token_ids, shortened
from rl_generation.server.guard import HttpError, ServerLimits, from_engine
from rl_generation.server.tools import TOOL_FORMATS, ToolFormat, ToolUse, read_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["GenerationRequest", "RequestReader"]

MOST_TOP_LOGP = 20
"""As at OpenAI: of each token of the response."""

COMPLETION_TOKENS = 16
"""Of a completion that does not say, at OpenAI and vLLM."""

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
"""Parts of a content that are text, in chats and in Responses."""

NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
"""Fields that are called the same in Sampling."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Prompts as token ids, each with its Sampling, and what the response shall hold."""

    requests: Sequence[Request]
    n: int
    """Answers to each."""

    stream: bool
    include_usage: bool
    """Whether a stream ends with a chunk that counts tokens."""

    logp: bool
    """Whether the response holds the logp of each token."""

    top_logp: int
    """Likeliest tokens that it reports at each place, beside the one that was sampled."""

    tokens_as_token_ids: bool
    """Whether tokens there are written as `token_id:…`."""

    token_ids: bool
    """Whether the response holds the token ids of prompts and answers."""

    include_stop_string: bool
    """Whether the text holds the stop string that ended it."""

    tools: ToolUse | None = None
    """How calls are found in the text; None where it is only text."""

    kept: Mapping[int, str] = field(default_factory=dict)
    """Special tokens that the text holds."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReader:
    """Reads bodies, all but `model`, for one engine; raises HttpError 400 for what it cannot serve.

    That is a field that is wrong, unknown or unsupported, a message that is no text, or what the template refuses.
    """

    tokenizer: "PreTrainedTokenizerBase"
    limits: Limits
    bounds: ServerLimits
    tool_format: ToolFormat | None = None
    """That the model writes."""

    def completion(self, fields: Fields) -> GenerationRequest:
        """Read the body of `/v1/completions`."""
        special, prompt = fields.flag("add_special_tokens", default=True), fields.anything("prompt")
        several = [prompt] if isinstance(prompt, str) or (prompt and is_token_ids(prompt)) else prompt
        if isinstance(several, list):
            self.bounds.check_counts(prompts=len(several))
        else:
            several = []
        if not several or not all(isinstance(each, str) or is_token_ids(each) for each in several):
            message = (
                "prompt must be a string, a list of token ids, or a list of such, not empty; token ids are integers of "
                "at least 0"
            )
            raise HttpError(400, message, param="prompt", code="missing_field" if prompt is None else "invalid_type")
        prompts = [
            encode_text(self.tokenizer, each, add_special_tokens=special) if isinstance(each, str) else each
            for each in several
        ]
        logp = fields.integer("logprobs") is not None
        names = ("max_tokens", "logprobs")
        return self._read(fields, prompts, names=names, default_tokens=COMPLETION_TOKENS, logp=logp)

    def chat(self, fields: Fields) -> GenerationRequest:
        """Read the body of `/v1/chat/completions`."""
        logp = fields.flag("logprobs", default=False)
        if fields.integer("top_logprobs") and not logp:
            raise HttpError(400, "top_logprobs needs logprobs=true", param="top_logprobs", code="invalid_value")
        prompt = self.chat_tokens(fields)
        tools, schema = read_tools(
            fields.mappings("tools") or (),
            fields.anything("tool_choice"),
            parallel=fields.flag("parallel_tool_calls", default=True),
            found=self.tool_format,
        )
        old, new = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
        if old is not None and new is not None and old != new:
            message = f"max_tokens={old} and max_completion_tokens={new} are two names of one thing: send one"
            raise HttpError(400, message, param="max_completion_tokens", code="invalid_value")
        names = ("max_tokens" if new is None else "max_completion_tokens", "top_logprobs")
        return self._read(fields, [prompt], names=names, logp=logp, tools=tools, tool_schema=schema)

    def chat_tokens(self, fields: Fields) -> list[int]:
        """Read the fields that a chat's prompt is made of, and return its token ids."""
        messages = fields.mappings("messages")
        if not messages:
            message = "messages must be a list of at least one message"
            raise HttpError(400, message, param="messages", code="missing_field")
        continued = fields.flag("continue_final_message", default=False)
        variables = dict(fields.mapping("chat_template_kwargs") or {})
        effort = fields.text("reasoning_effort")
        if effort is not None:
            variables.setdefault("reasoning_effort", effort)
        param = "required_prefix_token_ids"
        prefix = fields.token_ids(param) or ()
        try:
            check_token_ids(prefix, vocab_size=self.limits.vocab_size, name=param)
            return encode_chat(
                self.tokenizer,
                [_message(index, message) for index, message in enumerate(messages)],
                add_generation_prompt=fields.flag("add_generation_prompt", default=not continued),
                continue_final_message=continued,
                tools=fields.mappings("tools"),
                template_kwargs=variables,
                required_prefix_token_ids=prefix,
            )
        except PromptError as error:
            param = param if str(error).startswith(param) else "messages"
            raise HttpError(400, str(error), param=param, code="invalid_value") from None

    def text_tokens(self, fields: Fields) -> list[int]:
        """Read `prompt`, one text, and return its token ids."""
        prompt = fields.text("prompt")
        if prompt is None:
            raise HttpError(400, "send prompt, a string, or messages", param="prompt", code="missing_field")
        special = fields.flag("add_special_tokens", default=True)
        return encode_text(self.tokenizer, prompt, add_special_tokens=special)

    def _read(
        self,
        fields: Fields,
        prompts: Sequence[list[int]],
        *,
        names: tuple[str, str],
        logp: bool,
        default_tokens: int | None = None,
        tools: ToolUse | None = None,
        tool_schema: str | None = None,
    ) -> GenerationRequest:
        """Read what all have in common; `names` are of the fields for the most tokens, and for the likeliest ones."""
        tokens, top_logp = names
        top = fields.integer(top_logp) or 0
        if not 0 <= top <= MOST_TOP_LOGP:
            message = f"{top_logp} must be in [0, {MOST_TOP_LOGP}]; got {top}"
            raise HttpError(400, message, param=top_logp, code="invalid_value")
        n, top_k, max_tokens = fields.integer("n"), fields.integer("top_k"), fields.integer(tokens)
        n = 1 if n is None else n
        given: dict[str, Any] = {
            **{name: fields.number(name) for name in NUMBERS},
            "top_k": 0 if top_k == -1 else top_k,  # vLLM's other way to say: all of them
            "stop_token_ids": fields.token_ids("stop_token_ids"),
            "stop": fields.texts("stop"),
            "bad_words": fields.texts("bad_words"),
            "ignore_eos": fields.flag("ignore_eos", default=False),
            "seed": fields.integer("seed"),
            "logit_bias": _logit_bias(fields),
            "top_logp": top,
            **_grammar(fields, tools=tools, tool_schema=tool_schema),
        }
        minimum = fields.integer("min_tokens") or 0
        stream = fields.flag("stream", default=False)
        response = {
            "stream": stream,
            "include_usage": _include_usage(fields, stream=stream),
            "tokens_as_token_ids": fields.flag("return_tokens_as_token_ids", default=False),
            "token_ids": fields.flag("return_token_ids", default=False),
            "include_stop_string": fields.flag("include_stop_str_in_output", default=False),
        }
        tokenizer, kept = self.tokenizer, {}
        if not fields.flag("skip_special_tokens", default=True):
            kept = {token: str(tokenizer.convert_ids_to_tokens(token)) for token in tokenizer.all_special_ids}
        elif tools is not None and tools.format is not None:  # what opens a call is a special token of some models
            opening = tokenizer.convert_tokens_to_ids(TOOL_FORMATS[tools.format])
            kept = {opening: TOOL_FORMATS[tools.format]} if opening in tokenizer.all_special_ids else {}
        fields.refuse_others()
        self.bounds.check_words(given)
        self.bounds.check_counts(prompts=len(prompts), n=n)
        try:
            # The number of tokens is each prompt's own, and is checked below.
            settings = {name: value for name, value in given.items() if value is not None}
            spread = Sampling(max_new_tokens=1, n=n, **settings).spread(len(prompts))
            samplings = []
            for prompt, each in zip(prompts, spread, strict=True):
                most = self._room(prompt, default_tokens) if max_tokens is None else max_tokens
                samplings.append(replace(each, max_new_tokens=most, min_new_tokens=minimum))
            requests = make_requests(prompts, samplings, self.limits)
        except ValueError as error:
            raise from_engine(error) from None
        return GenerationRequest(requests=requests, n=n, logp=logp, top_logp=top, tools=tools, kept=kept, **response)

    def _room(self, prompt: Sequence[int], most: int | None) -> int:
        """Tokens until the context is full, at `most`; 1 where it is already, so that the check of it speaks."""
        length = self.limits.max_length
        if length is None and most is None:
            message = "max_tokens is needed: this engine knows no end of the context, to which it would default"
            raise HttpError(400, message, param="max_tokens", code="missing_field")
        rooms = [most, None if length is None else max(1, length - len(prompt))]
        return min(room for room in rooms if room is not None)


def _grammar(fields: Fields, *, tools: ToolUse | None, tool_schema: str | None) -> dict[str, str]:
    """The argument of Sampling that restricts the text: by the forced call, by OpenAI's field, or by vLLM's."""
    given = [name for name in ("response_format", "structured_outputs") if fields.has(name)]
    response = fields.mapping("response_format") or {"type": "text"}
    structured = fields.mapping("structured_outputs") or {}
    grammars: list[dict[str, str]] = [{"json_schema": tool_schema}] if tool_schema is not None else []
    if response.get("type") == "json_object":
        grammars.append({"json_schema": json.dumps({"type": "object"})})
    elif response.get("type") == "json_schema":
        schema = response.get("json_schema")
        if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
            message = "response_format of type 'json_schema' needs json_schema.schema, an object"
            raise HttpError(400, message, param="response_format", code="missing_field")
        grammars.append({"json_schema": json.dumps(schema["schema"])})
    elif response != {"type": "text"}:
        message = f"response_format must be of type 'text', 'json_object' or 'json_schema'; got {shortened(response)}"
        raise HttpError(400, message, param="response_format", code="unsupported_field")
    if grammars and tools is not None and response.get("type") != "text":
        message = (
            "response_format and tools together would forbid every call: send tool_choice='none', or no response_format"
        )
        raise HttpError(400, message, param="response_format", code="unsupported_field")
    for name, value in structured.items():
        if name == "json" and isinstance(value, dict | str):
            grammars.append({"json_schema": value if isinstance(value, str) else json.dumps(value)})
        elif name == "regex" and isinstance(value, str):
            grammars.append({"regex": value})
        elif name == "choice" and isinstance(value, list) and value and all(isinstance(each, str) for each in value):
            grammars.append({"regex": "|".join(f"(?:{re.escape(each)})" for each in value)})
        else:
            message = f"structured_outputs takes json, regex or choice; got {name[:80]}={shortened(value)}"
            raise HttpError(400, message, param="structured_outputs", code="unsupported_field")
    if len(grammars) > 1:
        message = f"{' and '.join(given)} name {len(grammars)} grammars, and a response follows one"
        raise HttpError(400, message, param=given[-1], code="invalid_value")
    return grammars[0] if grammars else {}


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...] | None:
    biases = fields.mapping("logit_bias")
    if biases is None:
        return None
    for token, bias in biases.items():
        number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not token.isdecimal() or not number or not -100 <= bias <= 100:
            message = f"logit_bias must map token ids to numbers in [-100, 100]; got {token[:80]!r}: {shortened(bias)}"
            raise HttpError(400, message, param="logit_bias", code="invalid_type")
    return tuple((int(token), float(bias)) for token, bias in biases.items())


def _include_usage(fields: Fields, *, stream: bool) -> bool:
    options = fields.mapping("stream_options") or {}
    if options and not stream:
        raise HttpError(400, "stream_options needs stream=true", param="stream_options", code="invalid_value")
    for name, value in options.items():
        # Obfuscation pads the chunks of OpenAI's own servers.
        if name not in ("include_usage", "include_obfuscation") or not isinstance(value, bool):
            message = f"stream_options holds include_usage, true or false; got {name[:80]}={shortened(value)}"
            raise HttpError(400, message, param=f"stream_options.{name[:80]}", code="unknown_field")
    return bool(options.get("include_usage", False))


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates take it: content is one string, arguments of calls are objects, developers are system."""
    content, where = message.get("content"), f"messages[{index}]"
    if not isinstance(message.get("role"), str):
        raise HttpError(400, f"{where} needs a role, a string", param=f"{where}.role", code="missing_field")
    if message["role"] == "developer":
        message = {**message, "role": "system"}
    calls = message.get("tool_calls")
    if calls:
        message = {**message, "tool_calls": _calls_for_template(calls, where)}
    if isinstance(content, str):
        return message
    if content is None and calls:
        return {**message, "content": ""}
    texts = [
        part.get("text", part.get("refusal")) if isinstance(part, dict) and part.get("type") in TEXT_PARTS else None
        for part in (content if isinstance(content, list) else [None])
    ]
    if texts and all(isinstance(text, str) for text in texts):
        return {**message, "content": "\n".join(str(text) for text in texts)}
    wrong = f"{where}.content must be a string, or parts of type 'text', since the model reads text alone"
    raise HttpError(400, wrong, param=f"{where}.content", code="invalid_type")


def _calls_for_template(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls whose arguments are objects, as templates of Hugging Face expect, not JSON text, as OpenAI sends."""
    try:
        return [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"] or "{}")}}
            if isinstance(call["function"]["arguments"], str)
            else call
            for call in calls
        ]
    except (KeyError, TypeError, ValueError):
        message = f"{where}.tool_calls must hold functions with a name and arguments, a JSON text"
        raise HttpError(400, message, param=f"{where}.tool_calls", code="invalid_type") from None
