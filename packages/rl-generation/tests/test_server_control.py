"""The control port: it stops and continues the engine for all clients, and answers nobody without its token."""

import concurrent.futures
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "programs"))

for needed in ("httpx", "openai", "starlette", "uvicorn"):
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: rl-generation[server] and its test group", allow_module_level=True)

import httpx
import serving

from rl_generation.errors import EngineOptionError
from rl_generation.server import ControlServer, read_token

TOKEN = "a-token-of-the-test"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def served():
    with serving.serving() as made:
        yield made


@pytest.fixture
def control(served):
    with (
        ControlServer(served.engine, token=TOKEN) as server,
        httpx.Client(base_url=server.url, headers=HEADERS, timeout=serving.DEADLINE_S) as client,
    ):
        yield client
        client.post("/resume", json={})


def test_a_pause_freezes_what_is_under_way_and_its_tokens_stay_the_same(served, control):
    body = serving.ANSWER | {"max_tokens": 150, "return_token_ids": True}
    expected = served.post("/v1/completions", body).json()["choices"][0]["token_ids"]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        under_way = pool.submit(served.post, "/v1/completions", body)
        served.wait_until(serving.under_way)
        assert control.post("/pause", json={}).json() == {"paused": True, "weight_version": 0}
        before = served.engine.metrics().generated_tokens
        asked_meanwhile = pool.submit(served.post, "/v1/completions", serving.ANSWER | {"max_tokens": 2})
        done, _ = concurrent.futures.wait([under_way, asked_meanwhile], timeout=0.5)
        after = served.engine.metrics().generated_tokens
        assert (done, after) == (set(), before)
        assert control.get("/state").json()["paused"]
        assert control.post("/resume", json={}).json() == {"paused": False, "weight_version": 0}
        assert under_way.result(serving.DEADLINE_S).json()["choices"][0]["token_ids"] == expected
        assert asked_meanwhile.result(serving.DEADLINE_S).status_code == 200


def test_the_state_tells_the_version_of_the_weights():
    with serving.serving() as served, ControlServer(served.engine, token=TOKEN) as server:
        served.engine.commit_version(9)
        assert httpx.get(f"{server.url}/state", headers=HEADERS).json() == {"paused": False, "weight_version": 9}


def test_a_paused_engine_can_be_closed():
    with serving.serving() as served:
        served.engine.pause()
    assert not serving.under_way(served.engine)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {TOKEN}x"}])
def test_nobody_is_answered_without_the_token(served, control, headers):
    for method, path in (("GET", "/state"), ("POST", "/pause"), ("POST", "/resume")):
        response = httpx.request(method, f"{control.base_url}{path}", headers=headers, json={})
        assert response.status_code == 401
    assert not served.engine.is_paused


def test_the_public_port_knows_nothing_of_it(served):
    for path in ("/pause", "/resume"):
        assert served.post(path, {}).status_code == 404
    with served.http as http:
        assert http.get("/state").status_code == 404


def test_a_token_comes_from_the_environment_or_from_a_file_that_is_private(tmp_path, monkeypatch):
    monkeypatch.setenv("CONTROL", TOKEN)
    assert read_token(variable="CONTROL") == TOKEN
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    assert read_token(file=str(file)) == TOKEN
    file.chmod(0o640)
    with pytest.raises(EngineOptionError, match="can be read by others"):
        read_token(file=str(file))
    for wrong in ({}, {"variable": "CONTROL", "file": str(file)}, {"variable": "NOT_SET"}, {"file": os.devnull + "x"}):
        with pytest.raises(EngineOptionError):
            read_token(**wrong)


def test_an_engine_that_cannot_pause_has_no_control_port():
    with pytest.raises(EngineOptionError, match="object cannot pause"):
        ControlServer(object(), token=TOKEN)


def test_an_engine_that_cannot_sleep_says_which_can(control):
    refused = control.post("/sleep", json={})
    assert refused.status_code == 409
    assert "cannot sleep: vLLM's engine can" in refused.json()["error"]["message"]
