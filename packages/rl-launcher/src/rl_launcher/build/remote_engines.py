"""Engines that `rl-launcher serve` runs on other machines, as the engine and the refits of a run.

Prompts go to the servers over HTTP. Weights do not: at each refit the trainer tells the control ports who takes part,
every server joins as a rank of the sink, and the bytes go from rank to rank, verified, or the old weights stay. A
server that is gone is left out until it is there again; one that comes back is refitted before it answers.
"""

import itertools
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any, cast

from rl_backends.backend import Backend
from rl_generation import RemoteEngine, Rollout, Sampling
from rl_launcher.build.engines import dtypes_of, weight_source
from rl_launcher.errors import Refusal
from rl_launcher.schema import Recipe, RemoteConfig
from rl_observe.health import EventQueue
from rl_refit import Refit, RefitConfig, RefitError, RefitReport
from rl_refit.parties import Parties

PROBE_S = 10.0
"""Seconds in which a control port must say how its engine is."""
MARGIN_S = 60.0
"""Seconds by which a server may end its part of a refit later than the refit's deadline."""


def read_control_token(recipe: Recipe) -> str | None:
    """The token of the control ports of `policy.generation.remote`; None where the run makes its own engine, or none.

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


class ServedEngines:
    """The engine of a run: a `RemoteEngine`, which connects at the first request, when the servers have weights.

    Args:
        config: of the recipe.
        tokenizer: of the policy; the servers' must be the same.
    """

    def __init__(self, config: RemoteConfig, *, tokenizer: Any) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._connecting = threading.Lock()
        self._engine: RemoteEngine | None = None

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]) -> Sequence[Rollout]:
        """One rollout a prompt, in order."""
        return self._connected().generate(prompts, sampling)

    def submit(self, prompt: Sequence[int], sampling: Sampling, *, seed: int) -> "Future[Rollout]":
        """Begin to answer one prompt, beside whatever is under way."""
        return self._connected().submit(prompt, sampling, seed=seed)

    def explain(self) -> str:
        """Which servers they are."""
        return f"engines at {', '.join(self._config.urls)}" if self._engine is None else self._engine.explain()

    def close(self) -> None:
        """End the connections; the servers go on."""
        if self._engine is not None:
            self._engine.close()

    def _connected(self) -> RemoteEngine:
        with self._connecting:
            if self._engine is None:
                self._engine = RemoteEngine(
                    self._config.urls,
                    kind="rl-generation",
                    tokenizer=self._tokenizer,
                    api_key_env=self._config.api_key_env,
                    request_timeout_s=self._config.request_timeout_s,
                )
            return self._engine


class RemoteWeightSync:
    """Refits from the policy of this process into every server that is there.

    Args:
        policy: of this process.
        remote: the servers.
        config: of the refits.
        token: of the control ports.
        refreshes: whether the policy's shards are merged copies, to be made anew before each refit.
        events: told of servers that leave and return.

    Raises:
        Refusal: no server is there, one is no control port of `rl-launcher serve`, or its engine does not fit.
    """

    def __init__(
        self,
        policy: Backend,
        remote: RemoteConfig,
        config: RefitConfig,
        *,
        token: str,
        refreshes: bool,
        events: EventQueue,
    ) -> None:
        import httpx

        self._policy, self._remote, self._config, self._refreshes = policy, remote, config, refreshes
        self._events = events
        self._http = httpx.Client(headers={"Authorization": f"Bearer {token}"}, timeout=PROBE_S)
        self._names = (f"run-{os.getpid()}-{os.urandom(4).hex()}-{number}" for number in itertools.count(1))
        self._joined: tuple[str, ...] = ()
        self._name = ""
        """Under which they have joined."""
        self._refit: Refit | None = None
        self._absent: dict[str, str] = {}
        self._num_repeated = 0
        self.count = 0
        """Refits that were verified and committed."""
        self.last: RefitReport | None = None
        """The report of the latest of them."""
        try:
            self._join(self._present())  # what cannot be is refused before anything is trained
        except BaseException as error:
            self._http.close()
            if isinstance(error, RefitError):
                raise Refusal(f"policy.generation.remote: {error}") from error
            raise

    def __call__(self, *, version: int) -> RefitReport:
        """Transfer, verify and commit on every server that is there.

        Raises:
            RefitError: no server is there, or all that are have refused or aborted it, and keep the old weights.
        """
        if self._refreshes:
            self._policy.shards()
        while True:
            present = self._present()
            try:
                if tuple(present) != self._joined:
                    self._join(present)
                self.last = self._transfer(version)
            except RefitError as error:
                self._leave()
                gone = present.keys() - self._facts().keys()
                if not gone:
                    raise
                self._num_repeated += 1
                self._events.add("refit_repeated", f"{error}".splitlines()[0], f"without {', '.join(sorted(gone))}")
                continue
            self.count += 1
            return self.last

    def metrics(self) -> dict[str, float]:
        """Of the latest refit, and how many were repeated without a server that died, for the log."""
        if self.last is None:
            return {}
        served = {"refits_repeated": float(self._num_repeated), "engines_absent": float(len(self._absent))}
        return {**self.last.metrics(), **served}

    def explain(self) -> str:
        """Where the weights go."""
        return f"from this process into the engines at {', '.join(self._remote.control_urls)}, each a rank of the sink"

    def close(self) -> None:
        """Leave the refits; the servers go on with the weights that they have."""
        self._leave()
        self._http.close()

    # -- One refit ----------------------------------------------------------------------------------------------------

    def _transfer(self, version: int) -> RefitReport:
        assert self._refit is not None
        limit_s = self._config.deadline_s
        with ThreadPoolExecutor(len(self._joined)) as threads:
            answers = [threads.submit(self._receive, url, timeout_s=limit_s) for url in self._joined]
            try:
                report = self._refit(version)
            except BaseException as error:
                self._tell(str(error) or type(error).__name__)  # else servers would wait until the deadline, and we too
                raise
        for url, answer in zip(self._joined, answers, strict=True):
            refused = answer.result()
            if refused is not None:
                raise RefitError(f"{url} has not committed version {version}: {refused}")
        return report

    def _tell(self, reason: str) -> None:
        """Tell the servers that this refit does not take place; those that took part in it know already."""
        import httpx

        for url in self._joined:
            with suppress(httpx.HTTPError):
                self._http.post(f"{url}/refit/leave", json={"name": self._name, "reason": reason}, timeout=PROBE_S)

    def _receive(self, url: str, *, timeout_s: float) -> str | None:
        """Have a server take part in the next refit; why it has not committed, or None."""
        import httpx

        try:
            answer = self._http.post(
                f"{url}/refit/receive", json={"timeout_s": timeout_s}, timeout=timeout_s + MARGIN_S
            )
        except httpx.HTTPError as error:
            return f"it does not answer: {type(error).__name__}"
        return None if answer.is_success else _message(answer)

    # -- Who takes part -----------------------------------------------------------------------------------------------

    def _facts(self) -> dict[str, Mapping[str, Any]]:
        """What the engines that are there say of themselves, by URL; others are noted as absent."""
        import httpx

        found, absent = {}, {}
        for url in self._remote.control_urls:
            try:
                answer = self._http.get(f"{url}/refit")
            except httpx.HTTPError as error:
                absent[url] = type(error).__name__
                continue
            if answer.is_success:
                found[url] = answer.json()
            elif answer.status_code in {401, 403, 404}:
                raise RefitError(
                    f"{url} answers {answer.status_code}, {_message(answer)}: it must be a control port of rl-launcher "
                    f"serve, with the token of policy.generation.remote"
                )
            else:
                absent[url] = _message(answer)
        for url in absent.keys() - self._absent:
            self._events.add("engine_absent", f"{url} is not there: {absent[url]}", "the others go on without it")
        for url in self._absent.keys() - absent:
            self._events.add("engine_returned", f"{url} is there again", "the next refit brings its weights")
        self._absent = absent
        return found

    def _present(self) -> dict[str, Mapping[str, Any]]:
        """Likewise; there is at least one. A server that was started anew has to join again."""
        facts = self._facts()
        if not facts:
            why = "; ".join(f"{url}: {reason}" for url, reason in self._absent.items())
            raise RefitError(f"no engine is there ({why}): start them with rl-launcher serve, with this recipe")
        restarted = any(facts[url]["joined"] is None for url in facts.keys() & {*self._joined})
        if restarted:
            self._leave()
        return facts

    def _join(self, facts: Mapping[str, Mapping[str, Any]]) -> None:
        import httpx

        self._leave()
        urls = tuple(facts)
        first = facts[urls[0]]
        hosts = {self._remote.host, *(facts[url]["host"] for url in urls)}
        shards = self._policy.shards()
        self._name = next(self._names)
        parties = Parties(
            address=f"tcp://{first['host']}:{first['port']}",
            name=self._name,
            num_sources=1,
            engine_ranks=tuple(facts[url]["ranks"] for url in urls),
            one_node=hosts == {"127.0.0.1"},
            config=self._config,
        )
        for number, url in enumerate(urls):
            body = {"parties": asdict(parties), "engine": number, "dtypes": dtypes_of(shards)}
            try:
                answer = self._http.post(f"{url}/refit/join", json=body, timeout=MARGIN_S)
            except httpx.HTTPError as error:
                raise RefitError(f"{url} does not answer: {type(error).__name__}") from error
            if not answer.is_success:
                raise Refusal(f"{url} cannot be refitted by this run: {_message(answer)}")
        self._refit = parties.source_refit(weight_source(self._policy), rank=0, host=self._remote.host)
        self._joined = urls

    def _leave(self) -> None:
        refit, self._refit, self._joined = self._refit, None, ()
        if refit is not None:
            with suppress(RefitError):  # the store may have died with a server
                refit.close()


def _message(answer: Any) -> str:
    """What a control port says of a failure."""
    try:
        return str(cast("dict[str, Any]", answer.json())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}"
