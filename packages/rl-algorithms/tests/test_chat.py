"""Claims about the way between text and tokens."""

import dataclasses
import inspect

import pytest

from rl_algorithms.chat import Chat, TextError
from rl_algorithms.contracts import EpisodeStart
from rl_algorithms.data import DataError, make_row

BEGIN, STOP, USER, ASSISTANT = 0, 1, 2, 3


class Templated:
    """Characters as their code points; `<`, `>` and `|` in a template are the special tokens."""

    chat_template = "yes"
    eos_token_id = STOP
    special = {"^": BEGIN, "|": STOP, "<": USER, ">": ASSISTANT}

    def __init__(self, *, ends_turns=True, strips_prompts=False, forgets_answers=False):
        self.ends_turns, self.strips_prompts = ends_turns, strips_prompts
        self.forgets_answers = forgets_answers

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
        for index, message in enumerate(conversation):
            if message["role"] == "system":
                raise ValueError("System role not supported")
            if message["role"] == "tool":
                continue
            if self.forgets_answers and message["role"] == "assistant" and index + 1 < len(conversation):
                continue
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


def make_unchecked(*args, **options):
    """A Chat as callers without runtime type checks make it."""
    chat = Chat.__new__(Chat)
    inspect.unwrap(Chat.__init__)(chat, *args, **options)
    return chat


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
    for stop in (None, 128, -1, "|"):
        with pytest.raises(
            ValueError, match=r"stop_token_ids=\[1, .*\] has .*, which is no token of the tokenizer's 128"
        ):
            make_unchecked(tokenizer, prompt_format="plain", stop_token_ids=[1, stop])
    with pytest.raises(ValueError, match=r"prompt_format='Plain' is not one of .* did you mean 'plain'"):
        make_unchecked(tokenizer, prompt_format="Plain", stop_token_ids=[1])
    with pytest.raises(ValueError, match="need a stop token"):
        Chat(tokenizer, prompt_format="plain", stop_token_ids=())


def test_messages_that_the_template_refuses_are_named():
    prompt = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the chat template refuses .*System role not supported"):
        make_chat().prompt(make_row({"prompt": prompt}, where="rows.jsonl:2"))


# -- Episodes and observations ---------------------------------------------------------------------------------------


def tokens_of(text):
    return tuple(Templated.special.get(character, ord(character)) for character in text)


def said(*contents):
    """Turns of user and assistant, the user first."""
    return tuple(
        {"role": "assistant" if index % 2 else "user", "content": content} for index, content in enumerate(contents)
    )


def user(content):
    return {"role": "user", "content": content}


def plain_chat():
    return Chat(Templated(), prompt_format="plain", stop_token_ids=(STOP,))


def test_an_observation_is_what_the_template_writes_between_two_answers():
    chat = make_chat()
    assert chat.observation(said("ab"), tokens_of("xy|"), [user("cd")]) == tokens_of("\n<cd>")
    assert chat.observation(said("ab", "xy", "cd"), tokens_of("z|"), [user("e"), user("f")]) == tokens_of("\n<e<f>")


def test_the_stop_token_comes_first_where_none_was_sampled():
    assert make_chat().observation(said("ab"), tokens_of("xy"), [user("cd")]) == tokens_of("|\n<cd>")


def test_in_plain_format_an_observation_is_its_text():
    assert plain_chat().observation(said("ab"), tokens_of("xy|"), [user("c"), user("d")]) == tokens_of("cd")


def test_an_observation_without_tokens_is_a_matter_of_its_text():
    for chat in (make_chat(), plain_chat()):
        with pytest.raises(TextError, match=r"rows\.jsonl:7: the tokenizer cannot encode"):
            chat.observation(said("ab"), tokens_of("x|"), [user("a?")], where="rows.jsonl:7")
        with pytest.raises(TextError, match=r"'a\|b' has '\|', which is a special token of one character"):
            chat.observation(said("ab"), tokens_of("x|"), [user("a|b")])


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match=r"rows\.jsonl:7: a prompt without tokens"):
        dataclasses.replace(make_chat().prompt(ROW), tokens=())


def test_words_that_stand_for_an_answer_may_be_said_by_others():
    prompt, observation = said("answer0 answer1 observation0"), user("answer2 answer3")
    assert make_chat().observation(prompt, tokens_of("x|"), [observation]) == tokens_of("\n<answer2 answer3>")


def test_templates_that_cannot_be_continued_are_refused():
    with pytest.raises(DataError, match=r"rows\.jsonl:7: the rendered answer has no stop token"):
        make_chat(ends_turns=False).observation(said("ab"), tokens_of("x|"), [user("c")], where="rows.jsonl:7")
    with pytest.raises(DataError, match=r"the chat template leaves out observations\[1\], of role 'tool'"):
        make_chat().observation(said("ab"), tokens_of("x|"), [user("c"), {"role": "tool", "content": "c"}])
    with pytest.raises(DataError, match="the chat template renders an answer 0 times once something follows it"):
        make_chat(forgets_answers=True).observation(said("ab"), tokens_of("x|"), [user("c")])


def test_an_environment_may_begin_an_episode_itself():
    prompt = make_chat().start(EpisodeStart(messages=said("go"), state=3), row=ROW)
    assert prompt.tokens == tokens_of("^<go>")
    assert (prompt.messages, prompt.tools, prompt.state, prompt.row) == (said("go"), (), 3, ROW)
    assert make_chat().prompt(ROW).messages == ROW.messages


