"""What stock clients of agents ask of a server, as claims that hold whichever server it is.

A test module imports all of these beside fixtures of its own: `url`, of the API's root, and `client`, OpenAI's. The
tokenizer is the one of `speaking`, and calls of tools are written as Hermes writes them.
"""

import asyncio
import json
import threading
from typing import Literal

import openai
import pytest

ASK = [{"role": "user", "content": "how is the weather?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "Looks.", "parameters": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
HERMES = r'fine <tool_call>\n\{"name": "weather", "arguments": \{"city": "(Rome|Oslo)", "days": [1-9]\}\}\n</tool_call>'

TASKSET = """
import verifiers.v1 as vf

class Sum(vf.Task[vf.TaskData]):
    @vf.reward
    async def said(self, trace):
        return float(isinstance(trace.last_reply, str))  # a random model may say nothing

class Sums(vf.Taskset[Sum]):
    def load(self):
        return (Sum(vf.TaskData(prompt=f"{number}+1?")) for number in range(3))

__all__ = ["Sums"]
"""


def chat(client, messages=ASK, **options):
    return client.chat.completions.create(model="tiny", messages=messages, **options)


def test_response_format_is_kept_by_the_client_and_the_likeliest_tokens_are_told(client):
    how = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA, "strict": True}}
    (choice,) = chat(client, response_format=how, logprobs=True, top_logprobs=3, seed=1, user="u", store=True).choices
    assert set(json.loads(choice.message.content)) == {"city", "days"}
    for entry in choice.logprobs.content:
        assert 1 <= len(entry.top_logprobs) <= 3
        assert entry.top_logprobs[0].logprob >= entry.logprob - 1e-5
    (choice,) = client.completions.create(model="tiny", prompt="how", max_tokens=5, logprobs=1, seed=1).choices
    for token, best in zip(choice.logprobs.tokens, choice.logprobs.top_logprobs, strict=True):
        assert token in best


def test_calls_in_the_text_are_parsed_and_a_stream_has_the_same(client):
    asked = {"tools": [TOOL], "seed": 2, "extra_body": {"structured_outputs": {"regex": HERMES}}}
    (choice,) = chat(client, **asked).choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", "fine ", "weather")
    chunks = [chunk.choices[0] for chunk in chat(client, stream=True, **asked)]
    streamed = [each.function for chunk in chunks for each in chunk.delta.tool_calls or ()]
    assert [each.name for each in streamed if each.name] == ["weather"]
    assert json.loads("".join(each.arguments or "" for each in streamed)) == json.loads(call.function.arguments)
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "fine "
    assert chunks[-1].finish_reason == "tool_calls"
    # The next turn, with the call and its result, is a prompt like any other.
    answer = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    assert chat(client, [*ASK, choice.message.model_dump(), answer], tools=[TOOL], max_tokens=3).choices


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_is_a_call_with_arguments_of_its_schema(client, choice):
    (answered,) = chat(client, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, seed=4).choices
    (call,) = answered.message.tool_calls
    assert call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"city", "days"}


