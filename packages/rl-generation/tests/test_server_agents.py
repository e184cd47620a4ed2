"""What agents ask of the server: grammars, tools, Responses, likeliest tokens, and stock clients as they are."""

import asyncio
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "programs"))

for needed in ("llguidance", "openai", "starlette", "uvicorn"):
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: rl-generation[server] and its test group", allow_module_level=True)

import openai
import speaking

from rl_generation import PromptError, Sampling, Streamer, TransformersEngine
from rl_generation.server import Server
from rl_generation.server.tools import ReplyStream, ToolUse

ASK = [{"role": "user", "content": "how is the weather?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Looks.", "parameters": SCHEMA}}
HERMES = r'fine <tool_call>\n\{"name": "weather", "arguments": \{"city": "(Rome|Oslo)", "days": [1-9]\}\}\n</tool_call>'


@pytest.fixture(scope="module")
def engine():
    tokenizer = speaking.tokenizer()
    return TransformersEngine(
        speaking.model(len(tokenizer), positions=2048), stop_token_ids=[3], pad_token_id=0, tokenizer=tokenizer
    )


@pytest.fixture(scope="module")
def url(engine):
    tokenizer = speaking.tokenizer()
    with (
        Streamer(engine) as streamer,
        Server(streamer, tokenizer=tokenizer, model_name="tiny", tool_format="hermes") as server,
    ):
        yield f"{server.url}/v1"


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)


def chat(client, messages=ASK, **options):
    return client.chat.completions.create(model="tiny", messages=messages, **options)


def reference(engine, prompt, rollout, sampling):
    """The distribution at each place, from one plain forward and a loop in the words of the interface."""
    with torch.no_grad():
        logits = engine.model(input_ids=torch.tensor([[*prompt, *rollout.tokens]])).logits[0, len(prompt) - 1 : -1]
    for place, row in enumerate(logits):
        for token, bias in sampling.logit_bias:
            row[token] += bias
        if place < sampling.min_new_tokens:
            row[3] = -torch.inf
        before = rollout.tokens[:place]
        for token in {*prompt, *before}:
            row[token] = row[token] * sampling.repetition_penalty ** (-1 if row[token] > 0 else 1)
        for token in set(before):
            row[token] -= sampling.frequency_penalty * before.count(token) + sampling.presence_penalty
    return (logits / (sampling.temperature or 1.0)).log_softmax(-1)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_penalties_biases_and_a_minimal_length_are_those_of_a_plain_computation(engine, temperature):
    sampling = Sampling(
        max_new_tokens=24,
        min_new_tokens=8,
        n=3,
        temperature=temperature,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        repetition_penalty=1.3,
        logit_bias={3: 4.0, 9: -100.0},
        top_logp=4,
        seed=1,
    )
    prompt = [5, 9, 11, 20, 20]
    rollouts = engine.generate([prompt, prompt[:2]], sampling)
    for rollout in rollouts[:3]:
        expected = reference(engine, prompt, rollout, sampling)
        chosen = expected[range(len(rollout.tokens)), list(rollout.tokens)]
        torch.testing.assert_close(torch.tensor(rollout.logp), chosen, rtol=0, atol=1e-4)
        assert 3 not in rollout.tokens[:8]
        assert len(rollout.tokens) >= 8
        for row, best in zip(expected, rollout.top_logp, strict=True):
            values = torch.tensor([value for _, value in best])
            torch.testing.assert_close(values, row.topk(4).values, rtol=0, atol=1e-4)
            torch.testing.assert_close(values, row[[token for token, _ in best]], rtol=0, atol=1e-4)


def test_a_response_in_a_schema_always_follows_it_and_touches_no_other(engine):
    plain = Sampling(max_new_tokens=40, seed=3)
    bound = Sampling(max_new_tokens=200, n=8, seed=3, json_schema=json.dumps(SCHEMA))
    *answers, other = engine.generate([[5, 6], [7, 8]], [bound, plain])
    assert other.tokens == engine.generate([[7, 8]], [plain])[0].tokens
    for answer in answers:
        assert answer.finish_reason == "stop"
        value = json.loads(speaking.tokenizer().decode(answer.tokens, skip_special_tokens=True))
        assert value["city"] in {"Rome", "Oslo"}
        assert 1 <= value["days"] <= 9
    assert len({answer.tokens for answer in answers}) > 1


