"""`RemoteEngine` over our own server, as tokens and log-probabilities of the engine behind it.

What it does with vLLM's and SGLang's answers is in test_remote_servers.py, and with a real `vllm serve` in tests/vllm.
"""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "programs"))

for needed in ("httpx", "openai", "starlette", "uvicorn"):
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: rl-generation[server] and its test group", allow_module_level=True)

import saved_model
import serving
import speaking

from rl_generation import (
    EngineDeadError,
    EngineOptionError,
    LogpError,
    PromptError,
    RemoteEngine,
    RequestEngine,
    SampleTimeoutError,
    Sampling,
    TransformersEngine,
    verify_logp,
)

PROMPTS = [[5, 6, 7], [30, 4, 200, 11], [9] * 20]
SEEDED = Sampling(max_new_tokens=24, n=3, temperature=0.9, top_p=0.9, seed=7)
GREEDY = Sampling(max_new_tokens=24, temperature=0.0)
KEY = "a-key-of-the-test"


@pytest.fixture(scope="module")
def served():
    with serving.serving() as made:
        yield made


@pytest.fixture(scope="module")
def embedded():
    """The engine that is served, once more."""
    return serving.plain_engine(speaking.tokenizer())


@pytest.fixture(scope="module")
def remote(served):
    with RemoteEngine(served.server.url, tokenizer=served.tokenizer) as engine:
        yield engine


def exact(rollouts):
    """All that a rollout says."""
    return [
        (r.tokens, r.logp, r.finish_reason, r.stop_reason, r.versions, r.top_logp, r.prompt_index, r.sample_index)
        for r in rollouts
    ]


# -- The same as the engine that is served


def test_it_is_an_engine(remote):
    assert isinstance(remote, RequestEngine)
    assert (remote.limits.vocab_size, remote.limits.max_length, remote.logp_of) == (320, 160, "sampled")


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SEEDED,
        Sampling(max_new_tokens=30, seed=1, stop_token_ids=(40, 41, 42)),
        Sampling(max_new_tokens=30, seed=2, stop=("e", "the"), bad_words=("hello",)),
        Sampling(max_new_tokens=12, seed=3, ignore_eos=True, top_k=20, min_p=0.01),
        Sampling(max_new_tokens=12, seed=4, top_logp=3),
        Sampling(
            max_new_tokens=12,
            seed=5,
            presence_penalty=0.5,
            frequency_penalty=0.25,
            repetition_penalty=1.5,
            logit_bias=((7, 3.0), (8, -20.0)),
            min_new_tokens=4,
        ),
        Sampling(max_new_tokens=24, seed=6, regex="[a-z]{3,12}"),
    ],
    ids=["greedy", "seeded", "stop tokens", "stop strings", "cuts", "top logp", "penalties", "regex"],
)
def test_tokens_and_logp_are_those_of_the_engine_bit_for_bit(remote, embedded, sampling):
    # One prompt at a time: then the batches there and here have the same shapes, and rounding too is the same.
    for prompt in PROMPTS:
        assert exact(remote.generate([prompt], sampling)) == exact(embedded.generate([prompt], sampling))


def test_many_prompts_at_once_come_in_order_and_with_seeds_of_their_own(remote, embedded):
    # Without a nucleus: beside other rows, one whose mass is .9 to seven digits may end a token earlier or later.
    prompts, sampling = PROMPTS * 10, replace(SEEDED, top_p=1.0)
    there, here = remote.generate(prompts, sampling), embedded.generate(prompts, sampling)
    assert [r.tokens for r in there] == [r.tokens for r in here]
    assert [(r.prompt_index, r.sample_index) for r in there] == [(p, s) for p in range(30) for s in range(3)]
    assert max(abs(x - y) for a, b in zip(there, here, strict=True) for x, y in zip(a.logp, b.logp, strict=True)) < 1e-5


