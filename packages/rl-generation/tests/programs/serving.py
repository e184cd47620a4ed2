"""A server of a tiny real engine for the length of a test, and engines that wait where a test must not race."""

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import speaking
from stepwise import DEADLINE_S, Stepwise, under_way  # noqa: F401  (tests take them from here)

from rl_generation.server import Server
from rl_generation.transformers_engine import TransformersEngine

MODEL = "tiny"
ANSWER = {"model": MODEL, "prompt": [5, 6, 7], "ignore_eos": True, "seed": 0}


@dataclass(frozen=True)
class Served:
    """Everything about one server."""

    server: Server
    watched: "Watched"
    engine: Any
    tokenizer: Any
    key: str
    client: openai.OpenAI
    """OpenAI's own, set not to retry."""

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
            with self.engine.between_steps():
                if holds(self.engine):
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
    watched = Watched(engine)
    key = api_key or "none"
    try:
        with (
            Server(watched, tokenizer=tokenizer, model_name=MODEL, api_key=api_key, **options) as server,
            openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=DEADLINE_S) as client,
        ):
            yield Served(server, watched, engine, tokenizer, key, client)
    finally:
        engine.close()


class Watched:
    """An engine that tells when streams were opened and closed."""

    def __init__(self, engine):
        self._engine = engine
        self.opened = threading.Semaphore(0)
        self.closed = threading.Semaphore(0)

    async def stream(self, prompt, sampling):
        self.opened.release()
        try:
            async with contextlib.aclosing(self._engine.stream(prompt, sampling)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self.closed.release()

    def __getattr__(self, name):
        return getattr(self._engine, name)


class Gathering:
    """An engine that begins once `count` requests have come, and counts its steps."""

    def __init__(self, engine, count):
        self._engine = engine
        self._count = count
        self._advance = engine._runner.advance
        engine._runner.advance = self._advance_once_all_are_there
        self.steps = 0

    def _advance_once_all_are_there(self, *, stream):
        if under_way(self._engine) < self._count:
            time.sleep(0.001)
            return []
        self._count = 0
        self.steps += 1
        return self._advance(stream=stream)

    def __getattr__(self, name):
        return getattr(self._engine, name)
