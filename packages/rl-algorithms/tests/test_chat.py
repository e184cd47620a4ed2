"""Claims about the way between text and tokens."""

import pytest

from rl_algorithms.chat import Chat
from rl_algorithms.data import DataError, make_row

BEGIN, STOP, USER, ASSISTANT = 0, 1, 2, 3


class Templated:
    """Characters as their code points; `<`, `>` and `|` in a template are the special tokens."""

    chat_template = "yes"
    eos_token_id = STOP
    special = {"^": BEGIN, "|": STOP, "<": USER, ">": ASSISTANT}

    def __init__(self, *, ends_turns=True, strips_prompts=False):
        self.ends_turns, self.strips_prompts = ends_turns, strips_prompts

    def __len__(self):
        return 128

    def __call__(self, text, *, add_special_tokens):
        if "?" in text:
            raise Exception("unknown character")  # what `tokenizers` raises
        return {
            "input_ids": [BEGIN] * add_special_tokens
            + [self.special.get(character, ord(character)) for character in text]
        }

    def apply_chat_template(self, conversation, *, add_generation_prompt, tokenize):
        assert tokenize is False
        text = "^"
        for message in conversation:
            if message["role"] == "system":
                raise ValueError("System role not supported")
            if message["role"] == "user":
                text += "<" + (message["content"] if add_generation_prompt or not self.strips_prompts else "")
            else:
                text += ">" + message["content"] + "|" * self.ends_turns + "\n"
        return text + ">" * add_generation_prompt

    def decode(self, token_ids, *, skip_special_tokens):
        names = {token: character for character, token in self.special.items()}
        return "".join(names.get(token) or chr(token) for token in token_ids)


def make_chat(**options):
    return Chat(Templated(**options), prompt_format="chat", stop_token_ids=(STOP,))


ROW = make_row({"prompt": "ab", "answer": "xy"}, where="rows.jsonl:7")


def test_a_demonstration_is_the_prompt_then_the_answer_then_the_stop_token():
    chat = make_chat()
    assert chat.prompt(ROW).tokens == (BEGIN, USER, ord("a"), ord("b"), ASSISTANT)
    demonstration = chat.demonstration(ROW)
    assert demonstration.tokens == (*chat.prompt(ROW).tokens, ord("x"), ord("y"), STOP)  # not the template's newline
    assert demonstration.prompt_length == 5


def test_plain_format_takes_text_as_it_is():
    chat = Chat(Templated(), prompt_format="plain", stop_token_ids=(STOP,))
    assert chat.demonstration(ROW).tokens == (BEGIN, ord("a"), ord("b"), ord("x"), ord("y"), STOP)


def test_text_leaves_out_the_stop_token_and_nothing_else():
    chat = make_chat()
    assert chat.text((ord("x"), STOP)) == "x"
    assert chat.text((ord("x"), ord("y"))) == "xy"
    assert chat.text((USER, ord("x"), STOP)) == "<x"
    assert chat.text((ord("x"), 200, STOP)) == "x<200>"  # an id beyond the tokenizer's, from a padded embedding


def test_a_row_without_an_answer_is_no_demonstration():
    row = make_row({"prompt": "ab"}, where="rows.jsonl:9")
    with pytest.raises(DataError, match=r"rows\.jsonl:9: field 'answer' is missing"):
        make_chat().demonstration(row)


def test_a_template_that_rewrites_the_prompt_is_refused():
    with pytest.raises(DataError, match=r"rows\.jsonl:7: the chat template renders the prompt differently"):
        make_chat(strips_prompts=True).demonstration(ROW)


def test_a_template_that_never_ends_a_turn_is_refused():
    with pytest.raises(DataError, match="would never learn to stop"):
        make_chat(ends_turns=False).demonstration(ROW)


def test_text_that_the_tokenizer_does_not_know_is_named():
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the tokenizer cannot encode .*unknown character"):
        make_chat().prompt(make_row({"prompt": "a?"}, where="rows.jsonl:1"))


def test_chat_without_a_template_and_answers_without_an_end_are_refused():
    tokenizer = Templated()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="needs a tokenizer with a chat template"):
        Chat(tokenizer, prompt_format="chat", stop_token_ids=(STOP,))
    with pytest.raises(ValueError, match="need a stop token"):
        Chat(tokenizer, prompt_format="plain", stop_token_ids=())


def test_messages_that_the_template_refuses_are_named():
    prompt = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the chat template refuses .*System role not supported"):
        make_chat().prompt(make_row({"prompt": prompt}, where="rows.jsonl:2"))
