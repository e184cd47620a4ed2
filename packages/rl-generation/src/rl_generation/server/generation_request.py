"""What clients send, as pydantic models, and the prompts with their Sampling that it asks for. Does not run anything.

OpenAI's and vLLM's interfaces have many fields; a server that ignores the ones it does not know answers a question that
was not asked. So a field is read, or cannot change the answer, or has its neutral value, or is an error that names it
and the nearest valid one. JSON's null stands for a missing field.

A chat without `max_tokens` has the rest of the context, a completion 16 tokens. Of several prompts in one request each
draws by its own seed (`Sampling.spread`), so that a request is answered as `engine.generate(prompts, sampling)` would.
Text parts of a message are joined by line breaks, and the role "developer" is the template's "system", as in vLLM.
"""

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rl_generation.chat import encode_chat, encode_text
from rl_generation.detokenizer import Tokenizer
from rl_generation.errors import PromptError
from rl_generation.requests import Limits, Request, Sampling, check_token_ids, make_requests
from rl_generation.server.guard import HttpError, ServerLimits, from_engine
from rl_generation.server.tools import TOOL_FORMATS, ToolFormat, ToolUse, read_tools

UNSERVED: Mapping[str, tuple[object, ...] | None] = {
    **dict.fromkeys(("metadata", "prediction", "prompt_cache_key", "prompt_cache_retention")),
    **dict.fromkeys(("safety_identifier", "service_tier", "store", "user")),
    **dict.fromkeys(("chat_template", "conversation", "guided_json", "guided_regex", "max_tool_calls"), ()),
    **dict.fromkeys(("previous_response_id", "prompt_logprobs", "truncate_prompt_tokens"), ()),
    **dict.fromkeys(("allowed_token_ids", "documents", "functions"), ([],)),
    **dict.fromkeys(("background", "echo", "use_beam_search"), (False,)),
    **dict.fromkeys(("best_of", "length_penalty"), (1,)),
    "modalities": (["text"],),
    "priority": (0,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "truncation": ("disabled",),
}
"""Fields of OpenAI's or vLLM's that exist but are not read, with the values that ask for nothing; None is any value, of
fields on which a response cannot depend (nothing is stored)."""

MOST = 2**63 - 1
"""The largest integer that engines can hold."""

# Types of fields. Their descriptions are what a refusal says that a field must be.
Integer = Annotated[
    Annotated[int, Field(ge=-MOST, le=MOST)] | None, Field(default=None, description="an integer of 64 bits")
]
Number = Annotated[
    Annotated[float, Field(allow_inf_nan=False)] | None, Field(default=None, description="a finite number")
]
MostLikely = Annotated[
    Annotated[int, Field(ge=0, le=20)] | None, Field(default=None, description="an integer in [0, 20]")
]
"""How many of the likeliest tokens are told at each place; the bounds are OpenAI's."""
Flag = Annotated[bool, Field(description="true or false")]
Text = Annotated[str | None, Field(default=None, description="a string")]
Texts = Annotated[
    list[str] | None,
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
    Field(default=None, description="a string or a list of strings"),
]
TokenId = Annotated[int, Field(ge=0, le=MOST)]
T = TypeVar("T")
NotEmpty = Annotated[list[T], Field(min_length=1)]
TokenIds = Annotated[
    list[TokenId] | None, Field(default=None, description="a list of token ids (integers of at least 0)")
]
Object = Annotated[dict[str, Any] | None, Field(default=None, description="an object")]
Objects = Annotated[list[dict[str, Any]] | None, Field(default=None, description="a list of objects")]


class Body(BaseModel):
    """One body; a field that its route does not read is in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: Text

    @classmethod
    def of(cls, fields: Mapping[str, Any], *, others: Collection[str] = ()) -> Self:
        """Read the fields of a JSON object, `others` of which somebody else reads.

        Raises:
            HttpError: 400; a field has the wrong type, is not served, or is not known.
        """
        given = {name: value for name, value in fields.items() if value is not None}
        try:
            body = cls.model_validate(given)
        except ValidationError as error:
            name = str(error.errors(include_input=False, include_url=False)[0]["loc"][0])
            got = f"; got {shortened(given[name])}" if name in given else ""
            message = f"{name} must be {cls.model_fields[name].description}{got}"
            code = "invalid_type" if got else "missing_field"
            raise HttpError(400, message, param=name, code=code) from None
        known = {*cls.model_fields, *others}
        for name, value in (body.model_extra or {}).items():
            neutral = UNSERVED.get(name, ())
            if name in others or neutral is None:
                continue
            if name not in UNSERVED:
                near = difflib.get_close_matches(name[:80], sorted(known), n=1, cutoff=0.5)
                meant = f": did you mean {near[0]!r}?" if near else f"; known here: {', '.join(sorted(known))}"
                raise HttpError(400, f"unknown field {name[:80]!r}{meant}", param=name[:80], code="unknown_field")
            # Equality in which true is not 1.
            if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral):
                instead = " or ".join(map(json.dumps, neutral)) or "null"
                message = f"{name}={shortened(value)} is not supported; leave it out, or send {instead}"
                raise HttpError(400, message, param=name, code="unsupported_field")
        return body


class ConversationBody(Body):
    """What the prompt of a chat is made of."""

    messages: Objects
    tools: Objects
    add_generation_prompt: Annotated[bool | None, Field(description="true or false")] = None
    continue_final_message: Flag = False
    chat_template_kwargs: Object
    reasoning_effort: Text
    required_prefix_token_ids: TokenIds


class GenerationBody(Body):
    """What every route that generates takes, though Responses have other fields for some; named as in Sampling."""

    n: Integer
    max_tokens: Integer
    response_format: Object
    temperature: Number
    top_p: Number
    top_k: Integer
    min_p: Number
    presence_penalty: Number
    frequency_penalty: Number
    repetition_penalty: Number
    logit_bias: Annotated[
        dict[Annotated[int, Field(strict=False, ge=0)], Annotated[float, Field(ge=-100, le=100)]] | None,
        Field(description="a mapping of token ids to numbers in [-100, 100]"),
    ] = None
    stop: Texts
    stop_token_ids: TokenIds
    bad_words: Texts
    ignore_eos: Flag = False
    seed: Integer
    min_tokens: Integer
    structured_outputs: Object
    stream: Flag = False
    # Obfuscation pads the chunks of OpenAI's own servers.
    stream_options: Annotated[
        dict[Literal["include_usage", "include_obfuscation"], bool] | None,
        Field(description="an object with include_usage, true or false"),
    ] = None
    return_token_ids: Flag = False
    return_tokens_as_token_ids: Flag = False
    include_stop_str_in_output: Flag = False
    skip_special_tokens: Flag = True


class CompletionBody(GenerationBody):
    """Of `/v1/completions`."""

    prompt: Annotated[
        str | NotEmpty[str] | NotEmpty[TokenId] | NotEmpty[NotEmpty[TokenId]],
        Field(description="a string, a list of token ids (integers of at least 0), or a list of such, not empty"),
    ]
    logprobs: MostLikely
    add_special_tokens: Flag = True


class ChatBody(GenerationBody, ConversationBody):
    """Of `/v1/chat/completions`."""

    logprobs: Flag = False
    top_logprobs: MostLikely
    max_completion_tokens: Integer
    tool_choice: Any = None
    parallel_tool_calls: Flag = True


class ResponsesBody(ChatBody):
    """Of `/v1/responses`, which stores nothing; some fields of a chat have another name in it."""

    input: Annotated[str | list[dict[str, Any]], Field(description="a string or a list of items, each an object")]
    instructions: Any = None
    include: Annotated[
        list[Literal["message.output_text.logprobs"]] | None,
        Field(description="a list that may hold 'message.output_text.logprobs' alone"),
    ] = None
    max_output_tokens: Integer
    text: Object
    reasoning: Object


class TokensBody(ConversationBody):
    """Of `/tokenize`."""

    prompt: Text
    add_special_tokens: Flag = True


COMPLETION_TOKENS = 16
"""Of a completion that does not say, at OpenAI and vLLM."""

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
"""Parts of a content that are text, in chats and in Responses."""

SAMPLING = {each.name for each in fields(Sampling)}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Prompts as token ids, each with its Sampling, and what the response shall hold."""

    body: GenerationBody
    requests: Sequence[Request]
    logp: bool
    """Whether the response holds the logp of each token."""

    tools: ToolUse | None = None
    """How calls are found in the text; None where it is only text."""

    kept: Mapping[int, str] = field(default_factory=dict)
    """Special tokens that the text holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReader:
    """Reads bodies, all but `model`, for one engine; raises HttpError 400 for what it cannot serve.

    That is a field that is wrong, unknown or unsupported, a message that is no text, or what the template refuses.
    """

    tokenizer: Tokenizer
    limits: Limits
    bounds: ServerLimits
    tool_format: ToolFormat | None = None
    """That the model writes."""

    def completion(self, body: CompletionBody) -> GenerationRequest:
        """Read the body of `/v1/completions`."""
        prompt: Any = body.prompt
        several = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
        self.bounds.check_counts(prompts=len(several))
        special = body.add_special_tokens
        prompts = [
            encode_text(self.tokenizer, each, add_special_tokens=special) if isinstance(each, str) else each
            for each in several
        ]
        return self._read(body, prompts)

    def chat(self, body: ChatBody) -> GenerationRequest:
        """Read the body of `/v1/chat/completions`."""
        if body.top_logprobs and not body.logprobs:
            raise HttpError(400, "top_logprobs needs logprobs=true", param="top_logprobs", code="invalid_value")
        prompt = self.chat_tokens(body)
        tools = read_tools(
            body.tools or (), body.tool_choice, parallel=body.parallel_tool_calls, found=self.tool_format
        )
        old, new = body.max_tokens, body.max_completion_tokens
        if old is not None and new is not None and old != new:
            message = f"max_tokens={old} and max_completion_tokens={new} are two names of one thing: send one"
            raise HttpError(400, message, param="max_completion_tokens", code="invalid_value")
        return self._read(body, [prompt], tools)

    def chat_tokens(self, body: ConversationBody) -> list[int]:
        """Return the token ids of a chat's prompt."""
        if not body.messages:
            message = "messages must be a list of at least one message"
            raise HttpError(400, message, param="messages", code="missing_field")
        variables = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", body.reasoning_effort)
        continued, opened, param = body.continue_final_message, body.add_generation_prompt, "required_prefix_token_ids"
        prefix = body.required_prefix_token_ids or ()
        try:
            check_token_ids(prefix, vocab_size=self.limits.vocab_size, name=param)
            return encode_chat(
                self.tokenizer,
                [_message(index, message) for index, message in enumerate(body.messages)],
                add_generation_prompt=not continued if opened is None else opened,
                continue_final_message=continued,
                tools=body.tools,
                template_kwargs=variables,
                required_prefix_token_ids=prefix,
            )
        except PromptError as error:
            param = param if str(error).startswith(param) else "messages"
            raise HttpError(400, str(error), param=param, code="invalid_value") from None

    def _read(
        self, body: CompletionBody | ChatBody, prompts: Sequence[list[int]], tools: ToolUse | None = None
    ) -> GenerationRequest:
        """Read what both have in common, and what has another name in each."""
        max_tokens, most = body.max_tokens, math.inf
        if isinstance(body, CompletionBody):
            logp, top, most = body.logprobs is not None, body.logprobs, COMPLETION_TOKENS
        else:
            logp, top = body.logprobs, body.top_logprobs
            max_tokens = max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        given = body.model_dump(include=SAMPLING, exclude_none=True)
        if body.top_k == -1:
            given["top_k"] = 0  # vLLM's other way to say: all of them
        given |= {"n": 1 if body.n is None else body.n, "top_logp": top or 0}
        given |= _grammar(body, tools)
        if body.stream_options and not body.stream:
            raise HttpError(400, "stream_options needs stream=true", param="stream_options", code="invalid_value")
        tokenizer, kept = self.tokenizer, {}
        if not body.skip_special_tokens:
            kept = {token: str(tokenizer.convert_ids_to_tokens(token)) for token in tokenizer.all_special_ids}
        elif tools is not None and tools.format is not None:  # what opens a call is a special token of some models
            opening = tokenizer.convert_tokens_to_ids(TOOL_FORMATS[tools.format])
            kept = {opening: TOOL_FORMATS[tools.format]} if opening in tokenizer.all_special_ids else {}
        context = self.limits.max_length or math.inf
        if max_tokens is None and most == context:
            message = "max_tokens is needed: this engine knows no end of the context, to which it would default"
            raise HttpError(400, message, param="max_tokens", code="missing_field")
        self.bounds.check_words(given)
        self.bounds.check_counts(prompts=len(prompts), n=given["n"])
        try:
            # The number of tokens is each prompt's own, and is checked below.
            spread = Sampling(max_new_tokens=1, **given).spread(len(prompts))
            # To the end of the context at most; 1 where it is full already, so that the check of it speaks.
            rooms = [max(1, context - len(prompt)) for prompt in prompts]
            lengths = [int(min(most, room)) if max_tokens is None else max_tokens for room in rooms]
            samplings = [
                replace(each, max_new_tokens=length, min_new_tokens=body.min_tokens or 0)
                for each, length in zip(spread, lengths, strict=True)
            ]
            requests = make_requests(prompts, samplings, self.limits)
        except ValueError as error:
            raise from_engine(error) from None
        return GenerationRequest(body=body, requests=requests, logp=logp, tools=tools, kept=kept)


def _grammar(body: GenerationBody, tools: ToolUse | None) -> dict[str, str]:
    """The argument of Sampling that restricts the text: by the forced call, by OpenAI's field, or by vLLM's."""
    grammars: list[dict[str, str]] = []
    if tools is not None and tools.schema is not None:
        grammars.append({"json_schema": json.dumps(tools.schema)})
    match body.response_format or {"type": "text"}:
        case {"type": "text"}:
            pass
        case {"type": "json_object"}:
            grammars.append({"json_schema": json.dumps({"type": "object"})})
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            grammars.append({"json_schema": json.dumps(schema)})
        case other:
            message = f"response_format must be text, json_object, or json_schema with a schema; got {shortened(other)}"
            raise HttpError(400, message, param="response_format", code="unsupported_field")
    if grammars and tools is not None and (body.response_format or {}).get("type", "text") != "text":
        message = "response_format would forbid every call of a tool: send tool_choice='none', or no response_format"
        raise HttpError(400, message, param="response_format", code="unsupported_field")
    for name, value in (body.structured_outputs or {}).items():
        match name, value:
            case "json", dict() | str():
                grammars.append({"json_schema": value if isinstance(value, str) else json.dumps(value)})
            case "regex", str():
                grammars.append({"regex": value})
            case "choice", [_, *_] if all(isinstance(each, str) for each in value):
                grammars.append({"regex": "|".join(f"(?:{re.escape(each)})" for each in value)})
            case _:
                message = f"structured_outputs takes json, regex or choice; got {name[:80]}={shortened(value)}"
                raise HttpError(400, message, param="structured_outputs", code="unsupported_field")
    if len(grammars) > 1:
        given = [name for name in ("response_format", "structured_outputs") if getattr(body, name)]
        message = f"{' and '.join(given)} name {len(grammars)} grammars, and a response follows one"
        raise HttpError(400, message, param=given[-1], code="invalid_value")
    return grammars[0] if grammars else {}


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates take it: content is one string, arguments of calls are objects, developers are system."""
    where, written = f"messages[{index}]", dict(message)
    calls, content = message.get("tool_calls"), message.get("content")
    if not isinstance(message.get("role"), str):
        raise HttpError(400, f"{where} needs a role, a string", param=f"{where}.role", code="missing_field")
    if message["role"] == "developer":
        written["role"] = "system"
    if calls:
        written["tool_calls"] = _calls_for_template(calls, where)
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) and part.get("type") in TEXT_PARTS else {} for part in content]
        texts = [part.get("text", part.get("refusal")) for part in parts]
        content = "\n".join(map(str, texts)) if texts and all(isinstance(text, str) for text in texts) else None
    elif content is None and calls:
        content = ""
    if not isinstance(content, str):
        wrong = f"{where}.content must be a string, or parts of type 'text', since the model reads text alone"
        raise HttpError(400, wrong, param=f"{where}.content", code="invalid_type")
    return {**written, "content": content}


def _calls_for_template(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls whose arguments are objects, as templates of Hugging Face expect, not JSON text, as OpenAI sends."""
    try:
        functions = [dict(call["function"]) for call in calls]
        for function in functions:
            if isinstance(function["arguments"], str):
                function["arguments"] = json.loads(function["arguments"] or "{}")
        return [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
    except (KeyError, TypeError, ValueError):
        message = f"{where}.tool_calls must hold functions with a name and arguments, a JSON text"
        raise HttpError(400, message, param=f"{where}.tool_calls", code="invalid_type") from None


def shortened(value: object) -> str:
    """Write a JSON value for a message, which shall not echo megabytes."""
    text = json.dumps(value) if not isinstance(value, float) or math.isfinite(value) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_json(content: bytes) -> dict[str, Any]:
    """Read the JSON object that a body is; HttpError 400 where it is none."""
    try:
        fields = json.loads(content, parse_constant=_refuse_constant, object_pairs_hook=_refuse_duplicates)
        if b"\\ud" in content.lower():  # half of a surrogate pair is JSON, but no text
            json.dumps(fields, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise HttpError(400, f"the body must be a JSON object; got {type(fields).__name__}", code="invalid_json")
    return fields


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        message = f"the field {shortened(twice)} stands twice in one object of the body: only one would count"
        raise HttpError(400, message, param=twice[:80], code="invalid_json")
    return fields


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
