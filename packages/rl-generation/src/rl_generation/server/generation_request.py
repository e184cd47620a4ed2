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
from rl_generation.server.errors import HttpError, from_engine
from rl_generation.server.fields import Fields, is_token_ids, shortened
from rl_generation.server.limits import ServerLimits
from rl_generation.server.tools import TOOL_FORMATS, ToolFormat, ToolUse, read_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["GenerationRequest", "read_chat", "read_chat_tokens", "read_completion", "read_text_tokens"]

MOST_TOP_LOGP = 20
"""As at OpenAI: of each token of the response."""

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
"""Parts of a content that are text, in chats and in Responses."""

LOOKED_FOR = ("stop", "stop_token_ids", "bad_words")
"""Fields whose entries cost time at every token."""


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

    tokens_as_token_ids: bool
    """Whether tokens there are written as `token_id:…`."""

    token_ids: bool
    """Whether the response holds the token ids of prompts and answers."""

    include_stop_string: bool
    """Whether the text holds the stop string that ended it."""

    top_logp: int = 0
    """Likeliest tokens that the response reports at each place, beside the one that was sampled."""

    tools: ToolUse | None = None
    """How calls are found in the text; None where it is only text."""

    kept: Mapping[int, str] = field(default_factory=dict)
    """Special tokens that the text holds."""


def read_completion(
    fields: Fields, *, tokenizer: "PreTrainedTokenizerBase", limits: Limits, bounds: ServerLimits
) -> GenerationRequest:
    """Read the body of `/v1/completions`, all but `model`.

    Raises:
        HttpError: 400; a field is wrong, unknown or unsupported, or the engine cannot serve what it asks for.
    """
    add_special_tokens = fields.flag("add_special_tokens", default=True)
    logp = fields.integer("logprobs")
    prompts = [
        encode_text(tokenizer, prompt, add_special_tokens=add_special_tokens) if isinstance(prompt, str) else prompt
        for prompt in _prompts(fields.anything("prompt"), bounds)
    ]
    max_tokens = fields.integer("max_tokens")
    return _read(
        fields,
        prompts,
        tokenizer=tokenizer,
        max_tokens=max_tokens,
        default_tokens=16,  # OpenAI's, and vLLM's
        logp=logp is not None,
        top_logp=_top_logp("logprobs", logp),
        limits=limits,
        bounds=bounds,
    )


def read_chat(
    fields: Fields,
    *,
    tokenizer: "PreTrainedTokenizerBase",
    limits: Limits,
    bounds: ServerLimits,
    tool_format: ToolFormat | None = None,
) -> GenerationRequest:
    """Read the body of `/v1/chat/completions`, all but `model`; `tool_format` is the one that the model writes.

    Raises:
        HttpError: 400, as for `read_completion`.
    """
    logp = fields.flag("logprobs", default=False)
    top_logp = fields.integer("top_logprobs")
    if top_logp and not logp:
        raise HttpError(400, "top_logprobs needs logprobs=true", param="top_logprobs", code="invalid_value")
    prompt = read_chat_tokens(fields, tokenizer=tokenizer, limits=limits)
    tools, schema = read_tools(
        fields.mappings("tools") or (),
        fields.anything("tool_choice"),
        parallel=fields.flag("parallel_tool_calls", default=True),
        found=tool_format,
    )
    old, new = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
    if old is not None and new is not None and old != new:
        message = f"max_tokens={old} and max_completion_tokens={new} are two names of one thing: send one"
        raise HttpError(400, message, param="max_completion_tokens", code="invalid_value")
    return _read(
        fields,
        [prompt],
        tokenizer=tokenizer,
        max_tokens=old if new is None else new,
        logp=logp,
        top_logp=_top_logp("top_logprobs", top_logp),
        tools=tools,
        tool_schema=schema,
        limits=limits,
        bounds=bounds,
    )


def read_chat_tokens(fields: Fields, *, tokenizer: "PreTrainedTokenizerBase", limits: Limits) -> list[int]:
    """Read the fields that a chat's prompt is made of, and return its token ids.

    Raises:
        HttpError: 400; a message is no text, or the template refuses the messages.
    """
    messages = fields.mappings("messages")
    if not messages:
        raise HttpError(400, "messages must be a list of at least one message", param="messages", code="missing_field")
    continued = fields.flag("continue_final_message", default=False)
    tools = fields.mappings("tools")
    variables = dict(fields.mapping("chat_template_kwargs") or {})
    effort = fields.text("reasoning_effort")
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
    prefix = fields.token_ids("required_prefix_token_ids") or ()
    try:
        check_token_ids(prefix, vocab_size=limits.vocab_size, name="required_prefix_token_ids")
        return encode_chat(
            tokenizer,
            [_message(index, message) for index, message in enumerate(messages)],
            add_generation_prompt=fields.flag("add_generation_prompt", default=not continued),
            continue_final_message=continued,
            tools=tools,
            template_kwargs=variables,
            required_prefix_token_ids=prefix,
        )
    except PromptError as error:
        param = "required_prefix_token_ids" if str(error).startswith("required_prefix_token_ids") else "messages"
        raise HttpError(400, str(error), param=param, code="invalid_value") from None


