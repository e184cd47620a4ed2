"""`RemoteEngine` over vLLM's and SGLang's interfaces, played by a small HTTP server of this test.

The shapes of vLLM are those that vLLM 0.32.0 answered on a CPU, field by field; those of SGLang are as its sources of
2026 write them (`/generate`, `/get_model_info`, `/get_server_info`), since SGLang needs a GPU. What they compute is a
toy: the distribution of a token depends on its place alone, so that logp can be told from one another by hand.
"""

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec

import pytest

if find_spec("httpx") is None:
    pytest.skip("httpx is not installed: rl-generation[remote]", allow_module_level=True)

from rl_generation import (
    EngineDeadError,
    EngineOptionError,
    LogpError,
    ModelError,
    PromptError,
    RemoteEngine,
    Sampling,
)

VOCAB_SIZE = 50
RAW = -2.5
"""The model's own logp of each token that the toys sample."""

SHORT = Sampling(max_new_tokens=3, seed=1)


class Toy:
    """A server: what it is asked is in `asked`, and `change` may spoil an answer or set a status."""

    def __init__(self, **settings):
        self.settings, self.asked, self.fail = settings, [], []
        self.change = lambda answer: answer
        toy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.answer(*toy.get(self.path))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                toy.asked.append((self.path, body))
                if body.get("max_tokens") == 99:  # lost, with all the others, once they are there
                    toy.together.wait()
                    self.answer(503, {"error": {"message": "as the test says"}})
                elif toy.fail:
                    status, headers = toy.fail.pop(0)
                    self.answer(status, {"error": {"message": "as the test says"}}, headers)
                else:
                    self.answer(*toy.post(self.path, body))

            def answer(self, status, body, headers=()):
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                for name, value in headers:
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.socket.listen(64)  # else it refuses the sixth that comes while it takes another in
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def get(self, path):
        if path == "/v1/models":
            card = {"id": "toy", "object": "model", "owned_by": self.owner, "root": "toy", "parent": None}
            adapter = card | {"id": "sql", "parent": "toy"}
            return 200, {"object": "list", "data": [card | {"max_model_len": 100}, adapter]}
        return 404, {"detail": "Not Found"}


class ToyVllm(Toy):
    """`vllm serve`: settings are `mode`, of `--logprobs-mode`, and `drops`, fields that it does not know."""

    owner = "vllm"

    def post(self, path, body):
        if path != "/v1/completions":
            return 404, {"detail": "Not Found"}
        if max(body["prompt"]) >= VOCAB_SIZE:
            message = f"Token id {max(body['prompt'])} is out of vocabulary"
            return 400, {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}
        drops = self.settings.get("drops", ())
        mode = self.settings.get("mode", "processed_logprobs")
        logp = {"raw_logprobs": RAW, "raw_logits": 6.5, "processed_logprobs": RAW}[mode]
        if mode == "processed_logprobs" and body["top_k"] == 1 and body["temperature"] > 0:
            logp = 0.0
        choices = []
        for index in range(body["n"]):
            tokens = [(body.get("seed", 0) + index + place) % VOCAB_SIZE for place in range(body["max_tokens"])]
            names = [f"token_id:{token}" for token in tokens]
            logprobs = {
                "text_offset": [11 * place for place in range(len(tokens))],
                "token_logprobs": [logp] * len(tokens),
                "tokens": names,
                "top_logprobs": [{name: logp} for name in names],
            }
            choices.append(
                {
                    "index": index,
                    "text": "never read",
                    "logprobs": None if "logprobs" in drops else logprobs,
                    "finish_reason": "length",
                    "stop_reason": None,
                    "token_ids": None if "return_token_ids" in drops else tokens,
                    "prompt_logprobs": None,
                    "prompt_token_ids": None if "return_token_ids" in drops else body["prompt"],
                    "routed_experts": None,
                }
            )
        return 200, self.change({"id": "cmpl-1", "object": "text_completion", "model": "toy", "choices": choices})