def test_submitted_requests_are_answered_beside_one_another_and_can_be_cancelled(served, remote, embedded):
    long = remote.submit([5, 6], Sampling(max_new_tokens=150, ignore_eos=True), seed=0)
    futures = [remote.submit(prompt, Sampling(max_new_tokens=5), seed=3) for prompt in PROMPTS]
    expected = [
        embedded.generate([prompt], [Sampling(max_new_tokens=5).for_request(3)])[0].tokens for prompt in PROMPTS
    ]
    assert [future.result(serving.DEADLINE_S).tokens for future in futures] == expected
    long.cancel()
    served.wait_until(lambda engine: not serving.under_way(engine))
    refused = remote.submit([5], Sampling(max_new_tokens=5, n=2), seed=0)
    with pytest.raises(PromptError, match="submit it 2 times"):
        refused.result(serving.DEADLINE_S)


def test_verify_logp_takes_it_like_any_engine(remote, embedded):
    agreement = verify_logp(remote, embedded.model)
    assert agreement.max_abs_difference < 1e-4


def test_the_version_is_that_of_the_weights_which_made_the_tokens():
    with serving.serving() as served, RemoteEngine(served.server.url) as engine:
        assert (engine.version, engine.generate([[5]], GREEDY)[0].version) == (0, 0)
        served.engine.commit_version(12)
        assert engine.generate([[5]], GREEDY)[0].version == 12
        assert engine.version == engine.metrics().version == 12
        with pytest.raises(EngineOptionError, match="commit it there"):
            engine.commit_version(13)


def test_metrics_count_what_was_asked_for_and_explain_names_the_server(served):
    with RemoteEngine(served.server.url) as engine:
        rollouts = engine.generate(PROMPTS, SEEDED)
        metrics = engine.metrics()
        assert metrics.prompt_tokens == sum(map(len, PROMPTS))
        assert metrics.generated_tokens == sum(len(r.tokens) for r in rollouts)
        assert (metrics.running, metrics.waiting, sum(metrics.finished.values())) == (0, 0, 9)
        assert served.server.url in engine.explain()
        assert "reported with each token" in engine.explain()


# -- What is refused


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"model": "other"}, r"serves \['tiny'\], not model='other'"),
        ({"vocab_size": 1000}, "vocab_size=320, not 1000"),
        ({"logp_of": "raw"}, "distribution 'sampled', and logp_of='raw' is asked for"),
        ({"kind": "sglang"}, "/get_model_info answers with status 404"),
        ({"kind": "tgi"}, "kind must be None or one of rl-generation, vllm, sglang"),
        ({"api_key_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE.*is not set, or empty"),
        ({"retries": -1}, "retries must be at least 0"),
        ({"request_timeout_s": 0}, "request_timeout_s must be above 0"),
    ],
)
def test_an_engine_that_the_server_cannot_be_is_refused_at_start(served, options, reason):
    with pytest.raises(EngineOptionError, match=reason):
        RemoteEngine(served.server.url, **options)


@pytest.mark.parametrize(
    ("urls", "reason"),
    [
        ([], "urls is empty"),
        ("localhost:8000", "urls must hold base URLs"),
        ("http://user:secret@localhost:8000", "which would be in logs"),
        (["http://localhost:1", "http://localhost:1/"], "names one server twice"),
    ],
)
def test_urls_are_checked_before_anything_is_sent(urls, reason):
    with pytest.raises(EngineOptionError, match=reason) as refused:
        RemoteEngine(urls)
    assert "secret" not in str(refused.value)


def test_another_tokenizer_than_the_servers_is_refused(served):
    tokenizer = speaking.tokenizer()
    tokenizer.add_tokens(["café"])
    with pytest.raises(EngineOptionError, match=r"321 tokens, and the model at .* 320"):
        RemoteEngine(served.server.url, tokenizer=tokenizer)
    tokenizer = type(tokenizer)(tokenizer_object=without_merges(speaking.tokenizer()))
    with pytest.raises(EngineOptionError, match="is another: of 'Rollouts, 0123"):
        RemoteEngine(served.server.url, tokenizer=tokenizer)


