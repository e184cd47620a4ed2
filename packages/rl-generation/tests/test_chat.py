"""Text and token ids of conversations; the tokenizer is a real one, learnt from a few words."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent / "programs"))

import speaking

from rl_generation.chat import decode_rollout, encode_chat, encode_text, with_required_prefix
from rl_generation.errors import PromptError
from rl_generation.rollout import Rollout, VersionSpan

TOKENIZER = speaking.tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
QUESTION = {"role": "user", "content": "hello there"}
FOLLOW_UP = {"role": "user", "content": "how?"}
PROMPT = encode_chat(TOKENIZER, [QUESTION])


def spelled(text):
    """Token ids of `text`, a token a byte: what a policy may sample, and no tokenizer writes."""
    bytes_to_unicode = TOKENIZER.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    return [TOKENIZER.convert_tokens_to_ids(letter) for piece, _ in bytes_to_unicode(text) for letter in piece]


def answered(text):
    return [QUESTION, {"role": "assistant", "content": text}, FOLLOW_UP]


def rollout(tokens, stop_reason=None):
    return Rollout(
        tokens=tuple(tokens),
        logp=(-1.0,) * len(tokens),
        logp_of="sampled",
        finish_reason="length" if stop_reason is None else "stop",
        stop_reason=stop_reason,
        versions=(VersionSpan(version=0, start=0, end=len(tokens)),),
    )


def test_a_chat_is_the_tokens_of_what_its_template_writes():
    text = "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n"
    assert encode_chat(TOKENIZER, [QUESTION]) == encode_text(TOKENIZER, text, add_special_tokens=False)
    assert TOKENIZER.decode(encode_chat(TOKENIZER, [QUESTION], add_generation_prompt=False)).endswith("<|im_end|>\n")


def test_a_final_message_can_be_left_open():
    begun = [QUESTION, {"role": "assistant", "content": "well"}]
    tokens = encode_chat(TOKENIZER, begun, add_generation_prompt=False, continue_final_message=True)
    assert TOKENIZER.decode(tokens).endswith("assistant\nwell")


def test_variables_and_tools_reach_the_template():
    polite = encode_chat(TOKENIZER, [QUESTION], template_kwargs={"polite": True})
    assert TOKENIZER.decode(polite).endswith("assistant\ndear ")
    assert '"look"' in TOKENIZER.decode(encode_chat(TOKENIZER, [QUESTION], tools=[{"name": "look"}]))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("politely", "does not know"), ("chat_template", "not a variable"), ("eos_token", "not a variable")],
)
def test_a_variable_that_the_template_would_not_see_is_refused(name, reason):
    with pytest.raises(PromptError, match=rf"{reason}|{name}.*{reason}"):
        encode_chat(TOKENIZER, [QUESTION], template_kwargs={name: True})


def test_a_tokenizer_without_a_template_is_refused():
    bare = speaking.tokenizer()
    bare.chat_template = None
    with pytest.raises(PromptError, match="no chat template"):
        encode_chat(bare, [QUESTION])


def test_what_the_template_refuses_is_an_error_of_the_prompt():
    picky = speaking.tokenizer()
    picky.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(PromptError, match="roles must alternate"):
        encode_chat(picky, [QUESTION])
    with pytest.raises(PromptError, match="the chat template refuses these messages"):
        encode_chat(TOKENIZER, [{"role": "user", "content": None}])


def test_encoding_an_answer_again_gives_other_tokens_and_the_required_prefix_keeps_them():
    sampled = [*spelled("hello there"), END]
    assert sampled[:-1] != encode_text(TOKENIZER, "hello there", add_special_tokens=False)
    guessed = encode_chat(TOKENIZER, answered("hello there"))
    kept = encode_chat(TOKENIZER, answered("hello there"), required_prefix_token_ids=PROMPT + sampled)
    assert guessed != kept
    assert TOKENIZER.decode(guessed) == TOKENIZER.decode(kept)
    assert kept[: len(PROMPT) + len(sampled)] == PROMPT + sampled
    tail = kept[len(PROMPT) + len(sampled) :]
    assert guessed[-len(tail) :] == tail


def test_an_answer_that_was_cut_off_is_closed_by_the_template():
    sampled = spelled("hello th")
    kept = encode_chat(TOKENIZER, answered("hello th"), required_prefix_token_ids=PROMPT + sampled)
    closed = encode_chat(TOKENIZER, answered("hello th"), required_prefix_token_ids=[*PROMPT, *sampled, END])
    assert kept == closed


@given(data=st.data(), text=st.text("helo wr,ö你🙂", min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_any_encoding_of_an_answer_is_kept_to_the_token(data, text):
    letters = spelled(text)
    sampled = []
    while letters:  # merge some neighbours, as a policy that samples from all tokens may
        size = data.draw(st.integers(1, min(3, len(letters))))
        merged = TOKENIZER.convert_tokens_to_ids("".join(TOKENIZER.convert_ids_to_tokens(letters[:size])))
        sampled += [merged] if merged is not None else letters[:size]
        letters = letters[size:]
    prefix = [*PROMPT, *sampled, END]
    kept = encode_chat(TOKENIZER, answered(text), required_prefix_token_ids=prefix)
    assert kept[: len(prefix)] == prefix
    assert TOKENIZER.decode(kept) == TOKENIZER.decode(encode_chat(TOKENIZER, answered(text)))


def test_a_third_turn_keeps_the_first_two():
    first = [*PROMPT, *spelled("hello"), END]
    second = encode_chat(TOKENIZER, answered("hello"), required_prefix_token_ids=first)
    whole = [*second, *spelled("there"), END]
    messages = [*answered("hello"), {"role": "assistant", "content": "there"}, FOLLOW_UP]
    assert encode_chat(TOKENIZER, messages, required_prefix_token_ids=whole)[: len(whole)] == whole
    with pytest.raises(PromptError, match=r"end before message 3, the last of the assistant's"):
        encode_chat(TOKENIZER, messages, required_prefix_token_ids=first)


def test_a_prefix_of_another_text_is_refused_and_the_place_named():
    with pytest.raises(PromptError, match=r"from character 61 on they say '!hello.*, the template 'hello"):
        encode_chat(TOKENIZER, answered("hello"), required_prefix_token_ids=[*PROMPT, *spelled("!hello"), END])


def test_a_template_that_changes_earlier_answers_is_refused():
    forgetful = speaking.tokenizer()
    forgetful.chat_template = forgetful.chat_template.replace("message.content", "message.content.split('.')[-1]")
    sampled = [*spelled("hm.hello"), END]
    with pytest.raises(PromptError, match="changes earlier answers"):
        encode_chat(forgetful, answered("hm.hello"), required_prefix_token_ids=PROMPT + sampled)


def test_a_prefix_that_ends_inside_a_message_is_refused():
    with pytest.raises(PromptError, match="give the whole answer as it was sampled"):
        with_required_prefix(encode_chat(TOKENIZER, answered("hello")), PROMPT + spelled("hel"), tokenizer=TOKENIZER)


def test_a_prefix_needs_an_earlier_answer():
    with pytest.raises(PromptError, match="leave them out in the first turn"):
        encode_chat(TOKENIZER, [QUESTION], required_prefix_token_ids=PROMPT)


def calling_tools(*calls):
    """A tokenizer whose template writes tool calls in the place of content, and a conversation with `calls`."""
    calling = speaking.tokenizer()
    calling.chat_template = calling.chat_template.replace(
        "message.content", "(message.tool_calls | tojson if message.tool_calls else message.content)"
    )
    turns = [[{"role": "assistant", "content": "", "tool_calls": [call]}, FOLLOW_UP] for call in calls]
    return calling, [QUESTION, *(message for turn in turns for message in turn)]


def test_the_tokens_of_a_tool_call_are_kept_where_the_template_leaves_its_content_out():
    calling, messages = calling_tools("look")
    prefix = [*PROMPT, *spelled('["look"]'), END]
    kept = encode_chat(calling, messages, required_prefix_token_ids=prefix)
    assert kept[: len(prefix)] == prefix
    assert calling.decode(kept) == calling.decode(encode_chat(calling, messages))


def test_a_prefix_that_ends_before_the_last_tool_call_is_refused():
    calling, messages = calling_tools("look", "there")
    with pytest.raises(PromptError, match=r"end before message 3, the last of the assistant's"):
        encode_chat(calling, messages, required_prefix_token_ids=[*PROMPT, *spelled('["look"]'), END])


def test_a_tool_call_may_open_a_conversation():
    calling, messages = calling_tools("look")
    opening = encode_chat(calling, messages[1:2], add_generation_prompt=False)
    prefix = opening[: opening.index(END) + 1]
    assert encode_chat(calling, messages[1:], required_prefix_token_ids=prefix)[: len(prefix)] == prefix


def test_an_answer_may_be_a_list_of_parts_that_ends_with_text():
    parts = speaking.tokenizer()
    parts.chat_template = parts.chat_template.replace(
        "message.content",
        "(message.content if message.content is string else message.content | map(attribute='text') | join)",
    )
    text = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    prefix = [*PROMPT, *spelled("hello"), END]
    expected = encode_chat(TOKENIZER, answered("hello"), required_prefix_token_ids=prefix)
    assert encode_chat(parts, answered(text), required_prefix_token_ids=prefix) == expected
    with pytest.raises(PromptError, match=r"message 1 has the content .*does not end with text"):
        encode_chat(parts, answered([*text, {"type": "image"}]), required_prefix_token_ids=prefix)


def test_the_text_of_an_answer_has_no_special_tokens_and_ends_before_its_stop_string():
    assert decode_rollout(TOKENIZER, rollout([*spelled("hello"), END], stop_reason=END)) == "hello"
    assert decode_rollout(TOKENIZER, rollout([*spelled("a"), END]), skip_special_tokens=False) == "a<|im_end|>"
    stopped = rollout(spelled("hello there"), stop_reason="lo t")
    assert decode_rollout(TOKENIZER, stopped) == "hel"
    assert decode_rollout(TOKENIZER, stopped, include_stop_string=True) == "hello t"


def test_a_text_without_its_stop_string_was_decoded_by_another_tokenizer():
    with pytest.raises(ValueError, match="decode it with the engine's own tokenizer"):
        decode_rollout(TOKENIZER, rollout(spelled("hello"), stop_reason="bye"))


def sentencepiece_like():
    """A tokenizer as of Llama 2 and Mistral: the space belongs to its word, and is dropped where a text begins."""
    words = ["<s>", "▁the", "▁cat", "s"]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="s"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def test_an_answer_is_read_behind_its_prompt():
    tokenizer, prompt = sentencepiece_like(), [0, 1, 2, 3]
    answer = rollout([1, 2, 1], stop_reason=" cat")
    assert decode_rollout(tokenizer, answer, prompt=prompt) == " the"
    assert decode_rollout(tokenizer, answer, prompt=prompt * 50) == " the"
    assert decode_rollout(tokenizer, answer, prompt=[0]) == "the"
    assert (
        decode_rollout(tokenizer, rollout([1], stop_reason=" the"), prompt=prompt, include_stop_string=True) == " the"
    )
    with pytest.raises(ValueError, match="give the prompt that it answers"):
        decode_rollout(tokenizer, rollout([1], stop_reason=" the"))


def test_a_character_that_the_prompt_began_belongs_to_the_answer():
    smile = [TOKENIZER.convert_tokens_to_ids(letter) for letter in "ðŁĻĤ"]
    for begun in range(4):
        prompt = [*PROMPT, *smile[:begun]]
        assert decode_rollout(TOKENIZER, rollout([*smile[begun:], *spelled("a")]), prompt=prompt) == "🙂a"
    assert decode_rollout(TOKENIZER, rollout(spelled("a")), prompt=[*PROMPT, *smile]) == "a"
