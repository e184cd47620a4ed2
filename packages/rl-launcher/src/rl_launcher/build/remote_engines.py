"""Engines on other machines, as the engine and the refits of a run.

`rl-launcher serve` brings each of them: it joins the trainer at `policy.generation.remote.address`, under the URL at
which it answers, as a replica of rl_refit. Prompts go there over HTTP. Weights do not: every replica is refitted by a
transaction of its own. One that dies is dropped and named while the others commit; one that joins, anew or again, takes
the committed version from another that has it, or the next one from the trainer; and prompts go to those that have it.
"""

import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from rl_backends.backend import Backend
from rl_backends.loading.source import local_folder
from rl_generation import EngineDeadError, RemoteEngine, Rollout, Sampling
from rl_launcher.build.engines import dtypes_of, weight_source
from rl_launcher.errors import Refusal
from rl_launcher.schema import PolicyConfig, Recipe, RemoteConfig
from rl_launcher.user_code import is_import_string, is_python_object
from rl_observe.health import EventQueue
from rl_refit import (
    CoverageError,
    RefitConfig,
    RefitError,
    Replica,
    Replicas,
    ReplicasReport,
    SlotStream,
    StateDictSource,
    WeightSource,
)

JOIN_S = 2.0
"""Seconds in which an engine that is there has joined: it looks for the trainer many times a second."""


def read_shared_token(recipe: Recipe) -> str | None:
    """The token of `policy.generation.remote`; None where the run makes its own engine, or none.

    Raises:
        Refusal: there is no token, others may read its file, or httpx or the server's packages are missing.
    """
    remote = recipe.policy.generation.remote
    if remote is None or not recipe.generates:
        return None
    if missing := [name for name in ("httpx", "starlette", "uvicorn") if find_spec(name) is None]:
        raise Refusal(f"policy.generation.remote needs {' and '.join(missing)}: pip install 'rl-launcher[remote]'")
    from rl_generation.server import read_token

    try:
        return read_token(variable=remote.token_env, file=remote.token_file)
    except ValueError as error:
        raise Refusal(f"policy.generation.remote: {error}") from error


def sglang_checkpoint(policy: PolicyConfig) -> Path:
    """The folder that a server of SGLang was started with, whose tensors every refit brings.

    Raises:
        Refusal: the recipe names none.
    """
    remote, named = policy.generation.remote, policy.model_name
    if remote is not None and remote.checkpoint is not None:
        return Path(remote.checkpoint).expanduser()
    if is_import_string(named) or is_python_object(named) or (folder := local_folder(named)) is None:
        raise Refusal(
            f"policy.generation.remote.checkpoint is missing, and policy.model_name={named} is no folder: name the "
            f"folder with the checkpoint that the server of SGLang was started with"
        )
    return Path(folder)


def describe_remote(remote: RemoteConfig) -> str:
    """Which engines a run takes, in words."""
    what = "servers of SGLang" if remote.kind == "sglang" else "engines"
    return f"{what} that rl-launcher serve brings to {remote.address}, {remote.at_least} at least"


def meeting_name(token: str) -> str:
    """Under which trainer and engines meet at the trainer's address; who has another token finds nobody there."""
    return f"rl-launcher {hashlib.sha256(token.encode()).hexdigest()}"


def make_replica(sink: Any, *, name: str, host: str, recipe: Recipe, token: str, **options: Any) -> Replica:
    """An engine's end: what joins the trainer of `recipe`.

    Args:
        sink: what the engine's refits fill.
        name: the URL at which it answers prompts.
        host: address of this machine that the trainer reaches.
        recipe: the trainer's.
        token: of `policy.generation.remote`.
        **options: of `rl_refit.Replica`.
    """
    remote, config = recipe.policy.generation.remote, recipe.policy.refit
    assert remote is not None
    return Replica(
        sink,
        name=name,
        trainer=remote.address,
        trainer_name=meeting_name(token),
        address=f"tcp://{host}:0",
        transport=lambda: SlotStream(host=host),
        bucket_bytes=config.bucket_bytes,
        buckets=config.buckets,
        deadline_s=config.deadline_s,
        **options,
    )


class ServedEngines:
    """The engine of a run: a `RemoteEngine` over the servers that have the trainer's weights.

    Args:
        config: of the recipe.
        tokenizer: of the policy; the servers' must be the same.
        stop_token_ids: that end a response; a server of rl_generation knows them, SGLang is told with each prompt.
    """

    def __init__(self, config: RemoteConfig, *, tokenizer: Any, stop_token_ids: Sequence[int]) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._stop_token_ids = tuple(stop_token_ids) if config.kind == "sglang" else ()
        self._connecting = threading.Lock()
        self._engine: RemoteEngine | None = None
        self._urls: tuple[str, ...] = ()
        self._version: int | None = None

    def use(self, urls: Sequence[str], *, version: int) -> None:
        """Send prompts to these servers from now on, which have the weights of `version`."""
        with self._connecting:
            self._urls, self._version = tuple(urls), version
            if self._engine is not None:
                self._engine.use(urls, version=version)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]) -> Sequence[Rollout]:
        """One rollout a prompt, in order."""
        asked = self._ending(sampling) if isinstance(sampling, Sampling) else [self._ending(each) for each in sampling]
        return self._connected().generate(prompts, asked)

    def submit(self, prompt: Sequence[int], sampling: Sampling, *, seed: int) -> "Future[Rollout]":
        """Begin to answer one prompt, beside whatever is under way."""
        return self._connected().submit(prompt, self._ending(sampling), seed=seed)

    def explain(self) -> str:
        """Which servers they are."""
        return describe_remote(self._config) if self._engine is None else self._engine.explain()

    def close(self) -> None:
        """End the connections; the servers go on."""
        if self._engine is not None:
            self._engine.close()

    def _ending(self, sampling: Sampling) -> Sampling:
        return replace(sampling, stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *self._stop_token_ids))))

    def _connected(self) -> RemoteEngine:
        with self._connecting:
            if self._engine is None:
                if not self._urls:
                    raise Refusal("the engines have no weights yet: no refit has been committed")
                # One is enough to begin with: the others are probed when they are used, and may have died since.
                dead: EngineDeadError | None = None
                for url in self._urls:
                    try:
                        self._engine = RemoteEngine(
                            url,
                            kind=self._config.kind,
                            tokenizer=self._tokenizer,
                            api_key_env=self._config.api_key_env,
                            request_timeout_s=self._config.request_timeout_s,
                        )
                        break
                    except EngineDeadError as error:
                        dead = error
                if self._engine is None:
                    assert dead is not None
                    raise dead
                self._engine.use(self._urls, version=self._version)
            return self._engine


