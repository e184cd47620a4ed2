"""Text to token ids and back, with a tokenizer of transformers.

Multi-turn: the tokens that a policy sampled, decoded and encoded again, may come out as others (`h`, `e` against `he`),
and training on those would be training on something that was never sampled. `encode_chat` therefore takes the exact
tokens of the conversation so far, `required_prefix_token_ids`, and takes only what comes after them from the chat
template. The idea is NeMo-RL's (github.com/NVIDIA-NeMo/RL, `required_prefix_token_ids`), which cuts at the last
end-of-sequence token whatever stands before it; here the text on both sides of the cut is compared.

    template:  t[0] … t[k-1] | t[k] …          required prefix:  r[0] … r[m-1]
    result:    r[0] … r[m-1] | t[k] …          where decode(t[:k]) = decode(r), beside an added token
"""

import bisect
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_generation.detokenizer import Tokenizer, answer_text, decode
from rl_generation.errors import PromptError
from rl_generation.rollout import Rollout

Message = Mapping[str, Any]
"""One message of a conversation as chat templates take it: `role`, `content`, and what else the template knows."""

# A character of the private use area, which no template writes: where two renderings part, the mark was put.
MARK = "\ue000"


def encode_text(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Return the token ids of `text`, with those that the tokenizer puts around every text, such as bos."""
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    required_prefix_token_ids: Sequence[int] = (),
) -> list[int]:
    """Return the token ids of a conversation, as the tokenizer's chat template writes it.

    Args:
        tokenizer: Has a chat template.
        messages: The conversation; at least one.
        add_generation_prompt: Ends with what opens an assistant's message.
        continue_final_message: Leaves the last message open instead, for the model to go on with.
        tools: JSON schemas of functions, for templates that know tools.
        template_kwargs: Further variables of the template, such as `enable_thinking`; it must know each.
        required_prefix_token_ids: The exact tokens of the conversation up to the end of the last assistant's message:
            the prompt of the last turn, then what the model answered. The result starts with them.

    Raises:
        PromptError: There is no template; the template refuses the messages or does not know a variable; or the
            required prefix is not the text that the template writes, or ends before the last assistant's message does.
    """
    if not tokenizer.chat_template:
        raise PromptError("the tokenizer has no chat template: set tokenizer.chat_template, or send a prompt instead")
    import jinja2

    # What would not reach the template, would replace it, or is spelt as nothing in it, is refused.
    template = tokenizer.chat_template
    source = "\n".join(template.values()) if isinstance(template, dict) else template
    reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map}
    for name in template_kwargs or {}:
        if name in reserved:
            raise PromptError(f"{name!r} is not a variable of the chat template for the caller to set")
        if not re.search(rf"\b{re.escape(name)}\b", source):
            raise PromptError(f"the chat template does not know the variable {name!r}, and would ignore it")

    functions: Any = list(tools) if tools else None

    def encode(conversation: Sequence[Message]) -> list[int]:
        try:
            # Of transformers 5 the default is a dictionary, of 4 a list; both know return_dict.
            ids = tokenizer.apply_chat_template(
                [dict(message) for message in conversation],
                tokenize=True,
                return_dict=False,
                tools=functions,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(template_kwargs or {}),
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise PromptError(f"the chat template refuses these messages: {error}") from error
        return list(ids)

    template_ids = encode(messages)
    if not required_prefix_token_ids:
        return template_ids
    return put_required_prefix(
        template_ids, required_prefix_token_ids, messages=messages, encode=encode, tokenizer=tokenizer
    )


def put_required_prefix(
    template_ids: Sequence[int],
    required_prefix_token_ids: Sequence[int],
    *,
    messages: Sequence[Message],
    encode: Callable[[Sequence[Message]], Sequence[int]],
    tokenizer: Tokenizer,
) -> list[int]:
    """`with_required_prefix`, for what `encode` makes of messages: refuses a prefix that ends before their last answer.

    Raises:
        PromptError: As `with_required_prefix`; or it ends there, or there is no answer, or none that ends with text.
    """
    answers = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    if not answers:
        raise PromptError(
            "required_prefix_token_ids hold the conversation up to its last assistant's message, and none of the "
            f"{len(messages)} messages has the role 'assistant': leave them out in the first turn"
        )
    last = answers[-1]
    marked = [*messages[:last], _marked(messages[last], index=last), *messages[last + 1 :]]
    result = with_required_prefix(template_ids, required_prefix_token_ids, tokenizer=tokenizer)
    other = list(encode(marked))
    if other == list(template_ids):
        # The template leaves the content out, as some do beside tool calls: known is only where the answer begins.
        other = list(encode(messages[:last])) if last else []
    answer_end = _common(_text(tokenizer, template_ids), _text(tokenizer, other))
    if len(_text(tokenizer, required_prefix_token_ids)) < answer_end:
        raise PromptError(
            f"required_prefix_token_ids end before message {last}, the last of the assistant's, does: its "
            f"tokens would be guessed. Give the prompt and the answer of the last turn, not of an earlier one"
        )
    return result


def with_required_prefix(
    template_ids: Sequence[int], required_prefix_token_ids: Sequence[int], *, tokenizer: Tokenizer
) -> list[int]:
    """Put `required_prefix_token_ids` in the place of the tokens of `template_ids` that decode to the same text.

    The cut lies before or after an added token (an end-of-turn token is one), over which no merge reaches, so that what
    follows is encoded as it would be after any prefix. A prefix may hold the end-of-turn token or, where the answer was
    cut off by its length, not; the template's then follows.

    Raises:
        PromptError: No such cut exists; says where the two texts part.
    """
    wanted = _text(tokenizer, required_prefix_token_ids)
    added = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    cuts = sorted({cut for place, token in enumerate(template_ids) if token in added for cut in (place, place + 1)})
    found = bisect.bisect_left(cuts, len(wanted), key=lambda cut: len(_text(tokenizer, template_ids[:cut])))
    if found < len(cuts) and _text(tokenizer, template_ids[: cuts[found]]) == wanted:
        return [*required_prefix_token_ids, *template_ids[cuts[found] :]]
    written = _text(tokenizer, template_ids)
    same = _common(wanted, written)
    if same == len(wanted):
        raise PromptError(
            f"required_prefix_token_ids end at {wanted[-20:]!r}, where the template goes on with "
            f"{written[same : same + 20]!r} without an end-of-turn or other added token between them: give the whole "
            f"answer as it was sampled"
        )
    raise PromptError(
        f"required_prefix_token_ids are not what the template writes: from character {same} on they say "
        f"{wanted[same : same + 40]!r}, the template {written[same : same + 40]!r}. Send each answer as the text of "
        f"all its tokens; where the template itself changes earlier answers (many drop the reasoning), send the whole "
        f"prompt as token ids instead"
    )


def decode_rollout(
    tokenizer: Tokenizer,
    rollout: Rollout,
    *,
    prompt: Sequence[int] = (),
    skip_special_tokens: bool = True,
    include_stop_string: bool = False,
) -> str:
    """Return the text of an answer, up to the stop string that ended it where one did.

    Args:
        tokenizer: The one that the engine stops with.
        rollout: The answer.
        prompt: Token ids that it answers, behind which it is read: many tokenizers (Llama 2's, Mistral's) drop the
            space with which a text begins, and give it to an answer only behind its prompt.
        skip_special_tokens: Leaves special tokens out.
        include_stop_string: Cuts after the stop string, not before it.

    Raises:
        ValueError: The text does not hold that stop string: this is not the tokenizer that the engine stopped with, or
            the prompt is missing or another one.
    """
    text = answer_text(tokenizer, rollout.tokens, prompt=prompt, skip_special_tokens=skip_special_tokens)
    if not isinstance(rollout.stop_reason, str):
        return text
    start = text.find(rollout.stop_reason)
    if start < 0:
        raise ValueError(
            f"the answer ended at the stop string {rollout.stop_reason!r}, which its text {text[-40:]!r} does not "
            f"hold: decode it with the engine's own tokenizer, and give the prompt that it answers"
        )
    return text[: start + len(rollout.stop_reason) if include_stop_string else start]


def _marked(message: Message, *, index: int) -> Message:
    """Return `message` with the mark behind its text."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return {**message, "content": content + MARK}
    last = content[-1] if isinstance(content, list) else None
    if not isinstance(last, Mapping) or not isinstance(last.get("text"), str):
        raise PromptError(
            f"message {index} has the content {content!r}, which does not end with text: beside "
            f"required_prefix_token_ids, an answer is a string, or a list whose last part is "
            f"{{'type': 'text', 'text': …}}"
        )
    return {**message, "content": [*content[:-1], {**last, "text": last["text"] + MARK}]}


def _common(first: str, second: str) -> int:
    """Characters with which both begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def _text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    return decode(tokenizer, tokens, skip_special_tokens=False)