def read_text_tokens(fields: Fields, *, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Read `prompt`, one text, and return its token ids.

    Raises:
        HttpError: 400; there is none.
    """
    prompt = fields.text("prompt")
    if prompt is None:
        raise HttpError(400, "send prompt, a string, or messages", param="prompt", code="missing_field")
    return encode_text(tokenizer, prompt, add_special_tokens=fields.flag("add_special_tokens", default=True))


def _read(
    fields: Fields,
    prompts: list[list[int]],
    *,
    tokenizer: "PreTrainedTokenizerBase",
    max_tokens: int | None,
    logp: bool,
    top_logp: int,
    limits: Limits,
    bounds: ServerLimits,
    default_tokens: int | None = None,
    tools: ToolUse | None = None,
    tool_schema: str | None = None,
) -> GenerationRequest:
    n = fields.integer("n")
    stream = fields.flag("stream", default=False)
    include_usage = _include_usage(fields, stream=stream)
    settings = _settings(fields) | _grammar(fields, tools=tools, tool_schema=tool_schema) | {"top_logp": top_logp}
    minimum = settings.pop("min_new_tokens", 0)
    words = sum(len(settings.get(name, ())) for name in LOOKED_FOR)
    bounds.check_words(words)
    token_ids = fields.flag("return_token_ids", default=False)
    tokens_as_token_ids = fields.flag("return_tokens_as_token_ids", default=False)
    include_stop_string = fields.flag("include_stop_str_in_output", default=False)
    kept = {}
    if not fields.flag("skip_special_tokens", default=True):
        kept = {token: str(tokenizer.convert_ids_to_tokens(token)) for token in tokenizer.all_special_ids}
    elif tools is not None and tools.format is not None:  # what opens a call is a special token of some models
        opening = tokenizer.convert_tokens_to_ids(TOOL_FORMATS[tools.format])
        kept = {opening: TOOL_FORMATS[tools.format]} if opening in tokenizer.all_special_ids else {}
    fields.refuse_others()
    bounds.check_counts(prompts=len(prompts), n=1 if n is None else n)
    try:
        # The number of tokens is each prompt's own, and is checked below.
        sampling = Sampling(max_new_tokens=1, n=1 if n is None else n, **settings)
        samplings = [
            replace(
                each,
                max_new_tokens=_room(prompt, limits, default_tokens) if max_tokens is None else max_tokens,
                min_new_tokens=minimum,
            )
            for prompt, each in zip(prompts, sampling.spread(len(prompts)), strict=True)
        ]
        requests = make_requests(prompts, samplings, limits)
    except ValueError as error:
        raise from_engine(error) from None
    return GenerationRequest(
        requests=requests,
        n=sampling.n,
        stream=stream,
        include_usage=include_usage,
        logp=logp,
        tokens_as_token_ids=tokens_as_token_ids,
        token_ids=token_ids,
        include_stop_string=include_stop_string,
        top_logp=top_logp,
        tools=tools,
        kept=kept,
    )


def _top_logp(name: str, count: int | None) -> int:
    """The likeliest tokens that a client asks for beside the sampled one."""
    if count is not None and not 0 <= count <= MOST_TOP_LOGP:
        raise HttpError(400, f"{name} must be in [0, {MOST_TOP_LOGP}]; got {count}", param=name, code="invalid_value")
    return count or 0


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


def _settings(fields: Fields) -> dict[str, Any]:
    """The arguments of Sampling that were given."""
    top_k = fields.integer("top_k")
    settings = {
        "temperature": fields.number("temperature"),
        "top_p": fields.number("top_p"),
        "top_k": 0 if top_k == -1 else top_k,  # vLLM's other way to say: all of them
        "min_p": fields.number("min_p"),
        "stop_token_ids": fields.token_ids("stop_token_ids"),
        "stop": fields.texts("stop"),
        "bad_words": fields.texts("bad_words"),
        "ignore_eos": fields.flag("ignore_eos", default=False),
        "seed": fields.integer("seed"),
        "presence_penalty": fields.number("presence_penalty"),
        "frequency_penalty": fields.number("frequency_penalty"),
        "repetition_penalty": fields.number("repetition_penalty"),
        "logit_bias": _logit_bias(fields),
        "min_new_tokens": fields.integer("min_tokens"),
    }
    return {name: value for name, value in settings.items() if value is not None}


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


def _room(prompt: Sequence[int], limits: Limits, most: int | None) -> int:
    """Tokens until the context is full, at `most`; 1 where it is already, so that the check of the context speaks."""
    if limits.max_length is None and most is not None:
        return most
    if limits.max_length is None:
        message = "max_tokens is needed: this engine knows no end of the context, to which it would default"
        raise HttpError(400, message, param="max_tokens", code="missing_field")
    room = max(1, limits.max_length - len(prompt))
    return room if most is None else min(most, room)


def _prompts(prompt: Any, bounds: ServerLimits) -> list[Any]:
    """Of the four shapes of a prompt, the list of prompts: each text or token ids."""
    if isinstance(prompt, str) or (prompt and is_token_ids(prompt)):
        return [prompt]
    if isinstance(prompt, list):
        bounds.check_counts(prompts=len(prompt))
    if isinstance(prompt, list) and prompt and all(isinstance(each, str) or is_token_ids(each) for each in prompt):
        return prompt
    message = (
        "prompt must be a string, a list of token ids, or a list of such, not empty; token ids are integers of at "
        "least 0"
    )
    raise HttpError(400, message, param="prompt", code="missing_field" if prompt is None else "invalid_type")


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