class ToySglang(Toy):
    """SGLang: settings are `original`, of SGLANG_RETURN_ORIGINAL_LOGPROB, `deterministic`, and `preferred`."""

    owner = "sglang"

    def get(self, path):
        if path == "/get_model_info":
            label = self.settings.get("label", lambda: "default")()
            return 200, {
                "model_path": "toy",
                "weight_version": label,
                "preferred_sampling_params": self.settings.get("preferred"),
            }
        if path == "/get_server_info":
            deterministic = self.settings.get("deterministic", False)
            return 200, {"model_path": "toy", "context_length": 100, "enable_deterministic_inference": deterministic}
        return super().get(path)

    def post(self, path, body):
        if path != "/generate":
            return 404, {"detail": "Not Found"}
        asked = body["sampling_params"]
        # As the sampler does it: after the temperature, before any cut; greedy at temperature 1.
        logp = (
            RAW if self.settings.get("original") or asked["temperature"] == 0 else RAW - math.log(asked["temperature"])
        )
        tokens = [(asked.get("sampling_seed", 0) + place) % VOCAB_SIZE for place in range(asked["max_new_tokens"])]
        said = {
            "id": "1",
            "finish_reason": {"type": "length", "length": len(tokens)},
            "prompt_tokens": len(body["input_ids"]),
            "weight_version": "default",
            "output_token_logprobs": [[logp, token, None] for token in tokens],
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
        }
        if "token_ids_logprob" in body:
            said["output_token_ids_logprobs"] = [[[logp, token, None] for token in body["token_ids_logprob"]]]
        return 200, self.change({"text": "never read", "output_ids": tokens, "meta_info": said})


@pytest.fixture
def vllm():
    with ToyVllm() as toy:
        yield toy


@pytest.fixture
def sglang():
    with ToySglang(deterministic=True) as toy:
        yield toy


# -- vLLM


def test_vllm_is_asked_for_ids_in_and_out_and_for_all_that_its_generation_config_could_set(vllm):
    with RemoteEngine(vllm.url, vocab_size=VOCAB_SIZE, version=3) as engine:
        sampling = Sampling(max_new_tokens=4, n=2, temperature=0.7, top_p=0.9, seed=11, stop_token_ids=(9,))
        first, second = engine.generate([[1, 2, 3]], sampling)
        engine.commit_version(4)
        third = engine.generate([[1, 2, 3]], SHORT)[0]
        said = engine.explain()
    assert (first.tokens, second.tokens) == ((11, 12, 13, 14), (12, 13, 14, 15))
    assert first.logp == (RAW,) * 4
    assert (first.version, second.version, third.version) == (3, 3, 4)
    assert "plain vLLM reports none" in said
    path, body = vllm.asked[-2]
    assert path == "/v1/completions"
    assert body == {
        "model": "toy",
        "prompt": [1, 2, 3],
        "max_tokens": 4,
        "n": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop": [],
        "stop_token_ids": [9],
        "bad_words": [],
        "ignore_eos": False,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": False,
        "seed": 11,
    }


@pytest.mark.parametrize(
    ("settings", "options", "reason"),
    [
        ({"drops": ["return_token_ids"]}, {}, "ignores return_token_ids"),
        ({"drops": ["logprobs"]}, {}, "ignores logprobs=0"),
        ({"mode": "raw_logprobs"}, {}, "start it with --logprobs-mode processed_logprobs, or ask for logp_of='raw'"),
        ({"mode": "raw_logits"}, {}, "6.5 as a log-probability, which is a logit"),
        ({}, {"logp_of": "raw"}, "start it with --logprobs-mode raw_logprobs, or ask for logp_of='sampled'"),
        ({}, {"vocab_size": None}, "does not report the model's vocabulary: give vocab_size="),
        ({}, {"vocab_size": 60}, "Token id 59 is out of vocabulary"),
        ({}, {"model": "sql2"}, r"serves \['sql', 'toy'\], not model='sql2'"),
        ({}, {"kind": "rl-generation"}, "distribution None"),
    ],
)
def test_a_vllm_that_does_not_give_what_is_trained_on_is_refused_at_start(settings, options, reason):
    with ToyVllm(**settings) as toy, pytest.raises(EngineOptionError, match=reason) as refused:
        RemoteEngine(toy.url, **({"vocab_size": VOCAB_SIZE} | options))
    assert toy.url in str(refused.value)


def test_raw_logp_of_vllm_are_taken_where_they_are_asked_for():
    with ToyVllm(mode="raw_logprobs") as toy, RemoteEngine(toy.url, vocab_size=VOCAB_SIZE, logp_of="raw") as engine:
        assert engine.generate([[1]], SHORT)[0].logp_of == engine.logp_of == "raw"


