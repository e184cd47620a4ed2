"""A server of a tiny real engine for the length of a test, and engines that wait where a test must not race."""

import contextlib
import threading
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import speaking
from stepwise import DEADLINE_S, Stepwise  # noqa: F401  (tests take it from here)

from rl_generation.server import Server
from rl_generation.streaming import Streamer
from rl_generation.transformers_engine import TransformersEngine

MODEL = "tiny"
ANSWER = {"model": MODEL, "prompt": [5, 6, 7], "ignore_eos": True, "seed": 0}


@dataclass(frozen=True)
class Served:
    """Everything about one server."""

    server: Server
    streamer: Streamer
    engine: Any
    tokenizer: Any
    key: str

    @property
    def client(self):
        """OpenAI's, which would try again after an error if it were let."""
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key=self.key, max_retries=0, timeout=DEADLINE_S)

    @property
    def http(self):
        """A plain client, for what OpenAI's cannot say."""
        return httpx.Client(base_url=self.server.url, timeout=DEADLINE_S, headers=self.headers)

    @property
    def headers(self):
        return {"Authorization": f"Bearer {self.key}"}

    def post(self, path, body):
        with self.http as http:
            return http.post(path, json=body)

    def refused(self, path, body, status=400):
        """The error of a request that must be refused."""
        response = self.post(path, body)
        assert response.status_code == status, response.text
        return response.json()["error"]

    def wait_until(self, holds):
        """Look at the engine between steps until `holds(engine)`; each look waits for a step, and none sleeps."""
        for _ in range(100_000):
            if self.streamer.between_steps(lambda: holds(self.engine)).result(DEADLINE_S):
                return
        raise AssertionError("it never came")


def plain_engine(tokenizer):
    """An engine of the same weights, that nothing else uses."""
    model = speaking.model(len(tokenizer))
    return TransformersEngine(model, stop_token_ids=[3], pad_token_id=0, tokenizer=tokenizer)


@contextlib.contextmanager
def serving(*, api_key=None, wrap=lambda engine: engine, **options):
    """A server of `wrap(engine)` on a free port, until the end of the block."""
    tokenizer = speaking.tokenizer()
    engine = wrap(plain_engine(tokenizer))
    streamer = Watched(engine)
    try:
        with Server(streamer, tokenizer=tokenizer, model_name=MODEL, api_key=api_key, **options) as server:
            yield Served(server, streamer, engine, tokenizer, api_key or "none")
    finally:
        streamer.close()


class Watched:
    """A streamer that tells when streams were opened and closed."""

    def __init__(self, engine):
        self._streamer = Streamer(engine)
        self.opened = threading.Semaphore(0)
        self.closed = threading.Semaphore(0)

    async def stream(self, prompt, sampling):
        self.opened.release()
        try:
            async with contextlib.aclosing(self._streamer.stream(prompt, sampling)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self.closed.release()

    def __getattr__(self, name):
        return getattr(self._streamer, name)


class Gathering:
    """An engine that begins once `count` requests have come, and counts its steps."""

    def __init__(self, engine, count):
        self._engine = engine
        self._missing = count
        self.steps = 0

    def add_request(self, request_id, prompt, sampling):
        self._engine.add_request(request_id, prompt, sampling)
        self._missing -= 1

    def has_unfinished_requests(self):
        return self._missing <= 0 and self._engine.has_unfinished_requests()

    def step(self):
        self.steps += 1
        return self._engine.step()

    def __getattr__(self, name):
        return getattr(self._engine, name)
