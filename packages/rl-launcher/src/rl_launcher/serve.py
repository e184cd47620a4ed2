"""`rl-launcher serve`: the engine of a recipe on a machine of its own, for a trainer elsewhere.

It answers over HTTP as any server of rl_generation does, once a refit has brought weights. On the control port, behind
a token, a trainer arranges its refits:

    GET  /refit           ranks of the sink, the committed version, who joined, and a free port for the rendezvous
    POST /refit/join      take part in the refits of these parties from now on
    POST /refit/receive   take part in the next one, and answer when it is committed or aborted

A trainer that joins takes the engine from the one before, whatever version that had brought.
"""

import asyncio
import json
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rl_backends.loading import pad_token_id
from rl_generation import ModelError, TrainingEngineSpec, make_training_engine
from rl_generation.engine import StreamingEngine
from rl_generation.server import ControlServer, Server
from rl_generation.streaming import Streamer
from rl_launcher.build.engines import engine_spec, make_sink
from rl_launcher.build.inputs import ending_token_ids
from rl_launcher.build.models import read_skeleton
from rl_launcher.errors import Refusal
from rl_launcher.schema import Recipe
from rl_refit import Refit, RefitConfig, RefitError
from rl_refit.parties import Parties

T = TypeVar("T")


@contextmanager
def serving(
    recipe: Recipe,
    *,
    token: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    control_port: int = 8001,
    api_key: str | None = None,
    weights_dtype: str = "float32",
) -> "Iterator[tuple[Server, ControlServer]]":
    """Make the engine of `recipe` and its two ports; the control port serves, and `Server.run` serves the other.

    Args:
        recipe: the trainer's; of it the model and `policy.generation` are used.
        token: that the trainer sends to the control port.
        host: address of both ports, and of the weights that come in: one that the trainer reaches.
        port: for prompts; 0 takes a free one.
        control_port: for refits; 0 takes a free one.
        api_key: that clients send; needed beyond loopback.
        weights_dtype: in which dtype the trainer sends its weights.

    Raises:
        ValueError: the recipe holds no engine, or its model or an option of the engine is refused.
        OSError: an address is taken, or not this machine's.
    """
    if not recipe.generates:
        raise Refusal("nothing in this recipe samples responses, so there is no engine to serve")
    if host in {"0.0.0.0", "::"}:  # noqa: S104 - refused
        raise Refusal(f"host={host} is no address that a trainer can send weights to: name this machine's own")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rl-launcher-serve-")))
        policy = recipe.policy
        skeleton = read_skeleton(
            policy,
            seed=recipe.seed,
            key="policy.model_name",
            padded_vocabulary=policy.padded_vocabulary,
            folder=folder / "model",
        )
        ending = ending_token_ids(recipe, skeleton.model, skeleton.tokenizer)
        spec = engine_spec(
            recipe,
            model_name=skeleton.name,
            stop_token_ids=ending,
            pad_token_id=pad_token_id(skeleton.tokenizer, ending),
            dtypes=dict.fromkeys((name for name, _ in skeleton.model.named_parameters()), weights_dtype),
        )
        receiver = Receiver(spec, host=host)
        engine = make_training_engine(spec, ready=receiver.ready, own_process=True)
        stack.callback(engine.close)
        streaming: Any = engine
        if not isinstance(engine, StreamingEngine):
            streaming = stack.enter_context(Streamer(engine))
        receiver.attach(engine, streaming)
        stack.callback(receiver.close)
        routes = [
            Route("/refit", receiver.state, methods=["GET"]),
            Route("/refit/join", receiver.join, methods=["POST"]),
            Route("/refit/receive", receiver.receive, methods=["POST"]),
            Route("/refit/leave", receiver.leave, methods=["POST"]),
        ]
        server = Server(
            streaming,
            tokenizer=skeleton.tokenizer,
            model_name=policy.model_name,
            host=host,
            port=port,
            api_key=api_key,
        )
        control = ControlServer(streaming, token=token, host=host, port=control_port, routes=routes)
        yield server, stack.enter_context(control)


DISCONNECTED_POLL_S = 1.0
"""How often an engine that waits for a refit looks whether the trainer is still there."""


