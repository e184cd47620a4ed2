"""The HTTP server over the vLLM engine, as OpenAI's own client sees it."""

import asyncio
import threading
from importlib.util import find_spec

import pytest

for needed in ("vllm", "httpx", "openai", "starlette", "uvicorn"):
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: nox runs these tests in the cell that has it", allow_module_level=True)

import httpx
import openai
import tiny
from transformers import AutoTokenizer

from rl_generation.errors import ModelError
from rl_generation.requests import Sampling
from rl_generation.server import ControlServer, Server
from rl_generation.vllm import VllmEngine

MODEL = "tiny"
QUESTION = {"role": "user", "content": "hello there"}
PROMPTS = tiny.prompts(4)
TURNS = (
    "{% for message in messages %}{{ '<s>' + message.role + '\\n' + message.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def engine(checkpoints):
    engine = VllmEngine(tiny.options(checkpoints("llama")), version=3)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tokenizer(checkpoints):
    tokenizer = AutoTokenizer.from_pretrained(checkpoints("llama"))
    tokenizer.chat_template = TURNS
    return tokenizer


@pytest.fixture(scope="module")
def client(engine, tokenizer):
    with (
        Server(engine, tokenizer=tokenizer, model_name=MODEL) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        yield client


def complete(client, prompt, *, token_ids=True, extra_body=None, **options):
    extra = {"return_token_ids": token_ids} | (extra_body or {})
    return client.completions.create(model=MODEL, prompt=prompt, extra_body=extra, **options)


def test_completions_are_what_the_engine_generates(client, engine):
    rollouts = engine.generate(PROMPTS, Sampling(max_new_tokens=24, n=2, temperature=0.8, top_p=0.9, seed=5))
    response = complete(client, PROMPTS, max_tokens=24, n=2, temperature=0.8, top_p=0.9, seed=5, logprobs=0)
    assert response.weight_version == 3
    for choice, rollout in zip(response.choices, rollouts, strict=True):
        assert choice.token_ids == list(rollout.tokens)
        assert choice.prompt_token_ids == PROMPTS[rollout.prompt_index]
        assert choice.logprobs.token_logprobs == pytest.approx(list(rollout.logp), abs=1e-4)
        assert (choice.finish_reason, choice.stop_reason) == (rollout.finish_reason, rollout.stop_reason)
        assert choice.weight_versions == [{"version": 3, "start": 0, "end": len(rollout.tokens)}]


@pytest.mark.parametrize("stop", [None, ["e", "a", "1"]])
def test_a_stream_is_the_whole_answer_in_pieces(client, stop):
    asked = {"max_tokens": 60, "seed": 1, "n": 3, "stop": stop}
    whole = complete(client, PROMPTS[0], **asked)
    streamed = [{"text": "", "token_ids": [], "ends": []} for _ in range(3)]
    for chunk in complete(client, PROMPTS[0], stream=True, **asked):
        (choice,) = chunk.choices
        streamed[choice.index]["text"] += choice.text
        streamed[choice.index]["token_ids"] += choice.token_ids
        streamed[choice.index]["ends"] += [choice.stop_reason] if choice.finish_reason else []
    expected = [
        {"text": choice.text, "token_ids": choice.token_ids, "ends": [choice.stop_reason]} for choice in whole.choices
    ]
    assert streamed == expected
    assert stop is None or any(choice.stop_reason in stop for choice in whole.choices)


def test_a_conversation_keeps_the_tokens_that_were_sampled(client):
    messages, prefix = [QUESTION], []
    for turn in range(3):
        extra = {"return_token_ids": True, "bad_words": ["<s>", "<pad>", "<unk>"]}
        extra |= {"required_prefix_token_ids": prefix} if prefix else {}
        response = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=12, seed=turn, extra_body=extra
        )
        assert response.prompt_token_ids[: len(prefix)] == prefix
        (choice,) = response.choices
        prefix = response.prompt_token_ids + choice.token_ids
        messages = [*messages, {"role": "assistant", "content": choice.message.content}, QUESTION]


def test_many_clients_at_once_get_each_what_they_asked_for(client, engine):
    samplings = [Sampling(max_new_tokens=10 + index, seed=index, stop_token_ids=(10 + index,)) for index in range(8)]
    prompts = tiny.prompts(8, seed=1)
    answers = [None] * 8

    def ask(index):
        extra = {"stop_token_ids": [10 + index]}
        answers[index] = complete(client, prompts[index], max_tokens=10 + index, seed=index, extra_body=extra)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for answer, rollout in zip(answers, engine.generate(prompts, samplings), strict=True):
        assert answer.choices[0].token_ids == list(rollout.tokens)


def test_a_client_that_leaves_frees_the_engine(client, engine):
    before = engine.metrics().finished.get("abort", 0)
    stream = complete(client, PROMPTS[0], max_tokens=400, stream=True, extra_body={"ignore_eos": True})
    next(stream)
    stream.close()
    # Later requests keep the engine stepping until it has heard of it.
    for _ in range(200):
        if engine.metrics().finished.get("abort", 0) > before:
            break
        complete(client, PROMPTS[1], max_tokens=2)
    metrics = engine.metrics()
    assert (metrics.running, metrics.waiting) == (0, 0)


def test_a_sample_that_takes_too_long_is_a_gateway_timeout(client, engine, monkeypatch):
    monkeypatch.setattr(engine, "_timeout_s", 0.2)
    engine.pause(mode="keep")
    try:
        with pytest.raises(openai.InternalServerError, match="having reached 0 tokens") as failure:
            complete(client, PROMPTS[0], max_tokens=8)
        with pytest.raises(openai.APIError, match="having reached 0 tokens"):
            list(complete(client, PROMPTS[0], max_tokens=8, stream=True))
    finally:
        engine.resume()
    assert failure.value.status_code == 504


def test_an_answer_over_http_says_which_weights_made_which_of_its_tokens(client, engine):
    """Under `pause`, a commit and `resume`, as a refit does them, in the middle of two answers of one request."""

    def tell(version):
        asyncio.run_coroutine_threadsafe(engine.vllm.update_weight_version(str(version)), engine.loop).result(60)

    def refit(version):
        engine.pause(mode="keep")
        tell(version)
        engine.resume()

    asked = {"max_tokens": 300, "n": 2, "extra_body": {"ignore_eos": True}}
    try:
        received, ends, versions = 0, {}, set()
        for chunk in complete(client, PROMPTS[0], stream=True, **asked):
            for choice in chunk.choices:
                received += len(choice.token_ids)
                if choice.finish_reason:
                    ends[choice.index] = choice.weight_versions
                    versions.add(chunk.weight_version)
            if received and engine.version == 3:
                refit(4)
        for first, second in (ends[0], ends[1]):
            assert (first["version"], first["start"], second["version"], second["end"]) == (3, 0, 4, 300)
            assert first["end"] == second["start"]
        assert (received, versions) == (600, {3})
        whole = complete(client, PROMPTS[0], **asked)
        assert whole.weight_version == 4
        health = client.get(str(client.base_url).removesuffix("/v1/") + "/health", cast_to=object)
        assert health["weight_version"] == 4
    finally:
        tell(3)


def test_an_engine_without_weights_refuses_with_a_status_and_not_in_a_stream(client, engine):
    def refuse():
        raise ModelError("no refit has been committed")

    engine.ready = refuse
    try:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="no refit has been committed") as failure:
                complete(client, PROMPTS[0], max_tokens=8, stream=stream)
            assert (failure.value.status_code, failure.value.body["code"]) == (500, "engine_error")
    finally:
        engine.ready = None