@pytest.mark.parametrize(
    ("spoil", "error", "reason"),
    [
        (lambda choice: choice["token_ids"].pop(), LogpError, "has 2 tokens and 3 logp"),
        (lambda choice: choice["logprobs"]["token_logprobs"].pop(), LogpError, "has 3 tokens and 2 logp"),
        (lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(1, None), LogpError, "logp=None at token 1"),
        (lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(1, -9999.0), LogpError, "logp=-9999.0 at"),
        (lambda choice: choice.update(prompt_token_ids=[1, 2]), LogpError, "is to another prompt, of 2 tokens"),
        (lambda choice: choice.update(logprobs=None), LogpError, "ignores logprobs=0"),
        (lambda choice: choice.pop("finish_reason"), LogpError, "has not the shape of vllm's"),
        (lambda choice: choice.update(finish_reason="repetition"), ModelError, "for the reason 'repetition'"),
    ],
)
def test_an_answer_that_is_not_exact_is_refused_with_the_server_and_the_request(vllm, spoil, error, reason):
    def change(answer):
        spoil(answer["choices"][0])
        return answer

    with RemoteEngine(vllm.url, vocab_size=VOCAB_SIZE) as engine:
        vllm.change = change
        with pytest.raises(error, match=reason) as refused:
            engine.generate([[1]], SHORT)
    assert str(refused.value).startswith(
        f"{vllm.url}: the answer to prompt 0 (1 tokens, max_new_tokens=3, n=1, seed=1)"
    )


def test_an_answer_cut_off_by_the_servers_own_limit_is_refused(vllm):
    def change(answer):
        choice = answer["choices"][0]
        choice["token_ids"] = choice["token_ids"][:2]
        choice["logprobs"]["token_logprobs"] = choice["logprobs"]["token_logprobs"][:2]
        return answer

    with RemoteEngine(vllm.url, vocab_size=VOCAB_SIZE) as engine:
        vllm.change = change
        with pytest.raises(ModelError, match=r"cut off after 2 tokens.*--generation-config vllm"):
            engine.generate([[1]], SHORT)


def test_an_eos_token_which_vllm_does_not_repeat_is_the_stop_reason(vllm):
    def change(answer):
        answer["choices"][0]["finish_reason"] = "stop"
        return answer

    with RemoteEngine(vllm.url, vocab_size=VOCAB_SIZE) as engine:
        vllm.change = change
        (rollout,) = engine.generate([[1]], SHORT)
    assert (rollout.finish_reason, rollout.stop_reason) == ("stop", 3)


# -- Retries


@pytest.mark.parametrize(
    "failure", [(500, ()), (502, ()), (503, [("Retry-After", "10")]), (429, [("Retry-After", "0")])]
)
def test_a_failure_of_the_server_is_tried_again_with_the_same_seed(vllm, failure):
    with RemoteEngine(vllm.url, vocab_size=VOCAB_SIZE) as engine:
        vllm.fail = [failure]
        first = len(vllm.asked)
        (rollout,) = engine.generate([[1]], SHORT)
        sent = [body for path, body in vllm.asked[first:] if body["max_tokens"] == 3]
        assert (rollout.tokens, engine.unreachable) == ((1, 2, 3), {})
    assert len(sent) == 2
    assert sent[0] == sent[1]


def test_retries_are_bounded_and_the_error_lists_them(vllm):
    with RemoteEngine(vllm.url, vocab_size=VOCAB_SIZE, retries=2) as engine:
        vllm.fail = [(500, ())] * 20
        with pytest.raises(EngineDeadError, match=r"was sent 3 times.*status 500: as the test says.*status 500"):
            engine.generate([[1]], SHORT)
        assert len(vllm.fail) == 17


def test_a_server_that_loses_many_requests_at_once_is_named_and_rested_once(vllm, caplog):
    vllm.together = threading.Barrier(20)
    with RemoteEngine(vllm.url, vocab_size=VOCAB_SIZE, retries=0) as engine:
        futures = [engine.submit([1], Sampling(max_new_tokens=99), seed=0) for _ in range(20)]
        errors = [future.exception(240) for future in futures]
        assert all(isinstance(error, EngineDeadError) for error in errors)
        assert list(engine.unreachable) == [vllm.url]
        before = len(vllm.asked)
        futures = [engine.submit([1], SHORT, seed=index) for index in range(20)]
        assert [len(future.result(60).tokens) for future in futures] == [3] * 20
        assert not engine.unreachable
    assert len(vllm.asked) == before + 20 + 3  # one probe answers all who wait for it
    assert caplog.text.count("left alone for") <= 2  # once, or twice where the machine is slow to notice them all