def test_a_grammar_that_cannot_be_served_is_refused_before_generation(engine):
    for wrong in ('{"type": "nope"}', '{"type": "object", "not": {}}', "{"):
        with pytest.raises(PromptError, match="json_schema that cannot be served"):
            engine.generate([[5]], Sampling(max_new_tokens=4, json_schema=wrong))
    with pytest.raises(PromptError, match="no stop token could end its response"):
        engine.generate([[5]], Sampling(max_new_tokens=4, regex="a", ignore_eos=True))


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
    (streamed,) = [each for chunk in chunks for each in chunk.delta.tool_calls or ()]
    assert streamed.function.arguments == call.function.arguments
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


@pytest.mark.parametrize(
    ("format_", "text", "said", "calls"),
    [
        ("hermes", 'a <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', "a ", [("f", {"x": 1})]),
        ("hermes", "a < b and <tool", "a < b and <tool", []),
        ("hermes", "<tool_call>{broken", "<tool_call>{broken", []),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", {})]),
        ("llama", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "", [("f", {}), ("g", {})]),
        ("llama", "no call", "no call", []),
        ("mistral", 'b[TOOL_CALLS][{"name": "f", "arguments": {"x": "é"}}]', "b", [("f", {"x": "é"})]),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g{"y": 2}', "", [("f", {"x": 1}), ("g", {"y": 2})]),
    ],
)
def test_each_format_of_calls_is_read_and_what_is_no_call_stays_text(format_, text, said, calls):
    for size in (1, 3, len(text)):
        stream = ReplyStream(ToolUse(format=format_))
        written = "".join(stream.push(text[start : start + size]) for start in range(0, len(text), size))
        reply = stream.finish()
        assert written + reply.content == said
        assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == calls


def test_responses_say_and_call_and_their_stream_has_the_same(client):
    tool = {"type": "function", **TOOL["function"]}
    asked = {"model": "tiny", "input": "how?", "max_output_tokens": 12, "extra_body": {"seed": 5}}
    whole = client.responses.create(**asked, instructions="be kind")
    assert whole.status in {"completed", "incomplete"}
    events = list(client.responses.create(**asked, instructions="be kind", stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[0].type == "response.created"
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage == whole.usage
    assert [event.sequence_number for event in events] == list(range(len(events)))
    called = client.responses.create(model="tiny", input="how?", tools=[tool], tool_choice="required")
    (item,) = called.output
    assert set(json.loads(item.arguments)) == {"city", "days"}
    answer = {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
    again = [{"role": "user", "content": "how?"}, item.model_dump(), answer]
    assert client.responses.create(model="tiny", input=again, tools=[tool], tool_choice="none", max_output_tokens=3)
    with pytest.raises(openai.BadRequestError, match="send the conversation whole"):
        client.responses.create(model="tiny", input="how?", previous_response_id="resp_1")


@pytest.mark.filterwarnings("ignore")  # of its own code
def test_litellm_completes_streams_and_calls(url, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would download a list of prices
    litellm = pytest.importorskip("litellm")
    asked = {"model": "openai/tiny", "api_base": url, "api_key": "none", "messages": ASK}
    assert litellm.completion(**asked, max_tokens=5).choices[0].message.content is not None
    assert list(litellm.completion(**asked, max_tokens=5, stream=True))
    called = litellm.completion(**asked, tools=[TOOL], tool_choice="required").choices[0].message
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
        model_settings=agents.ModelSettings(tool_choice="required", max_tokens=200, parallel_tool_calls=False),
        tool_use_behavior="stop_on_first_tool",
    )

    async def ask():
        async with made:
            return await agents.Runner.run(agent, "how?")

    result = asyncio.run(ask())
    assert result.final_output == "sunny"
    assert len(asked) >= 1
