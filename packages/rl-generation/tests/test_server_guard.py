"""Who may ask, how much, and what happens when somebody leaves: over loopback and the embedded engine."""

import asyncio
import json
import logging
import socket
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "programs"))

for needed in ("httpx", "openai", "starlette", "uvicorn"):
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: rl-generation[server] and its test group", allow_module_level=True)

import openai
import serving

from rl_generation.errors import EngineDeadError, EngineOptionError
from rl_generation.server import API_KEY_VARIABLE, Server, ServerLimits, answers, create_app

KEY = "a-key-of-the-test"
LONG = serving.ANSWER | {"max_tokens": 150}
STREAM = LONG | {"stream": True}
SHORT = serving.ANSWER | {"max_tokens": 2}
TIGHT = ServerLimits(max_body_bytes=2000, max_requests_in_flight=1)


@pytest.fixture(scope="module")
def served():
    with serving.serving(limits=TIGHT, wrap=serving.Stepwise) as made:
        yield made


@pytest.fixture(scope="module")
def keyed():
    with serving.serving(api_key=KEY, log_level="trace") as made:
        yield made


def idle(engine):
    return not serving.under_way(engine)


def finished(engine, reason):
    return engine.metrics().finished.get(reason, 0)


def connection(served, body, length=None, **headers):
    """A socket on which a POST to /v1/completions was sent, as it is."""
    lines = {"Host": f"127.0.0.1:{served.server.port}", "Content-Type": "application/json"} | headers
    lines |= {"Content-Length": str(len(body) if length is None else length)}
    head = "POST /v1/completions HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    made = socket.create_connection(("127.0.0.1", served.server.port), timeout=serving.DEADLINE_S)
    made.sendall(head.encode() + b"\r\n" + body)
    return made


# -- An API key


def test_the_right_key_is_let_in_and_a_wrong_one_is_not(keyed):
    assert keyed.client.completions.create(model=serving.MODEL, prompt=[5], max_tokens=2).usage.completion_tokens > 0
    for wrong in ("wrong", KEY[:-1], KEY + "x", "ключ"):
        response = raw_get(keyed, "/v1/models", f"Bearer {wrong}")
        assert response.startswith(b"HTTP/1.1 401"), wrong
        assert b'"code":"invalid_api_key"' in response
    with (
        openai.OpenAI(base_url=f"{keyed.server.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="an API key is needed"),
    ):
        client.models.list()


def raw_get(served, path, authorization):
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {authorization}\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.server.port), timeout=serving.DEADLINE_S) as made:
        made.sendall(request.encode())
        return b"".join(iter(lambda: made.recv(65536), b""))


def test_health_alone_is_open_without_the_key(keyed):
    with keyed.http as http:
        del http.headers["Authorization"]
        assert http.get("/health").json() == {"status": "ok", "weight_version": 0}
        for path in ("/metrics", "/v1/models", "/nowhere"):
            assert http.get(path).status_code == 401
        assert http.post("/v1/completions", json=SHORT).status_code == 401


def test_the_key_is_not_in_the_log(keyed, caplog):
    caplog.set_level(logging.DEBUG)
    keyed.client.models.list()
    assert keyed.post("/v1/completions", {"prompt": 5}).status_code == 400
    assert caplog.text
    assert KEY not in caplog.text


def test_the_key_can_come_from_the_environment(monkeypatch):
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    with serving.serving() as served, served.http as http:
        assert http.get("/v1/models").status_code == 401
        assert http.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com"])
def test_another_address_than_loopback_needs_a_key(served, host):
    with pytest.raises(EngineOptionError, match=f"host='{host}' is open to other machines"):
        Server(served.engine, tokenizer=served.tokenizer, model_name="tiny", host=host)


def test_with_a_key_every_address_is_served():
    with serving.serving(api_key=KEY, host="0.0.0.0") as served, served.http as http:
        url = f"http://127.0.0.1:{served.server.port}/v1/models"
        assert http.get(url, headers={"Host": "rollouts.example.com"}).status_code == 200


@pytest.mark.parametrize("key", ["", "  ", "ключ", "a\nb"])
def test_a_key_that_no_header_can_hold_is_refused(served, key):
    with pytest.raises(ValueError, match="api_key must be printable ASCII"):
        create_app(served.engine, tokenizer=served.tokenizer, model_name="tiny", api_key=key)


