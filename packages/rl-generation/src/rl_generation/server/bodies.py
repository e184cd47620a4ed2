"""What clients send, as pydantic models, each route's with the fields that it reads; all others are refused.

OpenAI's and vLLM's interfaces have many fields; a server that ignores the ones it does not know answers a question that
was not asked. So a field is read, or cannot change the answer, or has its neutral value, or is an error that names it
and the nearest valid one. JSON's null stands for a missing field.
"""

import difflib
import json
import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rl_generation.server.guard import HttpError

__all__ = ["Body", "ChatBody", "CompletionBody", "ResponsesBody", "TokensBody", "read_json", "shortened"]

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": ([],),
    "background": (False,),
    "best_of": (1,),
    "chat_template": (),
    "conversation": (),
    "documents": ([],),
    "echo": (False,),
    "functions": ([],),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "max_tool_calls": (),
    "modalities": (["text"],),
    "previous_response_id": (),
    "priority": (0,),
    "prompt_logprobs": (),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "truncation": ("disabled",),
    "use_beam_search": (False,),
}
"""Fields of OpenAI's or vLLM's that exist but are not served, with the values that ask for nothing."""

IRRELEVANT = frozenset(
    {
        *("metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier"),
        *("store", "user"),
    }
)
"""Fields of OpenAI's on which a response cannot depend; any value is taken, and nothing is stored."""

MOST = 2**63 - 1
"""The largest integer that engines can hold."""

# Types of fields. Their descriptions are what a refusal says that a field must be.
Integer = Annotated[
    Annotated[int, Field(ge=-MOST, le=MOST)] | None, Field(default=None, description="an integer of 64 bits")
]
Number = Annotated[
    Annotated[float, Field(allow_inf_nan=False)] | None, Field(default=None, description="a finite number")
]
Flag = Annotated[bool, Field(description="true or false")]
Text = Annotated[str | None, Field(default=None, description="a string")]
Texts = Annotated[
    list[str] | None,
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
    Field(default=None, description="a string or a list of strings"),
]
TokenId = Annotated[int, Field(ge=0, le=MOST)]
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
            message = f"{name} must be {cls.model_fields[name].description}; got {shortened(given[name])}"
            raise HttpError(400, message, param=name, code="invalid_type") from None
        known = {*cls.model_fields, *others}
        for name, value in (body.model_extra or {}).items():
            if name in others or name in IRRELEVANT:
                continue
            if name not in NEUTRAL:
                near = difflib.get_close_matches(name[:80], sorted(known), n=1, cutoff=0.5)
                meant = f": did you mean {near[0]!r}?" if near else f"; known here: {', '.join(sorted(known))}"
                raise HttpError(400, f"unknown field {name[:80]!r}{meant}", param=name[:80], code="unknown_field")
            # Equality in which true is not 1.
            if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in NEUTRAL[name]):
                neutral = " or ".join(json.dumps(each) for each in NEUTRAL[name]) or "null"
                message = f"{name}={shortened(value)} is not supported; leave it out, or send {neutral}"
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


class StreamOptions(BaseModel):
    """What a stream holds besides; obfuscation pads the chunks of OpenAI's own servers."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationBody(Body):
    """What every route that generates takes. Those of Sampling have its names."""

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
    stream_options: Annotated[
        StreamOptions | None, Field(description="an object with include_usage, true or false")
    ] = None
    return_token_ids: Flag = False
    return_tokens_as_token_ids: Flag = False
    include_stop_str_in_output: Flag = False
    skip_special_tokens: Flag = True


class ManyBody(GenerationBody):
    """What chats and completions take."""

    n: Integer
    max_tokens: Integer
    response_format: Object


class CompletionBody(ManyBody):
    """Of `/v1/completions`."""

    prompt: Annotated[
        str | list[str] | list[TokenId] | list[list[TokenId]] | None,
        Field(description="a string, a list of token ids (integers of at least 0), or a list of such"),
    ] = None
    logprobs: Integer
    add_special_tokens: Flag = True


class ChatBody(ManyBody, ConversationBody):
    """Of `/v1/chat/completions`."""

    logprobs: Flag = False
    top_logprobs: Integer
    max_completion_tokens: Integer
    tool_choice: Any = None
    parallel_tool_calls: Flag = True


class ResponsesBody(GenerationBody):
    """Of `/v1/responses`, which stores nothing."""

    input: Annotated[
        str | list[dict[str, Any]] | None, Field(description="a string or a list of items, each an object")
    ] = None
    instructions: Any = None
    include: Annotated[list[Any] | None, Field(description="a list")] = None
    max_output_tokens: Integer
    text: Object
    reasoning: Object
    tools: Objects
    tool_choice: Any = None
    parallel_tool_calls: Flag = True
    top_logprobs: Integer
    chat_template_kwargs: Object
    required_prefix_token_ids: TokenIds


class TokensBody(ConversationBody):
    """Of `/tokenize` and `/detokenize`."""

    prompt: Text
    add_special_tokens: Flag = True
    return_token_strs: Flag = False
    tokens: TokenIds


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