def test_nothing_that_changes_the_engine_is_on_the_public_port(checkpoints, tokenizer, engine, monkeypatch):
    """Even where vLLM's own variables would put it there."""
    for name in ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        monkeypatch.setenv(name, "1")
    paths = ["sleep", "wake_up", "pause", "resume", "reset_prefix_cache", "collective_rpc", "start_profile"]
    paths += [
        "update_weights",
        "init_weight_transfer_engine",
        "abort_requests",
        "v1/load_lora_adapter",
        "scale_elastic_ep",
    ]
    paths += [
        "inference/v1/generate",
        "v1/chat/completions/batch",
        "invocations",
        "server_info",
        "docs",
        "openapi.json",
    ]
    with Server(engine, tokenizer=tokenizer, model_name=MODEL) as server, httpx.Client(base_url=server.url) as http:
        for path in paths:
            assert http.post(f"/{path}", json={}).status_code == 404, path
            assert http.get(f"/{path}").status_code == 404, path
    assert not engine.is_paused


def test_a_required_prefix_is_in_the_prompt_as_it_is_or_refused(client):
    """Two encodings of one text: the tokens that were sampled, and those that the template's text would get."""
    first = client.chat.completions.create(
        model=MODEL, messages=[QUESTION], max_tokens=8, extra_body={"return_token_ids": True, "ignore_eos": True}
    )
    said = {"role": "assistant", "content": first.choices[0].message.content}
    prefix = first.prompt_token_ids + first.choices[0].token_ids
    for wrong, message in (
        # The token that is missing may be half a character, which the text before it then lacks as well.
        (prefix[:-1], "without an end-of-turn or other added token between|are not what the template writes"),
        ([*prefix[:-1], 70, 70, 70], "are not what the template writes"),
        ([*prefix, 5000], "below the model's vocabulary size|vocab"),
    ):
        with pytest.raises(openai.BadRequestError, match=message) as refused:
            client.chat.completions.create(
                model=MODEL,
                messages=[QUESTION, said, QUESTION],
                max_tokens=2,
                extra_body={"required_prefix_token_ids": wrong},
            )
        assert refused.value.body["param"] == "required_prefix_token_ids"


