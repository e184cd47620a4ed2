"""The server as OpenAI's own client sees it, over the embedded engine and loopback."""

import asyncio
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "programs"))

for needed in ("httpx", "openai", "starlette", "uvicorn"):
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: rl-generation[server] and its test group", allow_module_level=True)

import openai
import serving

from rl_generation.chat import encode_chat
from rl_generation.requests import Sampling

QUESTION = {"role": "user", "content": "hello there"}
FOLLOW_UP = {"role": "user", "content": "how?"}
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


@pytest.fixture(scope="module")
def served():
    with serving.serving(wrap=serving.Stepwise) as made:
        yield made


@pytest.fixture(scope="module")
def plain(served):
    """An engine of the same weights in the test's own hands."""
    return serving.plain_engine(served.tokenizer)


def complete(served, prompt=PROMPTS[0], **options):
    extra = {"return_token_ids": True} | options.pop("extra_body", {})
    return served.client.completions.create(model=serving.MODEL, prompt=prompt, extra_body=extra, **options)


def chat(served, messages=(QUESTION,), **options):
    extra = {"return_token_ids": True} | options.pop("extra_body", {})
    return served.client.chat.completions.create(
        model=serving.MODEL, messages=list(messages), extra_body=extra, **options
    )


def joined(chunks, choices):
    """Of a streamed completion, for each choice: text, token ids, logp, offsets, and its last chunk's choice."""
    parts = [{"text": "", "token_ids": [], "logp": [], "offsets": [], "last": None} for _ in range(choices)]
    for chunk in chunks:
        for choice in chunk.choices:
            part = parts[choice.index]
            assert part["last"] is None, "a choice goes on after its end"
            part["text"] += choice.text
            part["token_ids"] += choice.token_ids
            if choice.logprobs:
                part["logp"] += choice.logprobs.token_logprobs
                part["offsets"] += choice.logprobs.text_offset
            part["last"] = choice if choice.finish_reason else None
    return parts


def test_completions_are_what_the_engine_generates(served, plain):
    sampling = Sampling(max_new_tokens=12, n=2, temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, seed=5)
    rollouts = plain.generate(PROMPTS, sampling)
    response = complete(
        served,
        PROMPTS,
        max_tokens=12,
        n=2,
        temperature=0.8,
        top_p=0.9,
        seed=5,
        logprobs=0,
        extra_body={"top_k": 40, "min_p": 0.01},
    )
    assert [choice.index for choice in response.choices] == list(range(6))
    for choice, rollout in zip(response.choices, rollouts, strict=True):
        assert choice.token_ids == list(rollout.tokens)
        assert choice.prompt_token_ids == PROMPTS[rollout.prompt_index]
        assert choice.logprobs.token_logprobs == pytest.approx(list(rollout.logp), abs=1e-5)
        assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) == len(rollout.tokens)
        assert (choice.finish_reason, choice.stop_reason) == (rollout.finish_reason, rollout.stop_reason)
        assert choice.text == served.tokenizer.decode(rollout.tokens, skip_special_tokens=True)
    generated = sum(len(rollout.tokens) for rollout in rollouts)
    usage = response.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (9, generated, 9 + generated)
    assert response.logp_of == "sampled"


def test_a_chat_is_a_completion_of_its_template(served):
    prompt = encode_chat(served.tokenizer, [QUESTION])
    talked = chat(served, max_completion_tokens=8, seed=1, n=2, logprobs=True)
    completed = complete(served, prompt, max_tokens=8, seed=1, n=2, logprobs=0)
    assert talked.prompt_token_ids == prompt
    for one, other in zip(talked.choices, completed.choices, strict=True):
        assert (one.message.role, one.message.content) == ("assistant", other.text)
        assert one.token_ids == other.token_ids
        assert [entry.logprob for entry in one.logprobs.content] == other.logprobs.token_logprobs
        assert [entry.token for entry in one.logprobs.content] == other.logprobs.tokens
        for entry in one.logprobs.content:
            assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token


@pytest.mark.parametrize("stop", [None, ["e", "zz"]])
def test_a_streamed_completion_is_the_whole_one_in_pieces(served, stop):
    asked = {"max_tokens": 24, "seed": 3, "n": 3, "logprobs": 0, "stop": stop}
    whole = complete(served, PROMPTS, **asked)
    chunks = list(complete(served, PROMPTS, stream=True, stream_options={"include_usage": True}, **asked))
    for choice, part in zip(whole.choices, joined(chunks, 9), strict=True):
        assert part["text"] == choice.text
        assert part["token_ids"] == choice.token_ids
        assert part["logp"] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-5)
        assert part["offsets"] == choice.logprobs.text_offset
        ends = ("finish_reason", "stop_reason", "weight_versions")
        assert [getattr(part["last"], name) for name in ends] == [getattr(choice, name) for name in ends]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len(chunks) > 24


