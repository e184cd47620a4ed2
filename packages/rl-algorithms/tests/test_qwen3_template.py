"""Qwen3's own template, which renders earlier turns without their thinking: every turn is taught as it is sampled."""

from pathlib import Path

import pytest

from rl_algorithms.chat import Chat
from rl_algorithms.data import ConversationRow, DataError, make_row

tokenizers = pytest.importorskip("tokenizers", reason="templates are rendered by real tokenizers")
transformers = pytest.importorskip("transformers", reason="templates are rendered by real tokenizers")

TEMPLATE = (Path(__file__).parent / "templates" / "qwen3.jinja").read_text()
SPECIAL = ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {}}},)


def make_chat(template=TEMPLATE, **options):
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIAL, *alphabet, "ĊĊ", "th", "in"]
    merges = [("Ċ", "Ċ"), ("t", "h"), ("i", "n")]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={word: token for token, word in enumerate(words)}, merges=merges)
    )
    # As Qwen's: line breaks stay together, whatever follows them.
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\s*[\r\n]+|\s+(?!\S)|\s+|\w+|[^\s\w]+"), "isolated")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=template
    )
    return Chat(fast, prompt_format="chat", stop_token_ids=(0,), **options), fast


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


def thinks(content, thought, **more):
    return turn("assistant", content, reasoning_content=thought, **more)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TALKS = {
    "plain": (
        [turn("system", "Be brief."), turn("user", "2+2?"), turn("assistant", "4"), turn("user", "1+1?")],
        [turn("assistant", "2"), turn("user", "0+0?"), turn("assistant", "0")],
        ["<think>\n\n</think>\n\n4", "<think>\n\n</think>\n\n2", "<think>\n\n</think>\n\n0"],
    ),
    "thinking": (
        [turn("user", "2+2?"), thinks("4", "so\nso")],
        [turn("user", "1+1?"), turn("assistant", "<think>\nah\n</think>\n\n2"), turn("user", "0?"), thinks("0", "hm")],
        ["<think>\nso\nso\n</think>\n\n4", "<think>\nah\n</think>\n\n2", "<think>\nhm\n</think>\n\n0"],
    ),
    "tools": (
        [turn("user", "1+2?"), thinks("I add.", "use it", tool_calls=[CALL]), turn("tool", "3"), turn("tool", "4")],
        [turn("assistant", "", tool_calls=[CALL]), turn("tool", "3"), thinks("3", "done"), turn("user", "thanks")],
        [
            f"<think>\nuse it\n</think>\n\nI add.\n{CALLED}",
            f"<think>\n\n</think>\n\n{CALLED}",
            "<think>\ndone\n</think>\n\n3",
        ],
    ),
}
every_talk = pytest.mark.parametrize("name", TALKS)


def row_of(messages, **more):
    return ConversationRow(messages=tuple(messages), columns={}, where="talks.jsonl:4", **more)


def as_sampled(chat, tokenizer, messages, said, tools):
    """The row that an episode of several turns makes of these answers: tokens in, tokens out."""
    answers = [place for place, each in enumerate(messages) if each["role"] == "assistant"]
    start = {"prompt": messages[: answers[0]], "tools": list(tools)}
    tokens = list(chat.prompt(make_row(start, where="row 0")).tokens)
    mask = [False] * len(tokens)
    history = list(messages[: answers[0]])
    for number, place in enumerate(answers):
        sampled = [*tokenizer(said[number], add_special_tokens=False)["input_ids"], 0]
        tokens += sampled
        mask += [True] * len(sampled)
        if number + 1 < len(answers):
            observed = messages[place + 1 : answers[number + 1]]
            between = chat.observation(history, sampled, observed, tools=tools)
            tokens += between
            mask += [False] * len(between)
            history += [turn("assistant", said[number]), *observed]
    return tokens, mask


@every_talk
def test_a_conversation_is_token_for_token_what_would_have_been_sampled(name):
    first, rest, said = TALKS[name]
    tools = TOOLS if name == "tools" else ()
    chat, tokenizer = make_chat()
    made = chat.conversation(row_of([*first, *rest], tools=tools))
    tokens, mask = as_sampled(chat, tokenizer, [*first, *rest], said, tools)
    assert tokenizer.decode(made.tokens) == tokenizer.decode(tokens)
    assert list(made.tokens) == tokens
    assert list(made.trainable) == mask


@every_talk
def test_messages_that_are_not_learnt_stand_in_the_context_alone(name):
    first, rest, said = TALKS[name]
    tools = TOOLS if name == "tools" else ()
    chat, tokenizer = make_chat()
    messages = [*first, *rest]
    place = next(place for place, each in enumerate(messages) if each["role"] == "assistant")
    messages[place] = {**messages[place], "train": False}
    made = chat.conversation(row_of(messages, tools=tools))
    whole = chat.conversation(row_of([*first, *rest], tools=tools))
    assert made.tokens == whole.tokens
    trained = tokenizer.decode([token for token, each in zip(made.tokens, made.trainable, strict=True) if each])
    assert trained == "".join(f"{each}<|im_end|>" for each in said[1:])


def test_without_thinking_the_empty_thought_is_the_prompts():
    first, rest, _ = TALKS["plain"]
    chat, tokenizer = make_chat(template_options={"enable_thinking": False})
    made = chat.conversation(row_of([*first, *rest]))
    trained = tokenizer.decode([token for token, each in zip(made.tokens, made.trainable, strict=True) if each])
    assert trained == "4<|im_end|>2<|im_end|>0<|im_end|>"
    assert tokenizer.decode(made.tokens).count("<think>\n\n</think>") == 3


FORGETS = (
    "{% for message in messages %}{% if message.role != 'assistant' or loop.last %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
COUNTS = (
    "{{ messages | length if enable_thinking is not defined else '' }}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_where_a_template_cannot_be_masked_the_advice_works():
    row = row_of([turn("user", "2+2?"), turn("assistant", "4"), turn("user", "1+1?"), turn("assistant", "2")])
    chat, _ = make_chat(FORGETS)
    with pytest.raises(DataError, match=r"use train_on='last_turn', or a template that only appends") as told:
        chat.conversation(row)
    assert "enable_thinking" not in str(told.value)
    assert any(chat.conversation(row, train_on="last_turn").trainable)
    chat, _ = make_chat(COUNTS)
    with pytest.raises(DataError, match=r"use template_options=\{'enable_thinking': False\} .*, or a template") as told:
        chat.conversation(row)
    assert "last_turn" not in str(told.value)
    chat, _ = make_chat(COUNTS, template_options={"enable_thinking": False})
    assert sum(chat.conversation(row).trainable) == 4
