"""What agents ask of the server: grammars, tools, Responses, likeliest tokens, and stock clients as they are."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "programs"))

for needed in ("llguidance", "openai", "starlette", "uvicorn"):
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: rl-generation[server] and its test group", allow_module_level=True)

pytest.register_assert_rewrite("clients")
import openai
import speaking
from clients import *  # noqa: F403  (the claims that hold for vLLM's server too)
from clients import SCHEMA

from rl_generation import PromptError, Sampling, TransformersEngine
from rl_generation.server import Server
from rl_generation.server.tools import ReplyStream, ToolUse


@pytest.fixture(scope="module")
def engine():
    tokenizer = speaking.tokenizer()
    made = TransformersEngine(
        speaking.model(len(tokenizer), positions=2048), stop_token_ids=[3], pad_token_id=0, tokenizer=tokenizer
    )
    made.commit_version(3)
    return made


@pytest.fixture(scope="module")
def url(engine):
    tokenizer = speaking.tokenizer()
    with (
        Server(engine, tokenizer=tokenizer, model_name="tiny", tool_format="hermes") as server,
    ):
        yield f"{server.url}/v1"


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as made:
        yield made


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


@pytest.mark.parametrize(
    ("format_", "text", "said", "calls"),
    [
        ("hermes", 'a <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', "a ", [("f", {"x": 1})]),
        ("hermes", "a < b and <tool", "a < b and <tool", []),
        ("hermes", "<tool_call>{broken", "<tool_call>{broken", []),
        ("hermes", "<tool_call></tool_call>", "<tool_call></tool_call>", []),
        ("hermes", '<tool_call>f{"x": 1}</tool_call>', '<tool_call>f{"x": 1}</tool_call>', []),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {}}</tool_call> b <tool_call>{"name": "g", "arguments": {}}',
            " b ",
            [("f", {}), ("g", {})],
        ),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", {})]),
        ("llama", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "", [("f", {}), ("g", {})]),
        ("llama", "no call", "no call", []),
        ("llama", '{"a": 1}', '{"a": 1}', []),
        ("llama", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ("mistral", 'b[TOOL_CALLS][{"name": "f", "arguments": {"x": "é"}}]', "b", [("f", {"x": "é"})]),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "f", "arguments": {}}] x',
            '[TOOL_CALLS][{"name": "f", "arguments": {}}] x',
            [],
        ),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g{"y": 2}', "", [("f", {"x": 1}), ("g", {"y": 2})]),
    ],
)
def test_each_format_of_calls_is_read_and_what_is_no_call_stays_text(format_, text, said, calls):
    for size in (1, 3, len(text)):
        stream = ReplyStream(ToolUse(format=format_))
        written = "".join(stream.push(text[start : start + size]) for start in range(0, len(text), size))
        rest, made = stream.finish()
        assert written + rest == said
        assert [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in made] == calls


def test_a_conversation_that_is_not_sent_whole_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="send the conversation whole"):
        client.responses.create(model="tiny", input="how?", previous_response_id="resp_1")