def test_a_streamed_chat_is_the_whole_one_in_pieces(served):
    asked = {"max_tokens": 16, "seed": 4, "n": 2, "logprobs": True}
    whole = chat(served, **asked)
    chunks = list(chat(served, stream=True, **asked))
    for choice in whole.choices:
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(each.delta.content for each in mine) == choice.message.content
        assert [token for each in mine[1:] for token in each.token_ids] == choice.token_ids
        entries = [entry for each in mine[1:] for entry in each.logprobs.content]
        assert [entry.token for entry in entries] == [entry.token for entry in choice.logprobs.content]
        assert mine[-1].finish_reason == choice.finish_reason
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stop_string_ends_the_text_before_it_and_stays_in_the_tokens(served):
    free = complete(served, max_tokens=40, seed=9, extra_body={"ignore_eos": True}).choices[0]
    stop = next(free.text[i] for i in range(5, len(free.text)) if free.text[i] not in free.text[:5] + "\ufffd")
    cut = free.text.index(stop)
    asked = {"max_tokens": 40, "seed": 9, "stop": [stop]}
    (choice,) = complete(served, **asked, extra_body={"ignore_eos": True}).choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (free.text[:cut], "stop", stop)
    assert choice.token_ids == free.token_ids[: len(choice.token_ids)]
    assert stop in served.tokenizer.decode(choice.token_ids)
    extra = {"ignore_eos": True, "include_stop_str_in_output": True}
    assert complete(served, **asked, extra_body=extra).choices[0].text == free.text[: cut + 1]


def test_stop_tokens_bad_words_and_the_engines_own_end(served):
    free = complete(served, max_tokens=20, temperature=0).choices[0].token_ids
    (choice,) = complete(served, max_tokens=20, temperature=0, extra_body={"stop_token_ids": [free[3]]}).choices
    assert choice.token_ids == free[: free.index(free[3]) + 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", free[3])
    word = served.tokenizer.decode([next(token for token in free if served.tokenizer.decode([token]).isalnum())])
    (choice,) = complete(served, max_tokens=20, temperature=0, extra_body={"bad_words": [word]}).choices
    assert choice.token_ids != free
    ended = complete(served, n=16, max_tokens=150, seed=0).choices
    assert any(choice.stop_reason == 3 and choice.token_ids[-1] == 3 for choice in ended)
    endless = complete(served, n=4, max_tokens=50, seed=0, extra_body={"ignore_eos": True}).choices
    assert [len(choice.token_ids) for choice in endless] == [50] * 4


def test_max_tokens_missing_is_16_of_a_completion_and_the_rest_of_the_context_of_a_chat(served):
    choice = complete(served, seed=0, extra_body={"ignore_eos": True}).choices[0]
    assert (len(choice.token_ids), choice.finish_reason) == (16, "length")
    answer = chat(served, seed=0, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == 160


def test_tokens_can_be_named_by_their_ids(served):
    choice = complete(served, max_tokens=5, logprobs=0, extra_body={"return_tokens_as_token_ids": True}).choices[0]
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]


def test_token_ids_come_only_when_asked_for(served):
    response = complete(served, max_tokens=3, extra_body={"return_token_ids": False})
    assert "token_ids" not in response.model_dump_json()
    assert response.choices[0].logprobs is None


def test_token_ids_survive_the_round_trip_to_text_and_back(served):
    post = served.post
    tokens = post("/tokenize", {"prompt": "hello there"}).json()
    assert tokens["tokens"] == served.tokenizer.encode("hello there")
    assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 160)
    talk = post("/tokenize", {"messages": [QUESTION]}).json()["tokens"]
    assert talk == encode_chat(served.tokenizer, [QUESTION]) == chat(served, max_tokens=1).prompt_token_ids
    assert complete(served, "hello", max_tokens=1).choices[0].prompt_token_ids == served.tokenizer.encode("hello")


def test_a_conversation_keeps_the_tokens_that_were_sampled(served):
    """A policy with random weights samples letters where the tokenizer writes words."""
    messages, prefix, kept, guessed_otherwise = [QUESTION], [], [], 0
    for turn in range(4):
        extra = {"required_prefix_token_ids": prefix} if prefix else {}
        # Text leaves these out, so that an answer with one in its middle would be refused.
        bad_words = ["<|pad|>", "<|endoftext|>", "<|im_start|>"]
        response = chat(served, messages, max_tokens=10, seed=turn, extra_body=extra | {"bad_words": bad_words})
        assert response.prompt_token_ids[: len(prefix)] == prefix
        guessed = served.post("/tokenize", {"messages": messages}).json()["tokens"]
        assert served.tokenizer.decode(guessed) == served.tokenizer.decode(response.prompt_token_ids)
        guessed_otherwise += guessed != response.prompt_token_ids
        (choice,) = response.choices
        prefix = response.prompt_token_ids + choice.token_ids
        kept.append(choice.token_ids)
        messages = [*messages, {"role": "assistant", "content": choice.message.content}, FOLLOW_UP]
    assert guessed_otherwise == 3, "encoding the text again never gave other tokens: this test shows nothing"
    wrong = served.refused(
        "/v1/chat/completions",
        {"messages": messages, "max_tokens": 4, "required_prefix_token_ids": [*prefix[:-1], 5, 5]},
    )
    assert wrong["param"] == "required_prefix_token_ids"