class Receiver:
    """Takes part in the refits of one trainer after another.

    Args:
        spec: of the engine.
        host: address of this machine that the trainer reaches.
    """

    def __init__(self, spec: TrainingEngineSpec, *, host: str) -> None:
        self._spec, self._host = spec, host
        self._engine: Any = None
        self._sink: Any = None
        self._refit: Refit | None = None
        self._joined: str | None = None
        self._left = ""
        """Why the trainer that joined last has left, where it said so or its connection broke."""
        self._between_steps: Callable[[Callable[[], Any]], Future[Any]] | None = None

    def attach(self, engine: Any, streaming: Any) -> None:
        """Refit this engine; one of a single thread between two of its steps."""
        self._engine = engine
        self._between_steps = getattr(streaming, "between_steps", None)
        self._sink = make_sink(self._spec, engine)

    def ready(self) -> None:
        """Pass if the engine has whole weights.

        Raises:
            ModelError: no refit of the trainer that joined last has been committed.
        """
        if self._sink is not None:
            self._sink.check()
        if self._sink is None or self._sink.version is None:
            raise ModelError("the engine has no weights yet: no refit has been committed")

    def close(self) -> None:
        """Leave the refits."""
        refit, self._refit, self._joined = self._refit, None, None
        if refit is not None:
            with suppress(RefitError):  # the store may have died with another party
                refit.close()

    async def state(self, _request: Request) -> Response:
        """Answer `GET /refit`."""
        with socket.create_server((self._host, 0)) as listener:
            free = listener.getsockname()[1]
        return JSONResponse(
            {
                "ranks": getattr(self._sink, "num_ranks", 1),
                "version": self._sink.version,
                "joined": self._joined,
                "host": self._host,
                "port": free,
            }
        )

    async def join(self, request: Request) -> Response:
        """Answer `POST /refit/join`."""
        body = json.loads(await request.body())
        given = body["parties"]
        config = RefitConfig(**given.pop("config"))
        parties = Parties(**{**given, "engine_ranks": tuple(given["engine_ranks"])}, config=config)
        try:
            self._check_dtypes(body["dtypes"])
            await self._in_order(lambda: self._take(parties, int(body["engine"])))
        except ValueError as error:
            return _failed(error)
        return JSONResponse({"joined": self._joined})

    async def receive(self, request: Request) -> Response:
        """Answer `POST /refit/receive`."""
        timeout_s = float(json.loads(await request.body())["timeout_s"])
        if (refit := self._refit) is None:
            return _failed(RefitError("no trainer has joined"))
        receiving = asyncio.ensure_future(self._in_order(lambda: refit.receive(timeout_s=timeout_s)))
        while not (await asyncio.wait([receiving], timeout=DISCONNECTED_POLL_S))[0]:
            if not self._left and await request.is_disconnected():  # it died before the refit had begun, or gave up
                await self._let_go("its connection broke")
        try:
            report = receiving.result()
        except RefitError as error:
            return _failed(RefitError(f"the trainer has left: {self._left}") if self._left else error)
        return JSONResponse({"version": report.version})

    async def leave(self, request: Request) -> Response:
        """Answer `POST /refit/leave`: the trainer takes part no more, and says why."""
        body = json.loads(await request.body())
        if body["name"] == self._joined:
            await self._let_go(str(body["reason"]))
        return JSONResponse({"joined": self._joined})

    async def _let_go(self, reason: str) -> None:
        """Have whoever waits for the trainer wait no more."""
        self._left = reason
        await asyncio.to_thread(self.close)

    def _take(self, parties: Parties, number: int) -> None:
        self.close()
        self._sink = make_sink(self._spec, self._engine)
        self._refit = parties.sink_refit(self._sink, engine=number, host=self._host)
        self._joined, self._left = parties.name, ""

    def _check_dtypes(self, sent: Mapping[str, str]) -> None:
        for name, dtype in sent.items():
            if (known := self._spec.dtypes.get(name)) is not None and known != dtype:
                raise Refusal(
                    f"the trainer sends {name} in {dtype}, and this engine was made for {known}: start it with "
                    f"rl-launcher serve --weights-dtype {dtype}"
                )

    async def _in_order(self, call: Callable[[], T]) -> T:
        """Run what touches the engine: between two steps of one that has a single thread."""
        if self._between_steps is None:
            return await asyncio.to_thread(call)
        return await asyncio.wrap_future(self._between_steps(call))


def _failed(error: Exception) -> Response:
    return JSONResponse({"error": {"message": str(error), "code": "refit_failed"}}, status_code=409)