def test_what_does_not_stream_is_refused_when_the_server_is_made(served):
    options = {"tokenizer": served.tokenizer, "model_name": "tiny"}
    with pytest.raises(EngineOptionError, match="list is no StreamingEngine: it has no limits, logp_of, version, metr"):
        create_app([], **options)
    with pytest.raises(EngineOptionError, match="tokenizer=None"):
        create_app(served.engine, **options | {"tokenizer": None})


def test_without_a_key_a_foreign_host_name_is_refused(served):
    with served.http as http:
        for host in ("127.0.0.1:80", "localhost", "LOCALHOST:1", "[::1]:8000", "[::1]"):
            assert http.get("/health", headers={"Host": host}).status_code == 200, host
        for host in ("evil.example:80", "192.0.2.1", "localhost.evil.example", "127.0.0.1.evil.example", ""):
            refusal = http.get("/health", headers={"Host": host})
            assert refusal.status_code == 403, host
            assert refusal.json()["error"]["code"] == "host_refused"


def test_a_body_that_is_not_declared_as_json_is_refused(served):
    with served.http as http:
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            refusal = http.post("/v1/completions", content=json.dumps(SHORT), headers={"Content-Type": kind})
            assert refusal.status_code == 415, kind
        declared = {"Content-Type": "Application/JSON; charset=utf-8"}
        assert http.post("/v1/completions", content=json.dumps(SHORT), headers=declared).status_code == 200


# -- Limits


def test_a_body_over_the_limit_is_refused_whether_it_says_its_size_or_not(served):
    large = json.dumps(SHORT | {"stop": "x" * 2000}).encode()
    with served.http as http:
        for content in (large, iter([large[:1000], large[1000:]])):
            refusal = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
            assert refusal.status_code == 413
            assert "larger than 2000 bytes" in refusal.json()["error"]["message"]
        assert http.post("/v1/completions", json=SHORT).status_code == 200


def test_a_body_that_does_not_arrive_is_given_up():
    limits = ServerLimits(body_timeout_s=0.5)  # of a server of its own: the bodies of other tests have time to arrive
    with serving.serving(limits=limits) as served, connection(served, b'{"prompt"', length=100) as made:
        assert made.recv(65536).startswith(b"HTTP/1.1 408")


def test_one_request_too_many_is_told_to_come_again(served):
    forget(served.watched.closed)
    served.engine.hold(after=1)
    with served.http as http, http.stream("POST", "/v1/completions", json=STREAM) as response:
        lines = response.iter_lines()  # kept: the stream ends with it
        next(lines)
        refusal = served.post("/v1/completions", SHORT)
        assert refusal.status_code == 429
        assert refusal.headers["retry-after"] == "1"
        assert refusal.json()["error"]["type"] == "rate_limit_error"
    go_on_without_the_client(served)


# -- Leaving


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_a_stream_frees_the_engine(served, n):
    before = finished(served.engine, "abort")
    served.engine.hold(after=1)
    with served.http as http, http.stream("POST", "/v1/completions", json=STREAM | {"n": n}) as response:
        forget(served.watched.closed)
        next(response.iter_lines())
    go_on_without_the_client(served)
    assert finished(served.engine, "abort") == before + n


def test_a_client_that_leaves_before_its_answer_frees_the_engine(served):
    before = [finished(served.engine, reason) for reason in ("length", "stop")]
    served.engine.hold(after=0)
    forget(served.watched.opened)
    forget(served.watched.closed)
    made = connection(served, json.dumps(LONG | {"prompt": [[5], [6]]}).encode())
    for _ in range(2):
        assert served.watched.opened.acquire(timeout=serving.DEADLINE_S)
    made.close()
    go_on_without_the_client(served, streams=2)
    assert [finished(served.engine, reason) for reason in ("length", "stop")] == before


def forget(semaphore):
    """Take what other tests left in it."""
    while semaphore.acquire(blocking=False):
        pass


def go_on_without_the_client(served, *, streams=1):
    """Once the server has seen that the client left, and no longer counts its request; until nothing is under way."""
    for _ in range(streams):
        assert served.watched.closed.acquire(timeout=serving.DEADLINE_S)
    served.engine.go_on()
    served.wait_until(idle)