def test_requests_of_one_moment_share_the_batch_and_nothing_else():
    with serving.serving(wrap=lambda engine: serving.Gathering(engine, 16)) as served:
        lone = serving.plain_engine(served.tokenizer)
        samplings = [
            Sampling(
                max_new_tokens=20 + index,
                n=1 + index % 2,
                temperature=(0.0, 0.7, 1.0)[index % 3],
                top_p=0.9 if index % 2 else 1.0,
                stop=("e", "o")[: index % 3],
                stop_token_ids=(10 + index,),
                ignore_eos=index % 4 == 0,
                seed=index,
            )
            for index in range(16)
        ]
        prompts = [[5 + index, 6, 7][: 1 + index % 3] for index in range(16)]

        async def ask(client, prompt, sampling):
            response = await client.completions.create(
                model=serving.MODEL,
                prompt=prompt,
                max_tokens=sampling.max_new_tokens,
                n=sampling.n,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                stop=list(sampling.stop) or None,
                seed=sampling.seed,
                logprobs=0,
                extra_body={
                    "stop_token_ids": list(sampling.stop_token_ids),
                    "ignore_eos": sampling.ignore_eos,
                    "return_token_ids": True,
                },
            )
            return response.choices

        async def all_at_once():
            base = f"{served.server.url}/v1"
            async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0, timeout=60) as client:
                return await asyncio.gather(*map(ask, [client] * 16, prompts, samplings))

        answers = asyncio.run(all_at_once())
        for prompt, sampling, choices in zip(prompts, samplings, answers, strict=True):
            for choice, rollout in zip(choices, lone.generate([prompt], [sampling]), strict=True):
                assert choice.token_ids == list(rollout.tokens)
                assert choice.stop_reason == rollout.stop_reason
                assert choice.logprobs.token_logprobs == pytest.approx(list(rollout.logp), abs=1e-4)
        tokens = sum(len(choice.token_ids) for choices in answers for choice in choices)
        assert served.engine.steps < tokens / 3, "the requests went through the engine one after another"


def test_every_answer_says_which_weights_made_it(served):
    served.engine.commit_version(7)
    try:
        response = complete(served, max_tokens=4, extra_body={"ignore_eos": True})
        assert response.weight_version == 7
        assert response.choices[0].weight_versions == [{"version": 7, "start": 0, "end": 4}]
        assert served.client.models.list().data[0].weight_version == 7
        served.engine.hold(after=3)
        stream = complete(served, max_tokens=20, stream=True, extra_body={"ignore_eos": True})
        chunks = [next(stream)]
        served.engine.go_on_after(lambda: served.engine.commit_version(8))
        chunks += stream
        first, second = chunks[-1].choices[0].weight_versions
        assert (first["version"], second["version"]) == (7, 8)
        assert (first["start"], first["end"], second["end"]) == (0, second["start"], 20)
        assert chunks[-1].weight_version == 7
    finally:
        served.engine.commit_version(0)


def test_the_model_is_listed_and_another_name_is_not_found(served):
    (model,) = served.client.models.list().data
    assert (model.id, model.max_model_len, model.logp_of) == (serving.MODEL, 160, "sampled")
    assert served.client.models.retrieve(serving.MODEL) == model
    with pytest.raises(openai.NotFoundError, match="the model here is 'tiny'; got 'gpt'") as refusal:
        served.client.completions.create(model="gpt", prompt=[5])
    assert refusal.value.code == "model_not_found"


def test_a_refusal_reaches_the_client_as_openais_error(served):
    with pytest.raises(openai.BadRequestError) as refusal:
        chat(served, extra_body={"echo": True})
    assert refusal.value.param == "echo"
    assert refusal.value.code == "unsupported_field"
    with pytest.raises(openai.BadRequestError, match="did you mean 'temperature'"):
        chat(served, extra_body={"temperatur": 0.5})
    with pytest.raises(openai.BadRequestError, match=r"max_position_embeddings=160.*lower max_tokens to 157"):
        complete(served, max_tokens=600)
    with pytest.raises(openai.BadRequestError, match="temperature must be"):
        complete(served, max_tokens=5, temperature=-1, stream=True)


def test_metrics_are_prometheus_text(served):
    complete(served, max_tokens=5, extra_body={"ignore_eos": True})
    with served.http as http:
        response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    sample = re.compile(r'[a-zA-Z_:][a-zA-Z0-9_:]*(\{([a-zA-Z_]\w*="[^"]*",?)*\})? [-+0-9.eEInfNa]+')
    lines = response.text.splitlines()
    assert all(re.match(r"# (HELP|TYPE) \w", line) or sample.fullmatch(line) for line in lines)
    generated = [line for line in lines if "generat" in line and not line.startswith("#")]
    assert any(float(line.rsplit(" ", 1)[1]) >= 5 and serving.MODEL in line for line in generated)