def test_health_and_metrics_are_the_engines(client, engine):
    root = str(client.base_url).removesuffix("/v1/")
    assert client.get(f"{root}/health", cast_to=object) == {"status": "ok", "weight_version": 3}
    text = client.get(f"{root}/metrics", cast_to=str)
    assert f'model_name="{MODEL}"' in text or f'model="{MODEL}"' in text


def test_a_control_port_freezes_and_continues_what_is_under_way(engine):
    sampling = Sampling(max_new_tokens=450, ignore_eos=True, seed=4)  # so that the pause comes before its end
    expected = engine.submit(PROMPTS[0], sampling, seed=0).result(240).tokens
    headers = {"Authorization": "Bearer token"}
    with (
        ControlServer(engine, token="token") as server,
        httpx.Client(base_url=server.url, headers=headers, timeout=240) as control,
    ):
        future = engine.submit(PROMPTS[0], sampling, seed=0)
        assert control.post("/pause", json={}).json() == {"paused": True, "weight_version": 3}
        assert not future.done()
        assert control.post("/resume", json={}).json() == {"paused": False, "weight_version": 3}
        assert future.result(240).tokens == expected


def test_an_engine_sleeps_and_wakes_and_refuses_to_while_somebody_waits(engine):
    greedy = Sampling(max_new_tokens=8, temperature=0.0)
    expected = engine.generate(PROMPTS, greedy)
    with (
        ControlServer(engine, token="token") as server,
        httpx.Client(base_url=server.url, headers={"Authorization": "Bearer token"}, timeout=240) as control,
    ):
        future = engine.submit(PROMPTS[0], Sampling(max_new_tokens=450, ignore_eos=True), seed=0)
        control.post("/pause", json={})
        refused = control.post("/sleep", json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "engine_refuses")
        assert "requests are under way" in refused.json()["error"]["message"]
        control.post("/resume", json={})
        future.result(240)
        assert control.post("/sleep", json={}).status_code == 200
        with pytest.raises(ValueError, match="wake_up"):
            engine.generate(PROMPTS, greedy)
        assert control.post("/wake_up", json={}).status_code == 200
        assert [one.tokens for one in engine.generate(PROMPTS, greedy)] == [one.tokens for one in expected]