def test_a_server_that_ends_lets_requests_finish():
    options = {"wrap": serving.Stepwise, "shutdown_timeout_s": serving.DEADLINE_S}
    with serving.serving(**options) as served, served.http as http:
        served.engine.hold(after=1)
        thread = served.server._thread
        with http.stream("POST", "/v1/completions", json=STREAM) as response:
            lines = response.iter_lines()
            next(lines)
            served.server.stop()
            served.engine.go_on()
            assert "data: [DONE]" in list(lines)
        thread.join(serving.DEADLINE_S)
        assert not thread.is_alive()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", served.server.port), timeout=5)


def test_a_server_that_ends_aborts_what_does_not_finish_in_time():
    with serving.serving(shutdown_timeout_s=1, wrap=serving.Stepwise) as served, served.http as http:
        served.engine.hold(after=1)
        with http.stream("POST", "/v1/completions", json=STREAM) as response:
            lines = response.iter_lines()
            next(lines)
            served.server.__exit__(None, None, None)
        served.engine.go_on()
        served.wait_until(idle)
        assert finished(served.engine, "abort") == 1


# -- The engine fails


def test_broken_logits_underway_end_the_stream_with_an_error():
    with serving.serving(wrap=serving.Stepwise) as served:
        served.engine.hold(after=1)
        stream = served.client.completions.create(
            model=serving.MODEL, prompt=[5], max_tokens=150, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        served.engine.model.lm_head.weight.data.fill_(float("nan"))
        served.engine.go_on()
        with pytest.raises(openai.APIError, match="logp"):
            list(stream)
        error = served.refused("/v1/completions", SHORT, status=500)
        assert (error["type"], error["code"]) == ("server_error", "engine_error")


def test_a_dead_engine_is_service_unavailable():
    class Dead:
        """A stand-in: an engine in this process dies with its server."""

        def __init__(self, engine):
            self._engine = engine

        async def check_health(self):
            raise EngineDeadError("killed")

        async def stream(self, prompt, sampling):
            await self.check_health()
            yield

        def __getattr__(self, name):
            return getattr(self._engine, name)

    with serving.serving(wrap=Dead) as served:
        with served.http as http:
            assert http.get("/health").status_code == 503
            response = http.post("/v1/completions", json=SHORT)
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert response.json()["error"]["code"] == "engine_dead"


def test_an_unforeseen_error_says_nothing_of_the_inside(caplog):
    with serving.serving() as served:
        served.engine._ready = explode
        error = served.refused("/v1/completions", SHORT, status=500)
        assert error["message"] == "internal error: the server's log says more"
    assert "a secret of the inside" in caplog.text


def test_an_unforeseen_error_within_a_stream_is_its_last_event_and_says_nothing_of_the_inside(caplog):
    async def rest():
        yield {"number": 2}
        explode()

    async def read():
        return [event async for event in answers._events({"number": 1}, rest())]

    first, second, last = asyncio.run(read())
    assert (first, second) == (b'data: {"number":1}\n\n', b'data: {"number":2}\n\n')
    assert b"internal error: the server's log says more" in last
    assert b"secret" not in last
    assert "a secret of the inside" in caplog.text


def explode():
    raise RuntimeError("a secret of the inside")


def test_a_path_or_method_that_is_not_there_has_an_error_of_the_same_shape(served):
    with served.http as http:
        assert http.get("/v1/nothing").json()["error"]["code"] == "not_found"
        refusal = http.get("/v1/completions")
        assert (refusal.status_code, refusal.json()["error"]["param"]) == (405, None)


def test_nothing_is_left_behind_by_many_servers(served):
    before = set(threading.enumerate())
    for _ in range(3):
        with (
            Server(served.engine, tokenizer=served.tokenizer, model_name="tiny") as server,
            socket.create_connection(("127.0.0.1", server.port), timeout=serving.DEADLINE_S),
        ):
            pass
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("path", ["/healthz", "/health/x", "/health/", "//health"])
def test_what_only_begins_like_health_needs_the_key(keyed, path):
    with keyed.http as http:
        del http.headers["Authorization"]
        assert http.get(keyed.server.url + path).status_code == 401


def test_texts_that_are_encoded_count_as_in_flight(served):
    forget(served.watched.closed)
    served.engine.hold(after=1)
    with served.http as http, http.stream("POST", "/v1/completions", json=STREAM) as response:
        lines = response.iter_lines()
        next(lines)
        assert served.post("/tokenize", {"prompt": "hello"}).status_code == 429
    go_on_without_the_client(served)
    assert served.post("/tokenize", {"prompt": "hello"}).status_code == 200
