"""Tools: reading calls, describing functions, and an environment that makes the calls."""

import asyncio
import json
import threading
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_algorithms.contracts import Conversation, EnvironmentReturn, ResettingEnvironment
from rl_algorithms.environments.tool_calls import MalformedCall, ToolCall, parse_tool_calls
from rl_algorithms.environments.tool_schemas import ToolSchemaError, check_arguments, tool_schema
from rl_algorithms.environments.tools import Toolbox, ToolEnvironment, ToolError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def said(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


# -- Reading calls -------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.text(), st.dictionaries(st.text(), JSON, max_size=3)), max_size=4),
    st.sampled_from(["hermes", "fenced"]),
)
def test_calls_that_were_written_are_read(calls, call_format):
    written = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    wrap = "<tool_call>{}</tool_call>" if call_format == "hermes" else "```json\n{}\n```\n"
    # The markers may occur inside a JSON string, where no reader of tags can tell them apart.
    written = [each for each in written if "</tool_call>" not in each and "```" not in each and "</think>" not in each]
    answer = "Let me see. " + " and ".join(wrap.format(each) for each in written)
    read = parse_tool_calls(answer, call_format=call_format)
    assert [{"name": call.name, "arguments": call.arguments} for call in read] == [json.loads(each) for each in written]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", "```", "json\n", "{", "}", '"name"', ":", "[", "\n", "é"])
    ),
    st.text(),
    st.sampled_from(["hermes", "fenced"]),
)
def test_reading_never_raises(parts, text, call_format):
    for answer in ("".join(parts), text, "".join(parts) + text):
        assert all(
            isinstance(call, ToolCall | MalformedCall) for call in parse_tool_calls(answer, call_format=call_format)
        )


@pytest.mark.parametrize(
    ("inside", "reason"),
    [
        ("{'name': 1}", "not valid JSON"),
        ('{"name": "f", "arguments": {"x": NaN}}', "NaN is no JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"name": "f"}', "and nothing else"),
        ('{"name": "f", "name": "g", "arguments": {}}', "'name' occurs twice"),
        ('{"name": "f", "arguments": [1]}', '"arguments" an object'),
        ('{"name": "f", "arguments": "{"}', "not valid JSON"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(inside, reason):
    (call,) = parse_tool_calls(f"<tool_call>{inside}</tool_call>")
    assert reason in call.reason
    assert len(call.text) <= 200


def test_particular_forms():
    assert parse_tool_calls("no call") == ()
    (call,) = parse_tool_calls('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>')
    assert call == ToolCall(name="f", arguments={"x": 1})
    (unclosed,) = parse_tool_calls('<tool_call>{"name": "f", "arguments": {}}')
    assert "never closed" in unclosed.reason
    assert parse_tool_calls(f"<think>{said('f')}</think> 7") == (), "what is thought is not said"
    assert parse_tool_calls('```json\n{"answer": 7}\n```', call_format="fenced") == (), "JSON that is no call"
    assert parse_tool_calls('```python\n{"name": "f", "arguments": {}}\n```', call_format="fenced") == ()
    assert parse_tool_calls('```tool_call\n{"name": "f", "arguments": {}}\n```', call_format="fenced")[0].name == "f"


# -- Describing functions ------------------------------------------------------------------------------------------


def search(query: str, limit: int = 3, order: Literal["new", "old"] = "new", tags: list[str] | None = None) -> str:
    """Search the library.

    It knows books only.

    Args:
        query: what to look for,
            in plain words.
        limit (int): how many to return.

    Returns:
        Titles: one a line.
    """
    return f"{query}/{limit}/{order}/{tags}"


def test_a_schema_says_what_signature_and_docstring_say():
    function = tool_schema(search)["function"]
    assert function["name"] == "search"
    assert function["description"] == "Search the library.\n\nIt knows books only."
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "what to look for, in plain words."},
            "limit": {"type": "integer", "description": "how many to return."},
            "order": {"enum": ["new", "old"]},
            "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
        },
        "required": ["query"],
    }


def test_the_schema_agrees_with_transformers():
    utilities = pytest.importorskip("transformers.utils", reason="compares with transformers' get_json_schema")

    def add(a: int, b: float) -> float:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        return a + b

    theirs = utilities.get_json_schema(add)
    theirs["function"].pop("return", None)
    assert tool_schema(add) == theirs


def undocumented(x: int): ...


def bare(x):
    """No annotation."""


def starred(*xs: int):
    """Any number."""


def opaque(x: set[int]):
    """A set."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (undocumented, "undocumented has no docstring"),
        (bare, "parameter x of the tool bare has no annotation"),
        (starred, "variadic positional"),
        (opaque, r"annotated set\[int\]"),
    ],
)
def test_functions_that_cannot_be_described_are_refused(function, message):
    with pytest.raises(ToolSchemaError, match=message):
        tool_schema(function)


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({"query": "x"}, None),
        ({"query": "x", "limit": 2, "order": "old", "tags": ["a"]}, None),
        ({"query": "x", "tags": None}, None),
        ({}, "'query' is missing"),
        ({"query": 3}, "'query' is 3"),
        ({"query": "x", "limit": True}, "'limit' is true"),
        ({"query": "x", "limit": 2.0}, "'limit' is 2.0"),
        ({"query": "x", "order": "best"}, "'order'"),
        ({"query": "x", "tags": [1]}, "'tags'"),
        ({"query": "x", "page": 1}, "no argument 'page'; the arguments are query, limit, order, tags"),
    ],
)
def test_arguments_are_checked_against_what_was_promised(arguments, wrong):
    found = check_arguments(tool_schema(search), arguments)
    assert found is None if wrong is None else wrong in found


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from(["query", "limit", "order", "tags"]) | st.text(), JSON, max_size=4))
def test_what_passes_the_check_can_be_called(arguments):
    if check_arguments(tool_schema(search), arguments) is None:
        assert isinstance(search(**arguments), str)


# -- The environment -----------------------------------------------------------------------------------------------


class Exact:
    """1 for the row's answer. Remembers what it was shown."""

    def __init__(self):
        self.shown = []

    def step(self, conversations):
        self.shown += conversations
        return [
            EnvironmentReturn(reward=float(each.answer == each.row["answer"]), terminated=True, metrics={"judged": 1.0})
            for each in conversations
        ]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def fail(why: str) -> str:
    """Raise."""
    raise OSError(why)


def hang() -> str:
    """Never return."""
    threading.Event().wait()
    return ""


async def later(text: str) -> dict:
    """Return it after a while."""
    await asyncio.sleep(0.001)
    return {"text": text}


TOOLS = [add, fail, hang, later]
ROW = {"prompt": "1+1?", "answer": "2"}


def answered(environment, *answers, state=0, **conversation):
    return environment.step(
        [Conversation(messages=(), answer=answer, row=ROW, state=state, **conversation) for answer in answers]
    )


@pytest.fixture
def environment():
    made = ToolEnvironment(TOOLS, reward=Exact(), timeout_s=2.0)
    yield made
    made.close()


def test_an_episode_begins_with_the_prompt_and_the_schemas(environment):
    assert isinstance(environment, ResettingEnvironment)
    system = {"role": "system", "content": "Use tools."}
    first, second = environment.reset([ROW, {"prompt": [system]}], seeds=[0, 0])
    assert first.messages == ({"role": "user", "content": "1+1?"},)
    assert second.messages == (system,)
    assert [each["function"]["name"] for each in first.tools] == ["add", "fail", "hang", "later"]
    with pytest.raises(ToolError, match="no prompt in the column 'prompt'"):
        environment.reset([{"question": "1+1?"}], seeds=[0])


def test_calls_are_made_in_order_and_their_results_observed(environment):
    two = said("add", a=1, b=2) + said("later", text="é")
    called, final = answered(environment, two, "2")
    assert (called.reward, called.terminated, called.state) == (0.0, False, 2)
    assert called.observations == (
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "tool", "name": "later", "content": '{"text": "é"}'},
    )
    assert called.metrics == {"tools/calls": 2, "tools/mistakes": 0, "tools/errors": 0}
    assert (final.reward, final.terminated, final.truncated) == (1.0, True, False)
    assert final.metrics == {"tools/calls": 0, "tools/mistakes": 0, "tools/errors": 0, "judged": 1}


def test_mistakes_of_the_policy_come_back_to_it(environment):
    answers = [said("divide", a=1), said("add", a=1), "<tool_call>{</tool_call>"]
    unknown, wrong, malformed = answered(environment, *answers)
    assert "no tool 'divide'; the tools are add, fail, hang, later" in unknown.observations[0]["content"]
    assert "add was not called: the argument 'b' is missing" in wrong.observations[0]["content"]
    assert "cannot be read" in malformed.observations[0]["content"]
    for each in (unknown, wrong, malformed):
        assert (each.terminated, each.failed, each.metrics["tools/mistakes"]) == (False, None, 1)


def test_failures_of_a_tool_are_told_or_fail_the_rollout(environment):
    answers = [said("fail", why="disk full"), said("hang"), said("add", a=1, b=1)]
    raised, hung, fine = answered(environment, *answers)
    assert raised.observations[0]["content"] == "error: fail failed: OSError: disk full"
    assert "longer than timeout_s=2" in hung.observations[0]["content"]
    assert fine.observations[0]["content"] == "2"
    assert [each.metrics["tools/errors"] for each in (raised, hung, fine)] == [1, 1, 0]
    strict = ToolEnvironment(TOOLS, reward=Exact(), timeout_s=2.0, on_tool_error="fail")
    raised, hung, fine = answered(strict, *answers)
    assert raised.failed == "the tool fail failed: OSError: disk full"
    assert "the tool hang failed: it ran longer" in hung.failed
    assert raised.terminated
    assert fine.failed is None
    strict.close()


def test_too_many_calls_end_the_conversation_truncated_and_judged():
    environment = ToolEnvironment(TOOLS, reward=Exact(), max_calls=2)
    (third,) = answered(environment, said("add", a=1, b=1), state=2)
    assert (third.terminated, third.truncated, third.reward) == (True, True, 0.0)
    (second,) = answered(environment, said("add", a=1, b=1), state=1)
    assert (second.terminated, second.state) == (False, 2)
    environment.close()


def test_an_answer_that_was_cut_off_is_judged_and_calls_nothing():
    reward = Exact()
    environment = ToolEnvironment(TOOLS, reward=reward)
    (cut,) = answered(environment, said("add", a=1, b=1), truncated=True)
    assert cut.terminated
    assert cut.metrics["tools/calls"] == 0
    assert [each.state for each in reward.shown] == [None]
    environment.close()


class Parts(Exact):
    def step(self, conversations):
        return [replace(each, rewards={"right": each.reward, "kind": 0.0}) for each in super().step(conversations)]


def test_every_answer_names_the_parts_that_the_judge_names():
    environment = ToolEnvironment(TOOLS, reward=Parts(), reward_names=["right", "kind"])
    called, final = answered(environment, said("add", a=1, b=1), "2")
    assert called.rewards == {"right": 0.0, "kind": 0.0}
    assert final.rewards == {"right": 1.0, "kind": 0.0}
    environment.close()
    environment = ToolEnvironment(TOOLS, reward=Parts())
    with pytest.raises(ToolError, match=r"give reward_names=\['kind', 'right'\], not \[\]"):
        answered(environment, "2")
    environment.close()


def test_long_results_are_cut_and_say_so():
    def long() -> str:
        """Return much."""
        return "x" * 25

    environment = ToolEnvironment([long], reward=Exact(), max_result_chars=10)
    (result,) = answered(environment, said("long"))
    assert result.observations[0]["content"] == "x" * 10 + "\n[15 more characters were cut]"
    environment.close()


def test_a_result_that_json_cannot_express_is_the_tools_failure():
    def odd() -> str:
        """Return an object."""
        return object()

    environment = ToolEnvironment([odd], reward=Exact())
    (result,) = answered(environment, said("odd"))
    assert "odd failed: TypeError" in result.observations[0]["content"]
    environment.close()


def test_half_a_character_reaches_no_tokenizer():
    def half() -> str:
        """Return half a character."""
        return "a\ud800b"

    environment = ToolEnvironment([half], reward=Exact())
    (result,) = answered(environment, said("half"))
    assert result.observations[0]["content"] == "a?b"
    unknown, malformed = answered(environment, said("\ud800"), "<tool_call>\ud800</tool_call>")
    for each in (*unknown.observations, *malformed.observations):
        assert "".join(each.values()).encode()
    environment.close()


def test_closing_ends_the_threads():
    others = {*threading.enumerate()}
    environment = ToolEnvironment(TOOLS, reward=Exact())
    answered(environment, *[said("add", a=1, b=1)] * 4)
    assert {thread.name for thread in {*threading.enumerate()} - others} >= {"rl-event-loop"}
    environment.close()
    for thread in {*threading.enumerate()} - others:
        thread.join(timeout=60.0)
        assert not thread.is_alive()


class Endless:
    def step(self, conversations):
        return [EnvironmentReturn(reward=0.0, terminated=False, observations=({"role": "user", "content": "?"},))]


class Begins(Exact):
    def reset(self, rows, *, seeds):
        raise AssertionError


def test_what_cannot_be_composed_is_refused():
    with pytest.raises(ToolError, match="Begins begins episodes itself"):
        ToolEnvironment(TOOLS, reward=Begins())
    with pytest.raises(ToolError, match="there are no tools"):
        ToolEnvironment([], reward=Exact())
    with pytest.raises(ToolError, match="two tools are named add"):
        Toolbox([add, add])
    with pytest.raises(ValueError, match="max_calls=0"):
        ToolEnvironment(TOOLS, reward=Exact(), max_calls=0)
    environment = ToolEnvironment(TOOLS, reward=Endless())
    with pytest.raises(ToolError, match="Endless must end after one answer"):
        answered(environment, "2")
    environment.close()