def test_tools_that_the_policy_would_not_hear_of_are_refused():
    start = EpisodeStart(messages=said("go"), tools=({"name": "add"},))
    with pytest.raises(DataError, match=r"rows\.jsonl:7: there are tools, and the tokenizer's chat template never"):
        make_chat().start(start, row=ROW)
    with pytest.raises(DataError, match=r"rows\.jsonl:7: there are tools, and prompt_format='plain'"):
        plain_chat().start(start, row=ROW)


def test_template_options_that_nothing_reads_are_refused():
    def make(prompt_format, options):
        Chat(Templated(), prompt_format=prompt_format, stop_token_ids=(STOP,), template_options=options)

    with pytest.raises(ValueError, match=r"template_options has 'enable_thinkin', which .* never reads"):
        make("chat", {"enable_thinkin": False})
    with pytest.raises(ValueError, match="template_options has tokenize, which each call sets"):
        make("chat", {"tokenize": True})
    with pytest.raises(ValueError, match="prompt_format='plain' has none"):
        make("plain", {"enable_thinking": False})


# -- Conversations to imitate ----------------------------------------------------------------------------------------


class Talk:
    """A conversation as a data row."""

    def __init__(self, *messages, tools=()):
        self.messages, self.where, self.tools = messages, "talks.jsonl:4", tools


def learnt(conversation):
    """What is learnt, piece by piece, as the token ids."""
    pieces, previous = [], False
    for token, trained in zip(conversation.tokens, conversation.trainable, strict=True):
        if trained:
            pieces = pieces if previous else [*pieces, ()]
            pieces[-1] += (token,)
        previous = trained
    return pieces


@pytest.mark.parametrize(
    ("make", "text", "answers"),
    [
        (make_chat, "^<ab>x|\n<cd>yz|", ["x|", "yz|"]),
        (plain_chat, "^abx|cdyz|", ["x|", "yz|"]),
    ],
)
def test_a_conversation_teaches_each_answer_with_its_stop_token(make, text, answers):
    talk = Talk(*said("ab", "x", "cd", "yz", "bye"))
    conversation = make().conversation(talk)
    assert conversation.tokens == tokens_of(text)  # nothing after the last that is learnt
    assert learnt(conversation) == [tokens_of(answer) for answer in answers]
    assert learnt(make().conversation(talk, train_on="last_turn")) == [tokens_of(answers[-1])]
    assert conversation.row is talk


def test_everything_may_be_learnt_but_the_first_token():
    for chat in (make_chat(), plain_chat()):
        conversation = chat.conversation(Talk(*said("ab", "x", "cd")), train_on="all")
        assert conversation.trainable == (False, *[True] * (len(conversation.tokens) - 1))
    assert conversation.tokens == tokens_of("^abx|cd")


def test_each_message_may_say_whether_it_is_learnt():
    first, answer, second, last = said("ab", "x", "cd", "yz")
    skip, learn = {"train": False}, {"train": True}
    chat = make_chat()
    assert learnt(chat.conversation(Talk(first, answer | skip, second, last))) == [tokens_of("yz|")]
    assert learnt(chat.conversation(Talk(first, answer, second, last | skip))) == [tokens_of("x|")]
    both = chat.conversation(Talk(first, answer | learn, second | skip, last), train_on="last_turn")
    assert learnt(both) == [tokens_of("x|"), tokens_of("yz|")]
    with pytest.raises(DataError, match=r"talks\.jsonl:4: none of the 2 messages is to be learnt"):
        chat.conversation(Talk(first, answer | skip))
    with pytest.raises(DataError, match=r"talks\.jsonl:4: field 'messages\[0\]\.train' is true for the role 'user'"):
        chat.conversation(Talk(first | learn, answer))
    with pytest.raises(DataError, match=r"field 'messages\[1\]\.train' must be true or false, found 'no'"):
        chat.conversation(Talk(first, answer | {"train": "no"}))
    with pytest.raises(
        DataError, match=r"field 'messages\[1\]\.train' says what is learnt, and so does train_on='all'"
    ):
        chat.conversation(Talk(first, answer | learn), train_on="all")


def test_other_messages_may_stand_for_the_rows_own():
    conversation = make_chat().conversation(ROW, messages=[*ROW.messages, {"role": "assistant", "content": "no"}])
    assert learnt(conversation) == [tokens_of("no|")]
    assert conversation.tokens == tokens_of("^<ab>no|")


def test_in_plain_format_the_assistant_may_speak_first():
    assert learnt(plain_chat().conversation(Talk({"role": "assistant", "content": "once"}))) == [tokens_of("once|")]


def test_a_conversation_without_text_has_no_plain_format():
    call = {"role": "assistant", "content": None, "tool_calls": []}
    with pytest.raises(DataError, match="a message of role 'assistant' has the content None, which is no text"):
        plain_chat().conversation(Talk(user("a"), call))


def test_plain_format_does_not_pass_over_tool_calls():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    with pytest.raises(DataError, match="has tool_calls, and prompt_format='plain' knows text only"):
        plain_chat().conversation(Talk(user("a"), call, user("b"), {"role": "assistant", "content": "c"}))


def test_a_template_that_rewrites_what_was_said_before_is_refused_unless_the_last_turn_is_all():
    chat = make_chat(forgets_answers=True)
    talk = Talk(*said("ab", "x", "cd", "yz"))
    with pytest.raises(DataError, match=r"talks\.jsonl:4: the chat template renders the prompt differently"):
        chat.conversation(talk)
    assert learnt(chat.conversation(talk, train_on="last_turn")) == [tokens_of("yz|")]


def test_a_plain_prompt_that_the_tokenizer_ends_is_refused():
    with pytest.raises(DataError, match=r"the prompt 'ab\|' ends with the stop token 1"):
        plain_chat().prompt(make_row({"prompt": "ab|"}, where="rows.jsonl:1"))
