"""What a client may send: every field is read, neutral, or refused by its name."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "programs"))

pytest.importorskip("starlette", reason="the server needs rl-generation[server]")

import speaking

from rl_generation.errors import EngineDeadError, LogpError, PromptError, SampleTimeoutError
from rl_generation.requests import Limits, Sampling
from rl_generation.server import ServerLimits
from rl_generation.server.generation_request import ChatBody, CompletionBody, RequestReader, read_json
from rl_generation.server.guard import HttpError, from_engine
from rl_generation.server.responses_api import ResponsesRequest

TOKENIZER = speaking.tokenizer()
LIMITS = Limits(vocab_size=len(TOKENIZER), max_length=64, tokenizer=TOKENIZER)
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def reader(limits, **bounds):
    return RequestReader(tokenizer=TOKENIZER, limits=limits, bounds=ServerLimits(**bounds))


def completion(body, limits=LIMITS, **bounds):
    return reader(limits, **bounds).completion(CompletionBody.of({"prompt": [5, 6]} | body))


def chat(body, limits=LIMITS):
    return reader(limits).chat(ChatBody.of(CHAT | body))


def test_every_setting_reaches_the_sampling():
    sent = {
        "n": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "stop_token_ids": [7],
        "stop": "a",
        "bad_words": ["b", "c"],
        "ignore_eos": True,
        "seed": 11,
    }
    (request,) = completion(sent | {"max_tokens": 9}).requests
    expected = sent | {"stop_token_ids": (7,), "stop": ("a",), "bad_words": ("b", "c"), "max_new_tokens": 9}
    assert request.sampling == Sampling(**expected)
    (request,) = chat({k: v for k, v in sent.items() if k != "n"} | {"max_completion_tokens": 4}).requests
    assert request.sampling == Sampling(**expected | {"n": 1, "max_new_tokens": 4})


def test_nothing_given_is_the_default_sampling_of_16_tokens_or_of_a_chat_to_the_end_of_the_context():
    asked = completion({})
    assert asked.requests[0].sampling == Sampling(max_new_tokens=16)
    (request,) = chat({"max_tokens": None}).requests
    assert request.sampling == Sampling(max_new_tokens=64 - len(request.prompt))
    assert completion({"prompt": [5] * 60}).requests[0].sampling == Sampling(max_new_tokens=4)
    assert [asked.body.stream, asked.logp, asked.body.return_token_ids] == [False] * 3


def test_several_prompts_draw_as_the_engine_would_draw_for_them():
    asked = completion({"prompt": [[5], [6], [7]], "seed": 3, "max_tokens": 4})
    assert [request.sampling for request in asked.requests] == Sampling(max_new_tokens=4, seed=3).spread(3)


def test_all_shapes_of_a_prompt():
    text = TOKENIZER.encode("hello there")
    for prompt, expected in [
        ("hello there", [text]),
        (["hello there", "hello"], [text, TOKENIZER.encode("hello")]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ]:
        assert [list(request.prompt) for request in completion({"prompt": prompt}).requests] == expected


@pytest.mark.parametrize(
    "prompt", [None, [], [[]], {"a": 1}, 5, [5, -1], [5, 1.0], [True], ["a", [5.5]], [[5], []], [[5], [999]], ""]
)
def test_a_prompt_of_no_shape_is_refused(prompt):
    with pytest.raises(HttpError, match="prompt") as refusal:
        completion({"prompt": prompt})
    assert refusal.value.status == 400


NEUTRAL = {
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "best_of": 1,
    "echo": False,
    "suffix": None,
    "min_tokens": 0,
    "use_beam_search": False,
    "skip_special_tokens": True,
    "response_format": {"type": "text"},
    "prompt_logprobs": None,
    "logit_processors": None,
}


def test_a_field_that_asks_for_nothing_passes():
    assert completion(NEUTRAL | {"max_tokens": 3}).requests == completion({"max_tokens": 3}).requests
    assert chat(NEUTRAL | {"top_logprobs": 0, "tool_choice": "none", "tools": []}).requests == chat({}).requests


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 2),
        ("echo", True),
        ("suffix", "x"),
        ("use_beam_search", True),
        ("prompt_logprobs", 1),
        ("guided_regex", "a+"),
        ("chat_template", "{{ messages }}"),
        ("truncate_prompt_tokens", 5),
        ("allowed_token_ids", [5]),
    ],
)
def test_a_field_that_is_not_served_is_refused_by_its_name(field, value):
    for ask in (completion, chat):
        with pytest.raises(HttpError, match=f"{field}=.* is not supported") as refusal:
            ask({field: value})
        assert (refusal.value.status, refusal.value.param) == (400, field)


@pytest.mark.parametrize(
    ("field", "near"),
    [("temprature", "temperature"), ("max_token", "max_tokens"), ("topp", "top_p"), ("stop_ids", "stop_token_ids")],
)
def test_an_unknown_field_is_refused_with_the_nearest_one(field, near):
    with pytest.raises(HttpError, match=f"unknown field '{field}': did you mean '{near}'") as refusal:
        completion({field: 1})
    assert refusal.value.body["error"] == {
        "message": str(refusal.value),
        "type": "invalid_request_error",
        "param": field,
        "code": "unknown_field",
    }


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"max_tokens": "5"}, "max_tokens", 'an integer of 64 bits; got "5"'),
        ({"max_tokens": 2.5}, "max_tokens", "an integer of 64 bits; got 2.5"),
        ({"n": True}, "n", "an integer of 64 bits; got true"),
        ({"temperature": "hot"}, "temperature", "a finite number"),
        ({"temperature": True}, "temperature", "a finite number"),
        ({"stream": 1}, "stream", "true or false; got 1"),
        ({"stop": [1]}, "stop", "a string or a list of strings"),
        ({"stop_token_ids": [1, -2]}, "stop_token_ids", "a list of token ids"),
        ({"stop_token_ids": 3}, "stop_token_ids", "a list of token ids"),
        ({"stream_options": []}, "stream_options", "an object"),
    ],
)
def test_a_wrong_type_is_refused_with_the_one_that_is_wanted(body, param, message):
    with pytest.raises(HttpError, match=message) as refusal:
        completion(body)
    assert (refusal.value.status, refusal.value.param, refusal.value.code) == (400, param, "invalid_type")


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"n": 0}, "n", "n must be an integer of at least 1"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be an integer of at least 1"),
        ({"temperature": -1}, "temperature", "temperature must be 0"),
        ({"temperature": 0.001}, "temperature", "at least 0.01"),
        ({"top_p": 0}, "top_p", "in \\(0, 1\\]"),
        ({"top_k": -2}, "top_k", "top_k must be"),
        ({"min_p": 2}, "min_p", "min_p must be"),
        ({"seed": -1}, "seed", "seed must be"),
        ({"stop": ""}, "stop", "stop must be"),
        ({"max_tokens": 63}, None, "lower max_tokens to 62 or less"),
        ({"stop_token_ids": [9999]}, "stop_token_ids", "stop_token_ids must hold ids in"),
        ({"logprobs": 21}, "logprobs", "must be an integer in \\[0, 20\\]"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream=true"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options", "with include_usage"),
        ({"n": 9}, "n", "1 prompts with n=9 ask for 9 answers; the limit here is 8"),
        ({"prompt": ["a"] * 9}, "prompt", "9 prompts with n=1 ask for 9 answers; the limit here is 8"),
    ],
)
def test_a_wrong_value_is_refused_with_the_rule(body, param, message):
    with pytest.raises(HttpError, match=message) as refusal:
        completion(body, max_answers=8)
    assert (refusal.value.status, refusal.value.param) == (400, param)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": "hello"}, "messages", "a list of objects"),
        ({"messages": [{"content": "a"}]}, r"messages[0].role", "needs a role"),
        ({"messages": [{"role": "user"}]}, r"messages[0].content", "must be a string"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"messages[0].content", "text alone"),
        ({"max_completion_tokens": 5}, "max_completion_tokens", "two names of one thing"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "has a name"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": {"type": "function", "function": "f"}}, "tool_choice", "name one of the functions"),
        ({"tool_choice": {"type": "function", "function": {"name": ["f"]}}}, "tool_choice", "name one of the"),
        ({"chat_template_kwargs": {"politely": True}}, "messages", "does not know the variable"),
        ({"required_prefix_token_ids": [5, 6]}, "required_prefix_token_ids", "in the first turn"),
        ({"required_prefix_token_ids": "5"}, "required_prefix_token_ids", "a list of token ids"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "messages", "not compatible"),
    ],
)
def test_a_chat_that_cannot_be_written_is_refused(body, param, message):
    with pytest.raises(HttpError, match=message) as refusal:
        chat(body)
    assert (refusal.value.status, refusal.value.param) == (400, param)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"text": {"format": "json"}}, "text", "text.format must be an object"),
        ({"messages": [{"role": "user", "content": "b"}]}, "messages", "here send input"),
        ({"n": 2}, "n", "here send several requests"),
        ({"include": ["reasoning.encrypted_content"]}, "include", "may hold 'message.output_text.logprobs' alone"),
        ({"response_format": {"type": "json_object"}}, "response_format", "here send text"),
    ],
)
def test_a_response_that_cannot_be_asked_for_as_a_chat_is_refused(body, param, message):
    with pytest.raises(HttpError, match=message) as refusal:
        ResponsesRequest.of({"input": "a"} | body)
    assert (refusal.value.status, refusal.value.param) == (400, param)


def test_one_part_of_text_is_a_text():
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert chat({"messages": parts}).requests == chat({}).requests


def test_tools_are_written_where_their_calls_are_wanted_as_text():
    body = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}
    room = Limits(vocab_size=len(TOKENIZER), max_length=256, tokenizer=TOKENIZER)
    asked = chat(body, room)
    assert asked.tools is None
    assert '"function"' in TOKENIZER.decode(asked.requests[0].prompt)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"5", b"{", b'{"n": NaN}', b'{"n": Infinity}', b"\xff", b'{"prompt": "\\ud800"}', b"[" * 100_000],
)
def test_a_body_that_is_no_json_object_is_refused(body):
    with pytest.raises(HttpError) as refusal:
        read_json(body)
    assert (refusal.value.status, refusal.value.code) == (400, "invalid_json")


def test_a_number_beyond_all_floats_is_refused():
    with pytest.raises(HttpError, match="temperature must be a finite number"):
        completion(read_json(b'{"temperature": 1e999}'))


def test_an_engine_without_a_limit_needs_max_tokens_of_a_chat():
    endless = Limits(vocab_size=len(TOKENIZER), max_length=None, tokenizer=TOKENIZER)
    with pytest.raises(HttpError, match="max_tokens is needed"):
        chat({"max_tokens": None}, limits=endless)
    assert chat({}, limits=endless).requests[0].sampling.max_new_tokens == 4
    assert completion({}, limits=endless).requests[0].sampling.max_new_tokens == 16
    assert completion({"max_tokens": 5}, limits=endless).requests[0].sampling.max_new_tokens == 5


def test_each_error_of_an_engine_has_its_status():
    assert from_engine(SampleTimeoutError("600 s passed", timed_out=[])).status == 504
    assert from_engine(EngineDeadError("gone")).status == 503
    assert from_engine(LogpError("NaN")).status == 500
    assert from_engine(LogpError("NaN")).body["error"]["type"] == "server_error"
    assert from_engine(PromptError("too long")).status == 400


def test_limits_are_above_zero():
    with pytest.raises(ValueError, match="max_answers must be above 0; got max_answers=0"):
        ServerLimits(max_answers=0)


def test_more_words_to_look_for_than_the_limit_are_refused():
    words = {"stop": ["a"] * 30, "bad_words": ["b"] * 30, "stop_token_ids": [5] * 4}
    assert completion(words).requests
    for name, some in words.items():
        with pytest.raises(HttpError, match=r"65 of stop.*max_stop_and_bad_words is 64") as refusal:
            completion(words | {name: some + some[:1]})
        assert refusal.value.status == 400
    with pytest.raises(HttpError, match="max_stop_and_bad_words is 63"):
        completion(words, max_stop_and_bad_words=63)


@pytest.mark.parametrize("field", ["n", "seed", "top_k", "max_tokens"])
@pytest.mark.parametrize("value", [2**63, 10**4299, -(10**4299)])
def test_an_integer_that_no_engine_can_hold_is_refused(field, value):
    with pytest.raises(HttpError, match=f"{field} must be an integer of 64 bits") as refusal:
        completion({field: value, "prompt": ["hello"] * 20})
    assert (refusal.value.status, len(str(refusal.value)) < 200) == (400, True)


def test_a_required_prefix_outside_the_vocabulary_is_refused():
    for token in (len(TOKENIZER), 99999999999):
        with pytest.raises(HttpError, match=f"required_prefix_token_ids must hold ids in .* got {token}") as refusal:
            chat({"required_prefix_token_ids": [5, token]})
        assert (refusal.value.status, refusal.value.param) == (400, "required_prefix_token_ids")


@pytest.mark.parametrize("body", [b'{"n": 1, "n": 2}', b'{"stream_options": {"n": 1, "n": 1}}'])
def test_a_field_that_stands_twice_is_refused(body):
    with pytest.raises(HttpError, match='the field "n" stands twice') as refusal:
        read_json(body)
    assert (refusal.value.status, refusal.value.param) == (400, "n")


def test_a_refusal_does_not_echo_all_that_was_sent():
    long = "x" * 5000
    for body in ({"stream": True, "stream_options": {"include_usage": long}}, {long: 1}, {"n": long}):
        with pytest.raises(HttpError) as refusal:
            completion(body)
        assert len(json.dumps(refusal.value.body)) < 1000


@pytest.mark.parametrize("body", [b'{"prompt": "\\ud800"}', b'{"prompt": "\\uD800"}', b'{"prompt": "\\UD800"}'])
def test_half_a_surrogate_pair_is_refused_however_it_is_written(body):
    with pytest.raises(HttpError, match="the body is no JSON"):
        read_json(body)


def test_a_surrogate_pair_is_a_character():
    assert read_json(b'{"prompt": "\\uD83D\\ude42"}')["prompt"] == "🙂"


def test_vllms_way_to_say_all_tokens_is_ours():
    assert completion({"top_k": -1}).requests == completion({"top_k": 0}).requests == completion({}).requests
