"""`rl-launcher serve`: an engine on a machine of its own, for the trainer of a recipe elsewhere.

Of rl_generation it makes the engine and answers over HTTP, once a refit has brought weights; of SGLang it takes the
server that runs here. Either joins the trainer at `policy.generation.remote.address`, whenever that is there, under its
URL, and takes part in its refits; it takes the committed weights from another engine where it can. A trainer that
begins anew takes the engine over, whatever weights the one before has left there.
"""

import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rl_backends.loading.source import pad_token_id
from rl_generation import ModelError, TransformersEngine, make_training_engine
from rl_generation.server import Server
from rl_launcher.build.engines import engine_spec, make_sink
from rl_launcher.build.inputs import ending_token_ids
from rl_launcher.build.models import read_skeleton
from rl_launcher.build.remote_engines import make_replica, sglang_checkpoint
from rl_launcher.errors import Refusal
from rl_launcher.schema import Recipe, RemoteConfig
from rl_refit import DeadlineError, RefitError, Replica
from rl_refit.sglang import SglangSink

LOG = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds before an engine looks again, where the last look ended with an error."""


@contextmanager
def serving(
    recipe: Recipe,
    *,
    token: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    weights_dtype: str = "float32",
) -> "Iterator[tuple[str, Callable[[], object]]]":
    """Have an engine join the trainer of `recipe`; yields its URL, and a function that serves until the process ends.

    Args:
        recipe: the trainer's; of it the model, `policy.generation` and `policy.refit` are used.
        token: of `policy.generation.remote`.
        host: address of this machine that the trainer reaches: of the server, and of the weights that come in.
        port: for prompts; 0 takes a free one. Of a server of SGLang, the one that it listens to.
        weights_dtype: in which dtype the trainer sends its weights; SGLang's checkpoint says it by itself.

    Raises:
        ValueError: the recipe holds no engine, or none elsewhere; or its model or an option of the engine is refused.
        OSError: an address is taken, or not this machine's.
    """
    remote = recipe.policy.generation.remote
    if not recipe.generates:
        raise Refusal("nothing in this recipe samples responses, so there is no engine to serve")
    if remote is None:
        raise Refusal(
            "policy.generation.remote is missing: its address says where the trainer is, to which this engine belongs; "
            "give both the same recipe"
        )
    if host in {"0.0.0.0", "::"}:  # noqa: S104 - refused
        raise Refusal(f"host={host} is no address that a trainer can send weights to: name this machine's own")
    with ExitStack() as stack:
        if remote.kind == "sglang":
            if weights_dtype != "float32":
                raise Refusal("a server of SGLang has the dtypes of its checkpoint: leave --weights-dtype out")
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            sink = _sglang_sink(recipe, remote, url)
            stack.enter_context(taking_part(make_replica(sink, name=url, host=host, recipe=recipe, token=token)))
            yield url, threading.Event().wait
            return
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
        sinks: list[Any] = []

        def ready() -> None:
            for made in sinks:
                made.check()
            if not sinks or sinks[0].version is None:
                raise ModelError("the engine has no weights yet: no refit has been committed")

        engine = make_training_engine(spec, ready=ready)
        stack.callback(engine.close)
        in_turn: dict[str, Any] = {}
        if isinstance(engine, TransformersEngine):  # which is refitted between two of its steps

            def between_steps(refit: Callable[[], Any]) -> Any:
                with engine.between_steps():
                    return refit()

            in_turn = {"in_turn": between_steps}
        sinks.append(make_sink(spec, engine))
        server = Server(
            engine,
            tokenizer=skeleton.tokenizer,
            model_name=policy.model_name,
            host=host,
            port=port,
            api_key=None if remote.api_key_env is None else _key(remote.api_key_env),
        )
        replica = make_replica(sinks[0], name=server.url, host=host, recipe=recipe, token=token, **in_turn)
        stack.enter_context(taking_part(replica))
        yield server.url, server.run


@contextmanager
def taking_part(replica: Replica) -> Iterator[None]:
    """Take part in refits in a thread, whatever goes wrong; each error is in the log once, until another comes."""
    ended = threading.Event()

    def take_part() -> None:
        said = ""
        while not ended.is_set():
            try:
                replica.receive(timeout_s=3600.0)
                said = ""
            except (RefitError, OSError, RuntimeError) as error:
                waited = isinstance(error, DeadlineError) and "no refit began" in str(error)
                if f"{error}" != said and not waited and not ended.is_set():
                    said = f"{error}"
                    LOG.warning("%s: %s", type(error).__name__, said)
                ended.wait(LOOK_S)

    thread = threading.Thread(target=take_part, name="rl-launcher refits", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        replica.close()
        thread.join()


def _sglang_sink(recipe: Recipe, remote: RemoteConfig, url: str) -> SglangSink:
    checkpoint = sglang_checkpoint(recipe.policy)
    assert remote.folder is not None
    api_key = None if remote.api_key_env is None else _key(remote.api_key_env)
    try:
        return SglangSink(url, like=checkpoint, folder=Path(remote.folder).expanduser(), api_key=api_key)
    except RefitError as error:
        raise Refusal(f"policy.generation.remote.checkpoint: {error}") from error


def _key(variable: str) -> str:
    if not (key := os.environ.get(variable)):
        raise Refusal(
            f"policy.generation.remote.api_key_env={variable}: this environment variable is not set, or empty"
        )
    return key