class RemoteWeightSync:
    """Refits from the policy of this process into every engine that has joined.

    Args:
        policy: of this process.
        remote: where engines join.
        config: of the refits.
        token: that trainer and engines share.
        refreshes: whether the policy's shards are merged copies, to be made anew before each refit.
        engines: told which have the weights.
        events: told of engines that join and leave.

    Raises:
        Refusal: the address is taken, or not this machine's.
    """

    def __init__(
        self,
        policy: Backend,
        remote: RemoteConfig,
        config: RefitConfig,
        *,
        token: str,
        refreshes: bool,
        engines: ServedEngines,
        events: EventQueue,
    ) -> None:
        self._policy, self._remote, self._refreshes = policy, remote, refreshes
        self._engines, self._events = engines, events
        self._versions: Mapping[str, int | None] = {}
        """What each engine had after the latest refit, of those that were ever seen."""
        self.count = 0
        """Refits that were verified and committed."""
        self.last: ReplicasReport | None = None
        """The report of the latest of them."""
        host = urlsplit(remote.address).hostname
        try:
            self._replicas = Replicas(
                _source(policy, remote),
                address=remote.address,
                at_least=remote.at_least,
                transport=lambda: SlotStream(host=host),
                name=meeting_name(token),
                **asdict(config),
            )
        except RefitError as error:
            raise Refusal(f"policy.generation.remote.address={remote.address}: {error}") from error
        until = time.monotonic() + JOIN_S
        while (joined := len(self._replicas.joined())) < remote.at_least and time.monotonic() < until:
            time.sleep(0.05)
        if joined < remote.at_least:
            events.add(
                "engines_awaited",
                f"{joined} engines have joined {remote.address}, and at_least={remote.at_least} must: start them with "
                f"rl-launcher serve, this recipe and the same token",
                f"the run waits for them, for {config.deadline_s:g} s",
            )

    def __call__(self, *, version: int) -> ReplicasReport:
        """Transfer, verify and commit on every engine that has joined, and send prompts to those that have committed.

        Raises:
            RefitError: fewer than `at_least` are there, or have committed it; the others keep the old weights.
        """
        if self._refreshes:
            self._policy.shards()
        # Whoever trains says how old the weights are. An engine may be ahead of a run that has just begun or resumes,
        # or was out of reach when it did; what this process has brought before is not to be brought again.
        is_ours = self.last is not None and version <= self.last.version
        try:
            report = self._replicas(version, rollback=not is_ours)
        except CoverageError as error:
            if not error.mismatched:
                raise
            option = "policy.generation.remote.weights_dtype" if self._remote.kind == "sglang" else "--weights-dtype"
            raise Refusal(
                f"{error}; the trainer has {', '.join(sorted({*dtypes_of(self._policy.shards()).values()}))}: where "
                f"dtypes differ, {option} says in which the weights come"
            ) from error
        self._tell(report)
        self._engines.use([name for name, has in report.versions.items() if has == version], version=version)
        self.count, self.last = self.count + 1, report
        return report

    def metrics(self) -> dict[str, float]:
        """Of the latest refit, and how many engines that were there before have not got its weights, for the log."""
        if self.last is None:
            return {}
        absent = sum(has != self.last.version for has in self._versions.values())
        return {**self.last.metrics(), "engines_absent": float(absent)}

    def explain(self) -> str:
        """Where the weights go."""
        return f"from this process into each of the {describe_remote(self._remote)}, in a transaction of its own"

    def close(self) -> None:
        """Leave; the engines go on with the weights that they have, and wait for the next trainer."""
        self._replicas.close()

    def _tell(self, report: ReplicasReport) -> None:
        before, version = self._versions, report.version
        for name, had in report.rewound.items():
            what = f"{name} had version {had}, of an earlier run or of steps that this one takes again"
            self._events.add("engine_rewound", what, f"it has version {version} of this run now")
        for name, has in report.versions.items():
            if has == version and before.get(name) is None:
                self._events.add("engine_joined", f"{name} has version {version}", "it answers prompts from now on")
        self._versions = {**dict.fromkeys(before), **report.versions}
        for name, has in self._versions.items():
            if has is None and before.get(name, version) is not None:
                why = report.failures.get(name, "it has left")
                self._events.add(
                    "engine_absent",
                    f"{name} has not taken version {version}: {why}",
                    "the others go on without it; it is in again when it has joined again",
                )


def _source(policy: Backend, remote: RemoteConfig) -> WeightSource:
    if remote.kind != "sglang":
        return weight_source(policy)
    # A checkpoint holds no buffers that the model computes by itself.
    cast = None if remote.weights_dtype is None else getattr(torch, remote.weights_dtype)
    return StateDictSource.from_shards(policy.shards(), cast=cast)