def test_replicas_come_and_go_and_new_ones_are_probed_before_they_are_used(vllm):
    with ToyVllm() as new, ToyVllm(mode="raw_logprobs") as other, RemoteEngine(vllm.url, vocab_size=50) as engine:
        engine.use([vllm.url, new.url, other.url], version=4)
        engine.generate([[1]] * 6, SHORT)
        assert [len(body["prompt"]) for _, body in new.asked[:3]] == [2, 2, 1]  # the probes
        assert len(new.asked) > 3
        engine.generate([[1]] * 6, SHORT)
        assert "came back as another" in engine.unreachable[other.url]
        assert engine.version == 4
        engine.use(new.url)
        before = len(vllm.asked)
        engine.generate([[1]] * 3, SHORT)
        assert len(vllm.asked) == before
        with pytest.raises(EngineOptionError, match="urls is empty"):
            engine.use([])


def test_what_the_server_refuses_is_not_tried_again(vllm):
    with RemoteEngine(vllm.url, vocab_size=VOCAB_SIZE) as engine:
        vllm.fail = [(400, ())] * 2
        with pytest.raises(PromptError, match=f"{vllm.url}/v1/completions refuses the request: as the test says"):
            engine.generate([[1]], SHORT)
        assert len(vllm.fail) == 1


# -- SGLang


def test_sglang_is_asked_for_ids_and_logp_once_for_each_sample_with_its_own_seed(sglang):
    with RemoteEngine(sglang.url, vocab_size=VOCAB_SIZE, version=2) as engine:
        rollouts = engine.generate([[1, 2, 3]], Sampling(max_new_tokens=4, n=2, temperature=0.5, seed=11))
        said = engine.explain()
    assert [r.tokens for r in rollouts] == [(11, 12, 13, 14), (12, 13, 14, 15)]
    assert rollouts[0].logp == (RAW - math.log(0.5),) * 4
    assert [(r.sample_index, r.version) for r in rollouts] == [(0, 2), (1, 2)]
    assert "version: 2, reported by SGLang where its label is a number, and else committed here" in said
    bodies = sorted(
        (body for _, body in sglang.asked[-2:]), key=lambda body: int(body["sampling_params"]["sampling_seed"])
    )
    assert bodies[0] == {
        "input_ids": [1, 2, 3],
        "sampling_params": {
            "max_new_tokens": 4,
            "n": 1,
            "temperature": 0.5,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_new_tokens": 0,
            "stop": None,
            "stop_token_ids": None,
            "ignore_eos": False,
            "sampling_seed": 11,
        },
        "return_logprob": True,
        "stream": False,
    }


@pytest.mark.parametrize(
    ("labels", "versions"),
    [
        ({"weight_version": "7"}, [(7, 0, 3)]),
        ({"weight_version": "8", "weight_versions": [("7", 0, 2), ("8", 2, 3)]}, [(7, 0, 2), (8, 2, 3)]),
        ({"weight_version": "8", "weight_versions": [("7", 0, 3), ("8", 3, 3)]}, [(7, 0, 3)]),
        ({"weight_version": "step-8", "weight_versions": [("7", 0, 2), ("step-8", 2, 3)]}, [(5, 0, 3)]),
    ],
)
def test_sglangs_labels_are_the_versions_of_its_tokens_where_they_are_numbers(sglang, labels, versions):
    def change(answer):
        spans = [
            dict(zip(("version", "start", "end"), span, strict=True)) for span in labels.get("weight_versions", ())
        ]
        answer["meta_info"] |= {**labels, **({"weight_versions": spans} if spans else {})}
        return answer

    with RemoteEngine(sglang.url, vocab_size=VOCAB_SIZE, version=5) as engine:
        sglang.change = change
        (rollout,) = engine.generate([[1]], SHORT)
        assert [(span.version, span.start, span.end) for span in rollout.versions] == versions
        assert engine.metrics().version == versions[-1][0]


def test_an_sglang_that_was_started_anew_with_old_weights_is_rested_until_its_label_is_a_number_again(sglang):
    label = "3"

    def labelled(answer):
        answer["meta_info"]["weight_version"] = label
        return answer

    sglang.change = labelled
    sglang.settings["label"] = lambda: label
    with RemoteEngine(sglang.url, vocab_size=VOCAB_SIZE, retries=0) as engine:
        engine.use(sglang.url, version=3)
        assert engine.generate([[1]], SHORT)[0].version == 3
        label = "default"
        for _ in range(2):  # asked, and then probed
            with pytest.raises(EngineDeadError, match=r"'default', and had version 3: it was started anew"):
                engine.generate([[1]], SHORT)
        label = "4"
        assert engine.generate([[1]], SHORT)[0].version == 4