def without_merges(tokenizer):
    import json

    from tokenizers import Tokenizer

    saved = json.loads(tokenizer.backend_tokenizer.to_str())
    saved["model"]["merges"] = []
    return Tokenizer.from_str(json.dumps(saved))


def test_a_server_that_is_not_there_is_an_error_that_names_it():
    with pytest.raises(EngineDeadError, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        RemoteEngine("http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (Sampling(max_new_tokens=200), "passes the model's max_model_len=160"),
        (Sampling(max_new_tokens=2, logit_bias=((3, -float("inf")),)), "which JSON cannot hold"),
        (Sampling(max_new_tokens=2, top_logp=50), r"refuses the request: logprobs must be an integer in \[0, 20\]"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused(remote, sampling, reason):
    with pytest.raises(PromptError, match=reason):
        remote.generate([[5, 6]], sampling)


def test_text_is_refused_where_no_tokenizer_was_compared(served):
    with RemoteEngine(served.server.url) as engine, pytest.raises(PromptError, match="has no tokenizer"):
        engine.generate([[5]], Sampling(max_new_tokens=2, stop=("a",)))


def test_broken_weights_are_the_error_that_they_are_in_this_process():
    with serving.serving() as served, RemoteEngine(served.server.url, retries=0) as engine:
        served.engine.model.lm_head.weight.data.fill_(float("nan"))
        with pytest.raises(LogpError, match=f"{served.server.url}.*logp=nan"):
            engine.generate([[5]], GREEDY)


# -- API keys


def test_the_key_comes_from_the_environment_and_is_never_shown(monkeypatch, caplog):
    monkeypatch.setenv("KEY_OF_THE_SERVER", KEY)
    caplog.set_level("DEBUG")
    with serving.serving(api_key=KEY) as served:
        with pytest.raises(EngineOptionError, match=r"status 401.*name its API key by api_key_env="):
            RemoteEngine(served.server.url)
        with RemoteEngine(served.server.url, api_key_env="KEY_OF_THE_SERVER") as engine:
            assert engine.generate([[5]], GREEDY)
            assert KEY not in f"{engine!r}{engine.explain()}{vars(engine)}{engine._http.headers!r}"
    assert KEY not in caplog.text


# -- Deadlines and the end


def test_a_deadline_names_the_server_and_the_request_and_keeps_the_other_answers():
    with serving.serving(wrap=StuckAtLong) as served:
        with RemoteEngine(served.server.url, request_timeout_s=2.0) as engine:
            samplings = [Sampling(max_new_tokens=3), Sampling(max_new_tokens=99, n=2, seed=5)]
            with pytest.raises(SampleTimeoutError) as late:
                engine.generate([[5, 6], [7, 8, 9]], samplings)
        assert served.server.url in str(late.value)
        assert "prompt 1 (3 tokens, max_new_tokens=99, n=2, seed=5)" in str(late.value)
        assert "request_timeout_s=2.0" in str(late.value)
        assert [(lost.prompt_index, lost.sample_index) for lost in late.value.timed_out] == [(1, 0), (1, 1)]
        assert [rollout.prompt_index for rollout in late.value.rollouts] == [0]
        served.wait_until(lambda engine: not engine.stuck)  # its connection was closed, and so it was aborted there


class StuckAtLong:
    """An engine that never begins a request for 99 tokens."""

    def __init__(self, engine):
        self._engine = engine
        self.stuck = set()

    async def stream(self, prompt, sampling):
        async with contextlib.aclosing(self._engine.stream(prompt, sampling)) as deltas:
            if sampling.max_new_tokens == 99:
                self.stuck.add(prompt)
                try:
                    await asyncio.Event().wait()
                finally:
                    self.stuck.discard(prompt)
            async for delta in deltas:
                yield delta

    def __getattr__(self, name):
        return getattr(self._engine, name)


def test_closing_ends_what_is_under_way():
    with serving.serving(wrap=StuckAtLong) as served:
        engine = RemoteEngine(served.server.url)
        future = engine.submit([5], Sampling(max_new_tokens=99), seed=0)
        while not engine.metrics().running:
            time.sleep(0.01)
        engine.close()
        engine.close()
        with pytest.raises(EngineDeadError, match="closed"):
            future.result(serving.DEADLINE_S)
        with pytest.raises(EngineDeadError, match="closed"):
            engine.generate([[5]], GREEDY)


# -- Replicas


def test_requests_are_spread_over_replicas_by_what_is_under_way():
    with (
        serving.serving() as first,
        serving.serving() as second,
        RemoteEngine([first.server.url, second.server.url]) as engine,
    ):
        engine.generate(PROMPTS * 10, SEEDED)
        sent = [int(count) for count in re.findall(r"(\d+) requests sent", engine.explain())]
    assert sum(sent) == 30
    assert min(sent) >= 10


def test_servers_of_different_models_are_no_replicas(served):
    tokenizer = speaking.tokenizer()
    longer = TransformersEngine(
        speaking.model(len(tokenizer), positions=200), stop_token_ids=[3], pad_token_id=0, tokenizer=tokenizer
    )
    with (
        serving.serving(wrap=lambda _: longer) as other,
        pytest.raises(EngineOptionError, match=f"{other.server.url} are no replicas: max_length is 160 and 200"),
    ):
        RemoteEngine([served.server.url, other.server.url])


@contextlib.contextmanager
def server_processes(folder, count):
    """Processes of `rl-generation serve`, and their URLs."""
    command = [sys.executable, "-m", "rl_generation", "serve", str(folder), "--port", "0", "--device", "cpu"]
    command += ["--engine", "transformers", "--served-model-name", "tiny"]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for _ in range(count)
    ]
    try:
        yield [(process, process.stdout.readline().strip()) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


def test_of_two_replicas_one_is_killed_underway_and_all_requests_are_still_answered(tmp_path, caplog):
    folder = saved_model.save(tmp_path)
    sampling = Sampling(max_new_tokens=60, n=2, temperature=0.8, seed=3, ignore_eos=True)
    prompts = [[4, 5, 6 + index] for index in range(60)]
    with server_processes(folder, 2) as [(victim, dead_url), (_, url)], RemoteEngine([dead_url, url]) as engine:
        before = engine.generate(prompts, sampling)
        answering = threading.Thread(target=kill_underway, args=(engine, victim))
        answering.start()
        after = engine.generate(prompts, sampling)
        answering.join()
        # Beside others than before, an answer may differ by the rounding of one draw; under another seed all would.
        assert len(after) == len(before)
        assert sum(ours.tokens != theirs.tokens for ours, theirs in zip(after, before, strict=True)) <= 3
        assert list(engine.unreachable) == [dead_url]
        assert f"replica: {dead_url}" in engine.explain()
        assert "not reachable: cannot be reached" in engine.explain()
        assert engine.generate(prompts[:2], sampling)
    assert f"{dead_url} cannot be reached" in caplog.text


def kill_underway(engine, victim):
    while engine.metrics().running < 60:
        time.sleep(0.002)
    os.kill(victim.pid, signal.SIGKILL)


def test_where_no_replica_is_left_the_error_names_them():
    with serving.serving() as served:
        engine = RemoteEngine(served.server.url, retries=1)
        url = served.server.url
    with engine, pytest.raises(EngineDeadError, match=f"was sent 2 times, and not answered: {url} cannot be reached"):
        engine.generate([[5]], GREEDY)


def test_a_replica_that_comes_back_is_probed_and_used_again():
    with serving.serving() as served:
        port = served.server.port
        engine = RemoteEngine(served.server.url, retries=0)
    with engine:
        with pytest.raises(EngineDeadError):
            engine.generate([[5]], GREEDY)
        assert engine.unreachable
        with serving.serving(port=port):
            assert engine.generate([[5]], GREEDY)
            assert not engine.unreachable
