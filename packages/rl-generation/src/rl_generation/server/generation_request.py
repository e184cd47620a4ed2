"""What a client asks to be generated, from the fields of its body. Does not run anything.

The fields are OpenAI's, and vLLM's extensions of them. Where the two differ from this package: `max_tokens` missing
means the rest of the context in both routes, and of several prompts in one request each draws by its own seed
(`Sampling.spread`), so that a request is answered as `engine.generate(prompts, sampling)` would.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from rl_generation.chat import encode_chat, encode_text
from rl_generation.errors import PromptError
from rl_generation.requests import Limits, Request, Sampling, check_token_ids, make_requests
from rl_generation.server.errors import HttpError, from_engine
from rl_generation.server.fields import Fields, is_token_ids, shortened
from rl_generation.server.limits import ServerLimits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["GenerationRequest", "read_chat", "read_chat_tokens", "read_completion", "read_text_tokens"]

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


def read_completion(
    fields: Fields, *, tokenizer: "PreTrainedTokenizerBase", limits: Limits, bounds: ServerLimits
) -> GenerationRequest:
    """Read the body of `/v1/completions`, all but `model`.

    Raises:
        HttpError: 400; a field is wrong, unknown or unsupported, or the engine cannot serve what it asks for.
    """
    add_special_tokens = fields.flag("add_special_tokens", default=True)
    logp = fields.integer("logprobs")
    if logp:
        message = f"logprobs={logp} asks for other tokens' too; only logprobs=0, the sampled token's own, is supported"
        raise HttpError(400, message, param="logprobs", code="unsupported_field")
    prompts = [
        encode_text(tokenizer, prompt, add_special_tokens=add_special_tokens) if isinstance(prompt, str) else prompt
        for prompt in _prompts(fields.anything("prompt"), bounds)
    ]
    max_tokens = fields.integer("max_tokens")
    return _read(fields, prompts, max_tokens=max_tokens, logp=logp is not None, limits=limits, bounds=bounds)


def read_chat(
    fields: Fields, *, tokenizer: "PreTrainedTokenizerBase", limits: Limits, bounds: ServerLimits
) -> GenerationRequest:
    """Read the body of `/v1/chat/completions`, all but `model`.

    Raises:
        HttpError: 400, as for `read_completion`.
    """
    logp = fields.flag("logprobs", default=False)
    prompt = read_chat_tokens(fields, tokenizer=tokenizer, limits=limits)
    old, new = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
    if old is not None and new is not None and old != new:
        message = f"max_tokens={old} and max_completion_tokens={new} are two names of one thing: send one"
        raise HttpError(400, message, param="max_completion_tokens", code="invalid_value")
    return _read(fields, [prompt], max_tokens=old if new is None else new, logp=logp, limits=limits, bounds=bounds)


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
    if fields.anything("tool_choice") not in (("none",) if tools else (None, "none", "auto")):
        message = (
            "the tools reach the chat template, but calls are not parsed: send tool_choice='none' to get them as text "
            "in content"
        )
        raise HttpError(400, message, param="tool_choice", code="unsupported_field")
    prefix = fields.token_ids("required_prefix_token_ids") or ()
    try:
        check_token_ids(prefix, vocab_size=limits.vocab_size, name="required_prefix_token_ids")
        return encode_chat(
            tokenizer,
            [_message(index, message) for index, message in enumerate(messages)],
            add_generation_prompt=fields.flag("add_generation_prompt", default=not continued),
            continue_final_message=continued,
            tools=tools,
            template_kwargs=fields.mapping("chat_template_kwargs"),
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
    max_tokens: int | None,
    logp: bool,
    limits: Limits,
    bounds: ServerLimits,
) -> GenerationRequest:
    n = fields.integer("n")
    stream = fields.flag("stream", default=False)
    include_usage = _include_usage(fields, stream=stream)
    settings = _settings(fields)
    words = sum(len(settings.get(name, ())) for name in LOOKED_FOR)
    if words > bounds.max_stop_and_bad_words:
        message = f"{words} of {' + '.join(LOOKED_FOR)}; max_stop_and_bad_words is {bounds.max_stop_and_bad_words} here"
        raise HttpError(400, message, param="stop", code="too_many_words")
    token_ids = fields.flag("return_token_ids", default=False)
    tokens_as_token_ids = fields.flag("return_tokens_as_token_ids", default=False)
    include_stop_string = fields.flag("include_stop_str_in_output", default=False)
    fields.refuse_others()
    answers = len(prompts) * (1 if n is None else n)
    if answers > bounds.max_answers:
        message = f"{len(prompts)} prompts with n={n} ask for {answers} answers; the limit here is {bounds.max_answers}"
        raise HttpError(400, message, param="n", code="too_many_answers")
    try:
        # The number of tokens is each prompt's own, and is checked below.
        sampling = Sampling(max_new_tokens=1, n=1 if n is None else n, **settings)
        samplings = [
            replace(each, max_new_tokens=_room(prompt, limits) if max_tokens is None else max_tokens)
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
    )


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
    }
    return {name: value for name, value in settings.items() if value is not None}


def _include_usage(fields: Fields, *, stream: bool) -> bool:
    options = fields.mapping("stream_options") or {}
    if options and not stream:
        raise HttpError(400, "stream_options needs stream=true", param="stream_options", code="invalid_value")
    for name, value in options.items():
        if name != "include_usage" or not isinstance(value, bool):
            message = f"stream_options holds include_usage, true or false; got {name[:80]}={shortened(value)}"
            raise HttpError(400, message, param=f"stream_options.{name[:80]}", code="unknown_field")
    return bool(options.get("include_usage", False))


def _room(prompt: Sequence[int], limits: Limits) -> int:
    """Tokens until the context is full; 1 where it is already, so that the check of the context speaks."""
    if limits.max_length is None:
        message = "max_tokens is needed: this engine knows no end of the context, to which it would default"
        raise HttpError(400, message, param="max_tokens", code="missing_field")
    return max(1, limits.max_length - len(prompt))


def _prompts(prompt: Any, bounds: ServerLimits) -> list[Any]:
    """Of the four shapes of a prompt, the list of prompts: each text or token ids."""
    if isinstance(prompt, str) or (prompt and is_token_ids(prompt)):
        return [prompt]
    if isinstance(prompt, list) and len(prompt) > bounds.max_prompts:
        message = f"prompt holds {len(prompt)} prompts; the limit here is {bounds.max_prompts}"
        raise HttpError(400, message, param="prompt", code="too_many_prompts")
    if isinstance(prompt, list) and prompt and all(isinstance(each, str) or is_token_ids(each) for each in prompt):
        return prompt
    message = (
        "prompt must be a string, a list of token ids, or a list of such, not empty; token ids are integers of at "
        "least 0"
    )
    raise HttpError(400, message, param="prompt", code="missing_field" if prompt is None else "invalid_type")


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is a string: templates of text models take no other."""
    content, where = message.get("content"), f"messages[{index}]"
    if not isinstance(message.get("role"), str):
        raise HttpError(400, f"{where} needs a role, a string", param=f"{where}.role", code="missing_field")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    if (
        isinstance(content, list)
        and len(content) == 1
        and isinstance(content[0], dict)
        and content[0].get("type") == "text"
        and isinstance(content[0].get("text"), str)
    ):
        return {**message, "content": content[0]["text"]}
    wrong = f"{where}.content must be a string, or one part of type 'text': several have no one way to be joined"
    raise HttpError(400, wrong, param=f"{where}.content", code="invalid_type")