def test_without_a_seed_a_deterministic_sglang_still_gets_one_for_each_sample(sglang):
    with RemoteEngine(sglang.url, vocab_size=VOCAB_SIZE) as engine:
        engine.generate([[1], [1]], Sampling(max_new_tokens=2, n=4))
    seeds = [body["sampling_params"]["sampling_seed"] for _, body in sglang.asked[-8:]]
    assert len(set(seeds)) == 8


@pytest.mark.parametrize(
    ("settings", "options", "reason"),
    [
        ({"original": True}, {}, "start it with SGLANG_RETURN_ORIGINAL_LOGPROB=0, or ask for logp_of='raw'"),
        ({}, {"logp_of": "raw"}, "start it with SGLANG_RETURN_ORIGINAL_LOGPROB=1, or ask for logp_of='sampled'"),
        ({"preferred": {"temperature": 0.6, "ebnf": "a"}}, {}, "adds ebnf to each request"),
        ({}, {"kind": "vllm"}, "/v1/completions answers with status 404"),
    ],
)
def test_an_sglang_that_does_not_give_what_is_trained_on_is_refused_at_start(settings, options, reason):
    with ToySglang(**settings) as toy, pytest.raises(EngineOptionError, match=reason) as refused:
        RemoteEngine(toy.url, vocab_size=VOCAB_SIZE, **options)
    assert toy.url in str(refused.value)


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (Sampling(max_new_tokens=2, seed=4), "seed=4, which SGLang ignores unless"),
        (Sampling(max_new_tokens=2, top_p=0.9, top_k=5), "top_p=0.9, top_k=5, and SGLang's logp are those before"),
        (Sampling(max_new_tokens=2, ignore_eos=True, stop_token_ids=(3,)), "SGLang ignores them too"),
        (Sampling(max_new_tokens=2, presence_penalty=1.0), "presence_penalty=1.0, which SGLang does not do as"),
    ],
)
def test_what_sglang_would_ignore_is_refused(sampling, reason):
    with ToySglang() as toy, RemoteEngine(toy.url, vocab_size=VOCAB_SIZE) as engine:
        with pytest.raises(PromptError, match=reason):
            engine.generate([[1]], sampling)
        assert engine.generate([[1]], Sampling(max_new_tokens=2, temperature=0.0, seed=4, top_p=0.9))  # greedy


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda said: said["output_token_logprobs"].pop(), "has 3 tokens and 2 logp"),
        (lambda said: said.update(prompt_tokens=1), r"another prompt, of 1 tokens: is --allow-auto-truncate set\?"),
        (lambda said: said.update(finish_reason={"type": "stop", "matched": "NaN happened"}), "NaN in the logits"),
        (
            lambda said: said.update(weight_versions=[{"version": "1", "start": 0, "end": 2}]),
            "which do not cover its 3 tokens in order",
        ),
        (lambda said: said["output_token_logprobs"].__setitem__(0, [-3.4e38, 5, None]), "logp=-3.4e.38 at token 0"),
    ],
)
def test_an_answer_of_sglang_that_is_not_exact_is_refused(sglang, spoil, reason):
    def change(answer):
        spoil(answer["meta_info"])
        return answer

    with RemoteEngine(sglang.url, vocab_size=VOCAB_SIZE) as engine:
        sglang.change = change
        with pytest.raises(LogpError, match=reason):
            engine.generate([[1, 2]], SHORT)


def test_sglangs_ways_to_end_are_the_engines(sglang):
    ends = [{"type": "stop", "matched": 3}, {"type": "stop", "matched": "END"}, {"type": "abort", "message": "x"}]

    def change(answer):
        answer["meta_info"]["finish_reason"] = ends.pop(0)
        return answer

    with RemoteEngine(sglang.url, vocab_size=VOCAB_SIZE) as engine:
        sglang.change = change
        found = [engine.generate([[1]], SHORT)[0] for _ in range(3)]
    assert [(r.finish_reason, r.stop_reason) for r in found] == [("stop", 3), ("stop", "END"), ("abort", None)]


def test_a_server_of_another_kind_is_refused_and_told_what_is_known():
    with ToyVllm() as toy:
        toy.owner = "llamacpp"
        with pytest.raises(EngineOptionError, match=r"says that it is 'llamacpp'.*say which by kind="):
            RemoteEngine(toy.url, vocab_size=VOCAB_SIZE)
        with RemoteEngine(toy.url, vocab_size=VOCAB_SIZE, kind="vllm") as engine:
            assert engine.generate([[1]], SHORT)