def test_responses_say_and_call_and_their_stream_has_the_same(client):
    tool = {"type": "function", **FUNCTION}
    asked = {"model": "tiny", "input": "how?", "max_output_tokens": 12, "extra_body": {"seed": 5}}
    whole = client.responses.create(**asked, instructions="be kind")
    assert whole.status in {"completed", "incomplete"}
    events = list(client.responses.create(**asked, instructions="be kind", stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[0].type == "response.created"
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens
    assert [event.sequence_number for event in events] == list(range(len(events)))
    called = client.responses.create(
        model="tiny", input="how?", tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    (item,) = called.output
    assert set(json.loads(item.arguments)) == {"city", "days"}
    answer = {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
    again = [{"role": "user", "content": "how?"}, item.model_dump(), answer]
    assert client.responses.create(model="tiny", input=again, tools=[tool], tool_choice="none", max_output_tokens=3)


@pytest.mark.filterwarnings("ignore")  # of its own code
def test_litellm_completes_streams_and_calls(url, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would download a list of prices
    litellm = pytest.importorskip("litellm")
    asked = {"model": "openai/tiny", "api_base": url, "api_key": "none", "messages": ASK}
    assert litellm.completion(**asked, max_tokens=5).choices[0].message.content is not None
    assert list(litellm.completion(**asked, max_tokens=5, stream=True))
    called = (
        litellm.completion(**asked, tools=[TOOL], tool_choice="required", parallel_tool_calls=False).choices[0].message
    )
    assert called.tool_calls[0].function.name == "weather"


def test_langchain_invokes_streams_and_parses_structures(url):
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(model="tiny", base_url=url, api_key="none", max_tokens=200)
    assert model.invoke("how?").content is not None
    assert list(model.stream("how?"))
    found = model.with_structured_output({"title": "w", "description": "d", **SCHEMA}, method="json_schema")
    assert set(found.invoke("how?")) == {"city", "days"}
    called = model.bind_tools([TOOL], tool_choice="weather").invoke("how?")
    assert called.tool_calls[0]["name"] == "weather"


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_the_agents_sdk_calls_a_tool_and_goes_on_with_its_result(url, api):
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(disabled=True)
    asked = []

    @agents.function_tool
    def weather(days: Literal[1, 2]) -> str:
        """Look at the weather."""
        asked.append(days)
        return "sunny"

    made = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
    kinds = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}
    agent = agents.Agent(
        name="a",
        instructions="be kind",
        model=kinds[api](model="tiny", openai_client=made),
        tools=[weather],
        # A random model would call again and again, and the SDK takes no response that its bound cut off.
        model_settings=agents.ModelSettings(
            tool_choice="required",
            max_tokens=200,
            parallel_tool_calls=False,
            extra_body={"seed": 4},  # with others, a random model may go on with blanks up to the bound
        ),
        tool_use_behavior="stop_on_first_tool",
    )

    async def ask():
        async with made:
            return await agents.Runner.run(agent, "how?")

    result = asyncio.run(ask())
    assert result.final_output == "sunny"
    assert len(asked) >= 1


def test_an_environment_of_verifiers_is_played(url, tmp_path, monkeypatch):
    vf = pytest.importorskip("verifiers.v1")
    from verifiers.v1.clients.client import ModelContext
    from verifiers.v1.configs.client import EvalClientConfig
    from verifiers.v1.envs.single_agent.env import SingleAgentEnv, SingleAgentEnvConfig

    (tmp_path / "sums.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    environment = SingleAgentEnv(
        SingleAgentEnvConfig(
            taskset={"id": "sums"}, agent={"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}
        )
    )
    client = EvalClientConfig(base_url=url, api_key_var="OPENAI_API_KEY")
    context = ModelContext(model="tiny", client=client, sampling=vf.SamplingConfig(max_tokens=24))

    async def play():
        async with environment.serving():
            return [await environment.run_episode(task, context) for task in environment.taskset.load()]

    for episode in asyncio.run(play()):
        assert episode.ok, episode.errors
        assert [trace.rewards["said"].score for trace in episode.traces] == [1.0]


def test_tokens_versions_and_logp_come_exactly_in_chats_completions_responses_and_their_streams(client):
    exact = {"return_token_ids": True, "ignore_eos": True}
    asked = {"max_tokens": 12, "seed": 3, "n": 2, "logprobs": True, "extra_body": exact}
    whole = chat(client, **asked)
    streamed = {index: {"tokens": [], "logp": [], "versions": []} for index in range(2)}
    prompt = None
    for chunk in chat(client, stream=True, **asked):
        prompt = prompt or getattr(chunk, "prompt_token_ids", None)
        for choice in chunk.choices:
            said = streamed[choice.index]
            said["tokens"] += choice.token_ids or [] if hasattr(choice, "token_ids") else []
            said["logp"] += [entry.logprob for entry in (choice.logprobs.content if choice.logprobs else [])]
            said["versions"] += getattr(choice, "weight_versions", [])
    assert prompt == whole.prompt_token_ids
    for choice in whole.choices:
        said = streamed[choice.index]
        assert said["tokens"] == choice.token_ids
        assert said["logp"] == pytest.approx([entry.logprob for entry in choice.logprobs.content], abs=1e-4)
        assert said["versions"] == choice.weight_versions == [{"version": 3, "start": 0, "end": 12}]
    assert (whole.weight_version, whole.logp_of) == (3, "sampled")
    # The same tokens, as a prompt of ids, in the other two interfaces.
    completed = client.completions.create(model="tiny", prompt=prompt, **asked | {"logprobs": 0})
    assert [choice.token_ids for choice in completed.choices] == [choice.token_ids for choice in whole.choices]
    assert [choice.prompt_token_ids for choice in completed.choices] == [prompt, prompt]
    asked = {"model": "tiny", "input": ASK, "max_output_tokens": 12, "extra_body": {**exact, "seed": 3}}
    answered = client.responses.create(**asked)
    assert (answered.prompt_token_ids, answered.token_ids) == (prompt, whole.choices[0].token_ids)
    assert answered.weight_versions == whole.choices[0].weight_versions
    last = list(client.responses.create(**asked, stream=True))[-1].response
    assert (last.weight_version, last.weight_versions) == (3, answered.weight_versions)


def test_a_misspelt_field_is_refused_by_name_and_one_that_changes_nothing_is_taken(client):
    with pytest.raises(openai.BadRequestError, match="unknown field 'temprature': did you mean 'temperature'"):
        chat(client, extra_body={"temprature": 0.5})
    assert chat(client, max_tokens=2, user="u", store=True, metadata={"a": "b"}).choices


def test_two_hundred_streams_at_once_get_each_their_own(client):
    count = 200
    answers = [None] * count

    def ask(index):
        asked = {"model": "tiny", "prompt": [5 + index % 50, 9], "max_tokens": 6, "seed": index, "stream": True}
        chunks = client.completions.create(**asked, extra_body={"return_token_ids": True, "ignore_eos": True})
        answers[index] = [token for chunk in chunks for choice in chunk.choices for token in choice.token_ids]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(answer) for answer in answers] == [6] * count
    for index in (0, 117, 199):
        ask_again = threading.Thread(target=ask, args=(index,))
        before = answers[index]
        ask_again.start()
        ask_again.join()
        assert answers[index] == before
