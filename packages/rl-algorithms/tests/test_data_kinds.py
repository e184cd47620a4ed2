"""Claims about the kinds of row: in which forms they come, what they become, what is refused and by which name."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_algorithms.data import (
    VERL_COLUMNS,
    ConversationRow,
    DataError,
    Dataset,
    LabelledRow,
    PreferenceRow,
    Row,
    from_nemo_gym,
    make_row,
    read_rows,
    split_held_out,
    unpaired,
)

KINDS = [Row, ConversationRow, PreferenceRow, LabelledRow]


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **rest):
    return {"role": "assistant", "content": text, **rest}


def one(kind, raw, **options):
    (row,) = read_rows([raw], kind=kind, **options)
    return row


TALK = [user("2+2="), assistant("4")]
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2, "b": None}}}]}


@pytest.mark.parametrize(
    "columns",
    [
        {"messages": TALK},
        {"prompt": "2+2=", "completion": "4"},
        {"prompt": [user("2+2=")], "completion": [assistant("4")]},
        {"prompt": "2+2=", "answer": "4"},
        {"conversations": [{"from": "human", "value": "2+2="}, {"from": "gpt", "value": "4"}]},
        {"conversations": TALK},
    ],
)
def test_every_form_of_a_conversation_is_the_same_conversation(columns):
    row = one(ConversationRow, {**columns, "level": 3})
    assert row.messages == tuple(TALK)
    assert row.columns == {**columns, "level": 3}
    assert (row.weight, row.tools, row.where) == (1.0, (), "list[0]")


def test_answers_within_a_prompt_are_not_trained_on():
    prompt = [user("a"), assistant("b"), user("c")]
    row = one(ConversationRow, {"prompt": prompt, "completion": "d"})
    assert [message.get("train") for message in row.messages] == [None, False, None, None]
    assert row.questions == (tuple((m["role"], m["content"]) for m in prompt),)
    prompt[1]["train"] = True
    row = one(ConversationRow, {"prompt": prompt, "completion": "d"})
    assert [message.get("train") for message in row.messages] == [None, True, None, None]


def test_weights_of_messages_say_what_is_trained_on():
    row = one(ConversationRow, {"messages": [user("a"), assistant("b", weight=0), user("c"), assistant("d", weight=1)]})
    assert [message.get("train") for message in row.messages] == [None, False, None, True]
    assert all("weight" not in message for message in row.messages)


def test_a_call_of_a_tool_needs_no_text_and_nulls_of_json_stay():
    messages = [user("2+2="), CALL, {"role": "tool", "content": "", "name": None}, assistant("4")]
    row = one(ConversationRow, {"messages": messages, "tools": '[{"type": "function"}]'})
    assert row.messages[1] == {**CALL, "content": None}
    assert row.messages[2] == {"role": "tool", "content": ""}
    assert row.tools == ({"type": "function"},)
    assert one(Row, {"prompt": messages[:3], "tools": [{"type": "function"}]}).tools == row.tools


def test_columns_that_were_mapped_decide_the_form():
    columns = {"messages": TALK, "question": "a", "reply": "b"}
    row = one(ConversationRow, columns, columns={"prompt": "question", "completion": "reply"})
    assert row.messages == (user("a"), assistant("b"))


@pytest.mark.parametrize(
    ("columns", "prompt", "chosen", "rejected"),
    [
        ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "2+2=", "4", "5"),
        ({"prompt": [user("2+2=")], "chosen": [assistant("4")], "rejected": [assistant("5")]}, "2+2=", "4", "5"),
        ({"chosen": TALK, "rejected": [user("2+2="), assistant("5")]}, "2+2=", "4", "5"),
        ({"prompt": "2+2=", "chosen": TALK, "rejected": [user("2+2="), assistant("5")]}, "2+2=", "4", "5"),
        ({"chosen": "Q: hi there A: good", "rejected": "Q: hi there A: gone"}, "Q: hi there A:", " good", " gone"),
        ({"chosen": "hi there", "rejected": "hi there you"}, "hi", " there", " there you"),
    ],
)
def test_every_form_of_a_preference(columns, prompt, chosen, rejected):
    row = one(PreferenceRow, {**columns, "margin": 2})
    assert (row.messages, row.chosen, row.rejected) == ((user(prompt),), (assistant(chosen),), (assistant(rejected),))
    assert row.margin == 2.0
    good, bad = unpaired(row)
    assert (good.completion, good.label, bad.completion, bad.label) == (row.chosen, True, row.rejected, False)
    assert good.messages == bad.messages == row.messages


@given(st.lists(st.sampled_from("ab \n"), min_size=2, max_size=12), st.lists(st.sampled_from("ab "), max_size=5))
def test_an_implicit_prompt_and_its_answers_are_the_texts_again(start, end):
    chosen, rejected = "".join(start) + "x", "".join(start) + "y" + "".join(end)
    try:
        row = one(PreferenceRow, {"chosen": chosen, "rejected": rejected})
    except DataError as error:
        refusal = str(error)
    else:
        refusal = None
    if refusal:
        assert "hold no prompt" in refusal
        return
    (prompt,), (better,), (worse,) = row.messages, row.chosen, row.rejected
    assert prompt["content"] + better["content"] == chosen
    assert prompt["content"] + worse["content"] == rejected
    assert better["content"][0].isspace()  # no word is cut


@pytest.mark.parametrize("label", [True, 1])
def test_a_labelled_answer(label):
    row = one(LabelledRow, {"prompt": "2+2=", "completion": "4", "label": label})
    assert (row.messages, row.completion, row.label) == ((user("2+2="),), (assistant("4"),), True)


@pytest.mark.parametrize(
    ("kind", "columns", "message"),
    [
        (
            Row,
            {"prompt": [user("a"), {"role": "user", "content": [{"type": "image"}]}]},
            r"'prompt\[1\].content\[0\]' is a part of type 'image'",
        ),
        (Row, {"prompt": [user("a"), {"role": "user", "content": None}]}, r"'prompt\[1\]' must have a text"),
        (Row, {"prompt": "a", "tools": 3}, "'tools' must be a list of JSON schemas, found int 3"),
        (Row, {"prompt": "a", "tools": ["{"]}, r"'tools\[0\]' is no JSON"),
        (Row, {"prompt": "a", "tools": ['{"a": 1, "a": 2}']}, r"'tools\[0\]' is no JSON \('a' occurs twice"),
        (
            ConversationRow,
            {"messages": [user("a"), {"role": "Assistant", "content": "b"}]},
            r"'messages\[1\].role' must be one of system, .* found 'Assistant'; 'assistant' is the nearest",
        ),
        (
            Row,
            {"prompt": [{"role": "human", "content": "a"}]},
            r"'prompt\[0\].role' must be one of .*, tool, .* 'human'",
        ),
        (ConversationRow, {"level": 3}, "the fields of a conversation are missing: 'messages', or .* has 'level'"),
        (ConversationRow, {"messages": [user("a")]}, "'messages' has no assistant's message to train on"),
        (ConversationRow, {"messages": [assistant("a", train=False)]}, "'messages' has no assistant's message"),
        (ConversationRow, {"messages": [assistant("a", train="no")]}, r"'messages\[0\].train' must be true or false"),
        (ConversationRow, {"messages": [assistant("a", weight=0.5)]}, r"'messages\[0\].weight' must be 0 or 1"),
        (ConversationRow, {"messages": [assistant(None, tool_calls=[3])]}, r"'messages\[0\].tool_calls' must be"),
        (ConversationRow, {"messages": TALK, "weight": -1}, "'weight' must not be negative, found -1"),
        (ConversationRow, {"messages": TALK, "weight": float("nan")}, "'weight' must be a finite number"),
        (ConversationRow, {"messages": TALK, "weight": True}, "'weight' must be a finite number, found bool"),
        (ConversationRow, {"conversations": [{"from": "bot", "value": "a"}]}, r"'conversations\[0\].from' must be one"),
        (ConversationRow, {"prompt": "a", "completion": [user("b")]}, "'completion' must begin with an assistant's"),
        (ConversationRow, {"text": ""}, "'text' must be text that is not empty"),
        (PreferenceRow, {"prompt": "a", "chosen": "b"}, "field 'rejected' is missing; the row has 'prompt', 'chosen'"),
        (PreferenceRow, {"prompt": "a", "chosen": "b", "rejected": "b"}, "'chosen' is the same as the rejected"),
        (
            PreferenceRow,
            {"chosen": "b", "rejected": "c"},
            "'chosen' begins with no whole word, up to a space, that 'rejected'",
        ),
        (PreferenceRow, {"chosen": TALK, "rejected": TALK[:1]}, "'rejected' is the prompt without an answer"),
        (PreferenceRow, {"prompt": "x", "chosen": TALK, "rejected": [TALK[0], assistant("5")]}, "another prompt than"),
        (PreferenceRow, {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "1"}, "'margin' must be a finite"),
        (LabelledRow, {"prompt": "a", "completion": "b", "label": "yes"}, "'label' must be true or false, found str"),
        (LabelledRow, {"prompt": "a", "completion": "b", "label": 1.0}, "'label' must be true or false, found float"),
        (LabelledRow, {"prompt": "a", "completion": 4, "label": True}, "'completion' must be text or a list"),
    ],
)
def test_a_bad_row_is_refused_by_its_field(kind, columns, message):
    with pytest.raises(DataError, match=rf"^list\[0\]: .*{message}"):
        one(kind, columns)


def test_a_field_is_named_as_the_data_names_it():
    with pytest.raises(DataError, match=r"field 'question\[0\]' \(read as 'prompt'\) must have a text"):
        one(Row, {"question": [3]}, columns={"prompt": "question"})


OURS = ["prompt", "answer", "messages", "completion", "conversations", "text", "chosen", "rejected", "label", "tools"]
THEIRS = ["role", "content", "from", "value", "tool_calls", "train", "weight", "margin"]
NAMES = st.sampled_from([*OURS, *THEIRS])
WORDS = st.sampled_from(["user", "assistant", "tool", "human", "gpt", "a", "a b", "", "[]", "{"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
LINES = st.dictionaries(NAMES, JSON, max_size=6).map(json.dumps) | JSON.map(json.dumps) | st.text(max_size=12)


@given(st.binary(max_size=12) | LINES.map(lambda line: line.encode(errors="surrogatepass")), st.sampled_from(KINDS))
def test_any_line_is_a_row_or_an_error_that_names_it(tmp_path_factory, line, kind):
    file = tmp_path_factory.getbasetemp() / "any.jsonl"
    file.write_bytes(line.replace(b"\n", b" "))
    try:
        (row,) = read_rows(file, kind=kind)
    except DataError as error:
        row, refusal = None, str(error)
    if row is None:
        assert refusal.startswith((f"{file}:1: ", f"{file}: has no rows"))
    else:
        assert (type(row), row.where) == (kind, f"{file}:1")
        assert hash(row.question) is not None


@given(st.dictionaries(NAMES, JSON, max_size=6), st.sampled_from(KINDS))
def test_columns_are_never_renamed_or_dropped(columns, kind):
    try:
        row = one(kind, {**columns, "mine": 3})
    except DataError:
        return
    assert row.columns == {**columns, "mine": 3}


def test_rows_of_verl():
    columns = {
        "data_source": "gsm8k",
        "prompt": [user("2+2=")],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 0},
    }
    row = one(Row, columns, columns=VERL_COLUMNS)
    assert (row.prompt, row.answer) == ("2+2=", "4")
    assert {name: row.columns[name] for name in columns} == columns


def test_rows_of_nemo_gym():
    tool = {"type": "function", "name": "add", "parameters": {}, "strict": True}
    parts = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "2+2="}]}
    request = {"input": [parts], "instructions": "Add.", "tools": [tool]}
    columns = {"responses_create_params": request, "expected_answer": "4"}
    row = one(Row, columns, adapter=from_nemo_gym, columns={"answer": "expected_answer"})
    assert row.messages == ({"role": "system", "content": "Add."}, user("2+2="))
    assert (row.answer, row.tools) == (
        "4",
        ({"type": "function", "function": {"name": "add", "parameters": {}, "strict": True}},),
    )
    assert {name: row.columns[name] for name in columns} == columns
    with pytest.raises(DataError, match=r"list\[0\]: from_nemo_gym cannot read the row: KeyError: 'responses_create"):
        one(Row, {"prompt": "a"}, adapter=from_nemo_gym)
    with pytest.raises(DataError, match="and only messages are read"):
        one(Row, {"responses_create_params": {"input": [{"type": "function_call"}]}}, adapter=from_nemo_gym)


def test_a_prompt_within_a_demonstrated_conversation_is_trained_on():
    prompts = [make_row({"prompt": text}, where=text) for text in "ab"]
    held_out = make_row({"prompt": [user("x"), assistant("y"), user("z")]}, where="held out")
    talk = one(ConversationRow, {"messages": [user("x"), assistant("y"), user("z"), assistant("!")]})
    with pytest.raises(DataError, match="held out: the held-out prompt 'z' is also trained on"):
        Dataset(train=prompts, held_out=[held_out], demonstrations=[talk])


def test_all_kinds_can_be_held_out():
    pairs = read_rows([{"prompt": p, "chosen": "b", "rejected": "c"} for p in "wxyzwx"], kind=PreferenceRow)
    train, held_out = split_held_out(pairs, share=0.5, seed=0)
    assert len({row.question for row in train}) == len({row.question for row in held_out}) == 2
    assert not {row.question for row in train} & {row.question for row in held_out}
    texts = read_rows([{"text": text} for text in "abcd"], kind=ConversationRow)
    assert [len(side) for side in split_held_out(texts, share=0.5, seed=0)] == [2, 2]


def test_calls_of_different_tools_are_different_questions():
    rows = [
        make_row({"prompt": [user("a"), {**CALL, "tool_calls": [{"name": name}]}, user("b")]}, where=name)
        for name in ("add", "divide")
    ]
    assert rows[0].question != rows[1].question
