"""An engine far away: servers that speak HTTP, behind the same `Engine` protocol as an engine in this process.

Each server is probed when the engine is made, with a few requests of one token: whether its log-probabilities can be
trained on is decided by a flag of its start, which it does not report. What is sent and read: `remote_servers`.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Self, final, get_args
from urllib.parse import urlsplit

from rl_generation.chat import encode_text
from rl_generation.detokenizer import Tokenizer
from rl_generation.engine import EngineMetrics, check_single, failed_request
from rl_generation.errors import (
    EngineDeadError,
    EngineOptionError,
    LogpError,
    ModelError,
    PromptError,
    SampleTimeoutError,
    TimedOutSample,
)
from rl_generation.event_loop import EventLoop
from rl_generation.remote_servers import SGLANG_HARMLESS, VERSIONS, ServerFacts, ServerKind
from rl_generation.requests import Limits, Request, Sampling, make_requests
from rl_generation.rollout import FinishReason, LogpOf, Rollout, in_order

if TYPE_CHECKING:
    import httpx

LOG = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
"""Before a request, or a replica, is tried again; doubled each time."""

CONNECT_TIMEOUT_S = 5.0
"""Within which a replica must take a connection."""

MAX_IN_FLIGHT = 256
"""Requests under way at one replica; further ones wait here, before their time begins."""

SAMPLE_TEXT = "Rollouts, 0123 of them: naïve café, 你好 🙂\n\tdef f(x):  return {x!r}"
"""What the tokenizers here and there are compared over: accents, an emoji, digits, code, runs of spaces."""
SAMPLE_TOKENS = 200
"""Where a tokenizer has no token for some of that, so many of its own are compared instead."""


@final
class RemoteEngine:
    """An `Engine` over servers elsewhere, all of which serve the same model.

    Each request goes to the replica with the fewest requests under way. One that cannot be reached, or answers with a
    status of 500 or above, is named in the log, rested for a while, and probed again before it is used; its requests
    go to the others, with their seeds, so that a server that keeps seeds gives the answer that was lost. The `n`
    answers to a prompt are one request (n of them at SGLang, which would answer all of them alike).

    rl-generation's server says which weights made which token, and rollouts carry it. So does SGLang where its label
    of the weights is a number, as rl-refit's `SglangSink` sets it; where it is another one, and with plain vLLM, which
    reports none, a rollout carries what `version` or `commit_version` said when its request was sent.

    Args:
        urls: Base URLs of the replicas, without `/v1`.
        kind: Which server it is; None asks the server.
        model: Its name there; None takes the only one that is served.
        tokenizer: The model's. Stop strings, bad words and grammars ask for it, and it is compared with the server's.
        vocab_size: Of the model. Only rl-generation's server reports it: give it, or a tokenizer, for the others.
        logp_of: Which distribution the logp must refer to; a server whose logp are of the other is refused.
        api_key_env: Name of the environment variable that holds the API key, for servers that ask for one.
        request_timeout_s: Seconds that a request may take from when it is first sent, its retries included.
        retries: How often a request is sent again after a lost connection or a failure of the server.
        version: Of the weights that are served, where the server reports none.

    Raises:
        EngineOptionError: A server is not what the arguments say, or cannot give exact tokens and log-probabilities;
            httpx is missing; or the environment variable is not set.
        EngineDeadError: A server does not answer.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        kind: ServerKind | None = None,
        model: str | None = None,
        tokenizer: Tokenizer | None = None,
        vocab_size: int | None = None,
        logp_of: LogpOf = "sampled",
        api_key_env: str | None = None,
        request_timeout_s: float = 600.0,
        retries: int = 3,
        version: int = 0,
    ) -> None:
        if find_spec("httpx") is None:
            raise EngineOptionError("RemoteEngine needs httpx: pip install 'rl-generation[remote]'")
        import httpx

        if kind is not None and kind not in get_args(ServerKind):
            raise EngineOptionError(f"kind must be None or one of {', '.join(get_args(ServerKind))}; got kind={kind!r}")
        if logp_of not in get_args(LogpOf):
            raise EngineOptionError(f"logp_of must be 'sampled' or 'raw'; got logp_of={logp_of!r}")
        if retries < 0:
            raise EngineOptionError(f"retries must be at least 0; got retries={retries!r}")
        if not 0 < request_timeout_s < math.inf:
            raise EngineOptionError(
                f"request_timeout_s must be above 0 and finite; got request_timeout_s={request_timeout_s!r}"
            )
        headers = {}
        if api_key_env is not None:
            if not (key := os.environ.get(api_key_env)):
                raise EngineOptionError(f"api_key_env={api_key_env!r}: this environment variable is not set, or empty")
            if not (key.isascii() and key.isprintable() and key.strip()):
                raise EngineOptionError(f"api_key_env={api_key_env!r}: its value is no text that a header can hold")
            headers = {"Authorization": f"Bearer {key}"}
        self._replicas = [_Replica(url) for url in _base_urls(urls)]
        self._kind, self._model, self._tokenizer = kind, model, tokenizer
        self.logp_of: LogpOf = logp_of
        """Which distribution the logp of its rollouts refers to."""
        self._vocab_size = vocab_size
        self._timeout_s, self._retries, self._version = request_timeout_s, retries, version
        self._closed = False
        self._counts = Counter[str]()
        """On the event loop alone."""
        self._places = asyncio.Semaphore(MAX_IN_FLIGHT * len(self._replicas))
        # The key lives in the client's headers alone, which write it as [secure] where they are printed.
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            # uvicorn closes a connection that is idle for 5 s.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=4.0),
        )
        self._events = EventLoop("rl-generation-remote")
        self._end = weakref.finalize(self, self._events.close, self._http.aclose)
        try:
            self._facts = facts = self._events.run(self._probe_all())
        except BaseException:
            self.close()
            raise
        self.limits: Limits = Limits(
            vocab_size=facts.vocab_size,
            max_length=facts.max_length,
            max_length_name="max_model_len",
            tokenizer=tokenizer,
        )
        """What it can be asked for."""

    # -- What every engine has ---------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Of the oldest weights that a replica last reported; as committed here where the servers report none."""
        reported = [replica.version for replica in self._replicas if replica.version is not None]
        return min(reported, default=self._version)

    @property
    def unreachable(self) -> dict[str, str]:
        """The replicas that are rested now, by URL, and why."""
        return {replica.url: replica.why_down for replica in self._replicas if replica.why_down is not None}

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]) -> list[Rollout]:
        """Answer each prompt `n` times; all answers to prompt 0 come first, then all to prompt 1, and so on.

        Raises:
            PromptError: A prompt or its Sampling is refused, here or by the server, or would be ignored there.
            SampleTimeoutError: Requests were not answered in time; the others are in its `rollouts`.
            EngineDeadError: No replica answers any more; what had finished is in its `rollouts`.
            LogpError: An answer holds other tokens than it has log-probabilities, or is to another prompt.
            ModelError: The server cut an answer off by a limit of its own, or cannot serve the model.
        """
        return self._events.run(self._answer_all(self._requests(prompts, sampling)))

    def submit(self, prompt: Sequence[int], sampling: Sampling, *, seed: int) -> "Future[Rollout]":
        """Begin to answer one prompt; cancelling the future closes its connection, which ends it at the server.

        Sampled, it is what `generate([prompt], [sampling.for_request(seed)])` returns, and it raises the same.
        """
        try:
            check_single(sampling)
            (request,) = self._requests([prompt], [sampling.for_request(seed)])
            return self._events.start(self._answer_one(request))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer to this request
            return failed_request(error)

    def explain(self) -> str:
        """Which servers these are, and how they do. For people."""
        facts = self._facts
        seeds = "kept" if facts.seeded else "refused: start SGLang with --enable-deterministic-inference"
        lines = [
            f"engine: RemoteEngine over {len(self._replicas)} of {facts.kind}, model {facts.model!r}",
            f"version: {self.version}, {VERSIONS[facts.kind]}",
            f"limits: vocabulary {facts.vocab_size}, positions {facts.max_length}",
            f"requests: {self._timeout_s} s each, sent again up to {self._retries} times",
            f"logp: {self.logp_of}",
            f"seeds: {seeds}",
        ]
        for replica in self._replicas:
            down = "" if replica.why_down is None else f"; not reachable: {replica.why_down}"
            lines.append(f"replica: {replica.url}, {replica.sent} requests sent, {replica.under_way} under way{down}")
        return "\n".join(lines)

    def metrics(self) -> EngineMetrics:
        """What this client has asked for and got; a server's cache and its other clients are not seen from here."""
        counts, unfinished = self._counts, self._counts["unfinished"]
        return EngineMetrics(
            running=counts["running"],
            waiting=unfinished - counts["running"],
            prompt_tokens=counts["prompt_tokens"],
            generated_tokens=counts["generated_tokens"],
            finished={reason: counts[reason] for reason in get_args(FinishReason) if counts[reason]},
            version=self.version,
        )

    def commit_version(self, version: int) -> None:
        """Say that the servers have the weights of `version` now; requests that are sent from here on carry it.

        Raises:
            EngineOptionError: The servers report the version of their weights themselves.
        """
        if self._facts.kind == "rl-generation":
            raise EngineOptionError("these servers report the version of their weights: commit it there")
        self._version = version

    def use(self, urls: str | Sequence[str], *, version: int | None = None) -> None:
        """Send requests to these replicas from now on, where some have come or gone; what is under way goes on.

        New ones are probed before they are used, and rested like any other where they do not answer, or are another.

        Args:
            urls: Base URLs, as when the engine was made.
            version: Of the weights that all of them have now, as whoever has brought them knows; None where nobody
                does. A server of SGLang that later labels its weights with no number was started anew, and is rested.
        """
        wanted = _base_urls(urls)

        async def change() -> None:  # where requests are sent from
            known = {replica.url: replica for replica in self._replicas}
            new = {url: _Replica(url, why_down="it is new, and was not probed yet") for url in wanted}
            self._replicas = [known.get(url, new[url]) for url in wanted]
            for replica in self._replicas if version is not None else ():
                replica.version = version
            if len(wanted) != len(known):  # requests that have a place keep it, so for a moment there may be more
                self._places = asyncio.Semaphore(MAX_IN_FLIGHT * len(wanted))

        self._events.run(change())

    def close(self) -> None:
        """End requests that are under way with EngineDeadError, and the connections; it can be called again."""
        self._closed = True
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RemoteEngine({[replica.url for replica in self._replicas]!r}, model={self._facts.model!r})"

    # -- Requests, before anything is sent ---------------------------------------------------------------------------

    def _requests(self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]) -> list[Request]:
        """What is sent; refuses what the servers would not do, or ignore."""
        if self._closed:
            raise EngineDeadError("the engine is closed")
        limits, facts = self.limits, self._facts
        return [
            sent
            for request in make_requests(prompts, sampling, limits)
            for sent in facts.requests(request, limits=limits, logp_of=self.logp_of)
        ]

    # -- On the event loop -------------------------------------------------------------------------------------------

    async def _answer_all(self, requests: Sequence[Request]) -> list[Rollout]:
        """Answer all; of those that time out the others are kept, and any other error ends all."""
        answering = [asyncio.create_task(self._answer(request)) for request in requests]
        rollouts: list[Rollout] = []
        late: list[SampleTimeoutError] = []
        try:
            for answered in asyncio.as_completed(answering):
                try:
                    rollouts += await answered
                except SampleTimeoutError as error:
                    late.append(error)
        except EngineDeadError as error:
            raise EngineDeadError(str(error), rollouts=in_order(rollouts)) from error
        except asyncio.CancelledError:
            self._check_open(in_order(rollouts))
            raise
        finally:
            for task in answering:
                task.cancel()
            await asyncio.gather(*answering, return_exceptions=True)
        if late:
            more = f" (and {len(late) - 1} more requests)" if len(late) > 1 else ""
            lost = in_order([sample for error in late for sample in error.timed_out])
            raise SampleTimeoutError(f"{late[0]}{more}", timed_out=lost, rollouts=in_order(rollouts))
        return in_order(rollouts)

    async def _answer_one(self, request: Request) -> Rollout:
        (rollout,) = await self._answer(request)
        return rollout

    def _check_open(self, rollouts: Sequence[Rollout] = ()) -> None:
        if self._closed:
            message = "the engine was closed while this request was under way"
            raise EngineDeadError(message, rollouts=rollouts) from None

    async def _answer(self, request: Request) -> list[Rollout]:
        """Answer one request: wait for a place, send it, and send it again as long as that may help."""
        n, counts = request.sampling.n, self._counts
        tried: list[_Replica] = []
        failures: list[str] = []
        counts["unfinished"] += n
        try:
            async with self._places:
                counts["running"] += n
                try:
                    async with asyncio.timeout(self._timeout_s):
                        rollouts = await self._send(request, tried=tried, failures=failures)
                finally:
                    counts["running"] -= n
        except TimeoutError:
            first = request.sample_index
            lost = [
                TimedOutSample(prompt_index=request.prompt_index, sample_index=index, tokens=())
                for index in range(first, first + n)
            ]
            message = f"{tried[-1].url}: {_name(request)} was not answered within request_timeout_s={self._timeout_s}"
            message += "".join(f"; before, {earlier}" for earlier in failures)
            raise SampleTimeoutError(message, timed_out=lost) from None
        except asyncio.CancelledError:
            self._check_open()
            raise
        finally:
            counts["unfinished"] -= n
        counts["prompt_tokens"] += len(request.prompt)
        for rollout in rollouts:
            counts["generated_tokens"] += len(rollout.tokens)
            counts[rollout.finish_reason] += 1
        return rollouts

    async def _send(self, request: Request, *, tried: "list[_Replica]", failures: list[str]) -> list[Rollout]:
        for attempt in range(self._retries + 1):
            # That with the fewest requests under way; one that failed this request or is rested comes last.
            now = time.monotonic()
            replica = min(
                self._replicas, key=lambda each: (each.rested_until > now, each in tried, each.under_way, each.sent)
            )
            tried.append(replica)
            try:
                if replica.why_down is not None:  # it may have come back as another
                    await self._probed_again(replica)
                replica.under_way += 1
                replica.sent += 1
                try:
                    return await self._ask(replica, request, self._facts)
                finally:
                    replica.under_way -= 1
            except _ServerFailedError as failure:
                failures.append(f"{replica.url} {failure}")
                if failure.rest:
                    replica.rest(str(failure))
                level = logging.WARNING if replica.why_down is None else logging.INFO  # named when it was rested
                LOG.log(level, "%s %s; %s", replica.url, failure, _name(request))
                others = any(other.why_down is None for other in self._replicas if other is not replica)
                if attempt < self._retries and (not others or failure.pause_s):
                    pause_s = failure.pause_s or FIRST_PAUSE_S * 2.0**attempt
                    await asyncio.sleep(min(pause_s, LONGEST_PAUSE_S))
        raise EngineDeadError(
            f"{_name(request)} was sent {self._retries + 1} times, and not answered: {'; '.join(failures)}"
        )

    async def _ask(self, replica: "_Replica", request: Request, facts: ServerFacts) -> list[Rollout]:
        """Send a request once, and return what is answered; note the version of the weights that the server reports."""
        version = self._version
        path, body = facts.question(request)
        answer = await self._post(replica, path, body)
        try:
            rollouts, reported = facts.rollouts(answer, request, logp_of=self.logp_of, version=version)
        except (LogpError, ModelError) as error:
            raise type(error)(f"{replica.url}: the answer to {_name(request)} {error}") from None
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise LogpError(
                f"{replica.url}: the answer to {_name(request)} has not the shape of {facts.kind}'s: "
                f"{type(error).__name__}: {error}"
            ) from None
        if reported:
            replica.version = max(span.version for rollout in rollouts for span in rollout.versions)
        elif facts.kind == "sglang":
            _check_not_started_anew(replica, answer["meta_info"])
        return rollouts

    async def _post(self, replica: "_Replica", path: str, body: Mapping[str, Any] | None) -> Any:
        """Send one request, or fetch where `body` is None, and return the JSON of the answer.

        Raises:
            _ServerFailedError: It may be sent again.
        """
        import httpx

        url = f"{replica.url}{path}"
        try:
            response = await self._http.request("GET" if body is None else "POST", url, json=body)
        except httpx.HTTPError as error:
            said = str(error) or type(error).__name__
            raise _ServerFailedError(f"cannot be reached: {said}", rest=True) from None
        status, said = response.status_code, _error_of(response)
        if status == 200:
            try:
                return response.json()
            except ValueError:
                raise EngineOptionError(f"{url} answers {response.text[:80]!r}, which is no JSON") from None
        if status == 429:
            wait = response.headers.get("retry-after", "")
            pause_s = float(wait) if wait.isdecimal() else FIRST_PAUSE_S
            raise _ServerFailedError(f"takes no more requests now: {said}", rest=False, pause_s=pause_s)
        if status == 500 and '"engine_error"' in response.text:  # our server: sending it again cannot help
            raise LogpError(f"{url}: {said}") if "logp" in said else ModelError(f"{url}: {said}")
        if status >= 500:
            raise _ServerFailedError(f"answers with status {status}: {said}", rest=status in (502, 503))
        if status in (401, 403):
            raise EngineOptionError(f"{url} answers with status {status}: {said}: name its API key by api_key_env=")
        if status == 404 or status < 400:
            raise EngineOptionError(f"{url} answers with status {status}: {said}")
        raise PromptError(f"{url} refuses the request: {said}")

    # -- The probe ---------------------------------------------------------------------------------------------------

    async def _probe_all(self) -> ServerFacts:
        """Probe each replica, and refuse those that cannot be one engine together."""
        first, *others = self._replicas
        facts, *others_facts = await asyncio.gather(*(self._probe_in_time(replica) for replica in self._replicas))
        for replica, found in zip(others, others_facts, strict=True):
            if (different := found.difference(facts)) is not None:
                raise EngineOptionError(f"{first.url} and {replica.url} are no replicas: {different}")
        return facts

    async def _probe_in_time(self, replica: "_Replica") -> ServerFacts:
        """What a server is; EngineDeadError where it does not answer, EngineOptionError where it does so wrongly."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._probe(replica)
        except TimeoutError:
            raise EngineDeadError(f"{replica.url} did not answer within request_timeout_s={self._timeout_s}") from None
        except _ServerFailedError as failure:
            raise EngineDeadError(f"{replica.url} {failure}") from None
        except (PromptError, LogpError, ModelError) as error:
            raise EngineOptionError(f"it does not answer as the engine needs it: {error}") from None

    async def _probed_again(self, replica: "_Replica") -> None:
        """Use a replica that was rested, if it is there again and still the same; one probe answers all who wait."""
        if replica.probing is None:
            replica.probing = asyncio.create_task(self._probe_again(replica))
        await asyncio.shield(replica.probing)

    async def _probe_again(self, replica: "_Replica") -> None:
        replica.rested_until = math.inf  # for requests that may go elsewhere
        try:
            different = (await self._probe_in_time(replica)).difference(self._facts)
        except EngineDeadError as error:
            failure = str(error).removeprefix(f"{replica.url} ")
        except EngineOptionError as error:
            failure = f"came back as another: {error}"
        else:
            failure = "" if different is None else f"came back as another: {different}"
        finally:
            replica.probing, replica.rested_until = None, 0.0
        if failure:
            replica.rest(failure)
            raise _ServerFailedError(failure, rest=False)
        LOG.warning("%s answers again", replica.url)
        replica.why_down, replica.rests = None, 0

    async def _probe(self, replica: "_Replica") -> ServerFacts:
        """What one server is, from what it says and from a few answers of one token."""
        listed = await self._post(replica, "/v1/models", None)
        try:
            cards = {card["id"]: card for card in listed["data"]}
        except (LookupError, TypeError):
            raise EngineOptionError(
                f"{replica.url}/v1/models answers no list of models: is the URL without /v1?"
            ) from None
        # Adapters of LoRA are listed as models with a parent.
        bases = [each for each, card in cards.items() if not card.get("parent")]
        name = self._model or (bases[0] if len(bases) == 1 else None)
        if name is None:
            raise EngineOptionError(f"{replica.url} serves {sorted(cards)}: say which by model=")
        if name not in cards:
            raise EngineOptionError(f"{replica.url} serves {sorted(cards)}, not model={name!r}")
        card = cards[name]
        kind = self._kind or card.get("owned_by")
        if kind not in get_args(ServerKind):
            raise EngineOptionError(
                f"{replica.url} says that it is {kind!r}, and token ids in and out are known of "
                f"{', '.join(get_args(ServerKind))}: if it is one of them behind another name, say which by kind="
            )
        vocab_size = self._vocab_size_of(replica, card)
        facts = ServerFacts(kind=kind, model=name, max_length=card.get("max_model_len"), vocab_size=vocab_size)
        if kind == "sglang":
            facts = await self._read_pages_of_sglang(replica, facts)
        await self._compare_tokenizers(replica, facts)
        # The last id of the vocabulary must be known there, and come back as it was sent.
        prompts = [(vocab_size - 1, 0), (0, vocab_size - 1), (vocab_size // 2,)]
        ask = Sampling(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        probes = [Request(prompt=prompt, sampling=ask) for prompt in prompts]
        if kind == "rl-generation":
            self._check_logp_of(card.get("logp_of"), replica, remedy="make its engine with that")
            await self._ask(replica, probes[0], facts)
        elif kind == "vllm":
            # Drawn from one token, its logp is 0 as processed, and as it was in the model as raw.
            drawn = [replace(each, sampling=replace(ask, temperature=1.0, top_k=1)) for each in probes]
            logps = [(await self._ask(replica, each, facts))[0].logp[0] for each in drawn]
            mode = f"--logprobs-mode {'processed_logprobs' if self.logp_of == 'sampled' else 'raw_logprobs'}"
            found = "raw" if min(logps) < -1e-4 else "sampled"
            self._check_logp_of(found, replica, remedy=f"start it with {mode}")
        else:
            await self._probe_logp_of_sglang(replica, facts, probes)
        return facts

    def _vocab_size_of(self, replica: "_Replica", card: Mapping[str, Any]) -> int:
        reported, given = card.get("vocab_size"), self._vocab_size
        tokens = None if self._tokenizer is None else len(self._tokenizer)
        if reported is not None and given is not None and reported != given:
            raise EngineOptionError(f"{replica.url} serves a model of vocab_size={reported}, not {given}")
        size = reported if reported is not None else given if given is not None else tokens
        if size is None:
            raise EngineOptionError(
                f"{replica.url} does not report the model's vocabulary: give vocab_size= (in its config.json), or "
                f"tokenizer="
            )
        if tokens is not None and tokens > size:
            raise EngineOptionError(
                f"the tokenizer has {tokens} tokens, and the model at {replica.url} {size}: it is another model's"
            )
        return int(size)

    async def _compare_tokenizers(self, replica: "_Replica", facts: ServerFacts) -> None:
        if self._tokenizer is None:
            return
        text = SAMPLE_TEXT
        try:
            here = encode_text(self._tokenizer, text, add_special_tokens=False)
        except Exception:  # noqa: BLE001 - tokenizers raise no other: one of a few words that has none for the unknown
            known = range(min(len(self._tokenizer), SAMPLE_TOKENS))
            text = str(self._tokenizer.decode(list(known), skip_special_tokens=True))
            here = encode_text(self._tokenizer, text, add_special_tokens=False)
        ask = {"model": facts.model, "prompt": text, "add_special_tokens": False}
        there = (await self._post(replica, "/tokenize", ask)).get("tokens")
        if there != here:
            raise EngineOptionError(
                f"the tokenizer of {replica.url} is another: of {text!r} it makes {there}, and tokenizer= {here}"
            )

    async def _read_pages_of_sglang(self, replica: "_Replica", facts: ServerFacts) -> ServerFacts:
        """What SGLang's own pages say: what it prefers to what it is asked, and whether it keeps seeds."""
        info = await self._post(replica, "/get_model_info", None)
        _check_not_started_anew(replica, info)
        preferred = info.get("preferred_sampling_params") or {}
        if isinstance(preferred, str):
            preferred = json.loads(preferred)
        _, body = facts.question(Request(prompt=(0,), sampling=Sampling(max_new_tokens=1, seed=0)))
        if changed := sorted(set(preferred) - body["sampling_params"].keys() - SGLANG_HARMLESS):
            raise EngineOptionError(
                f"{replica.url} adds {', '.join(changed)} to each request: start it without them in "
                f"--preferred-sampling-params"
            )
        server = await self._post(replica, "/get_server_info", None)
        length = facts.max_length or server.get("context_length")
        return replace(facts, max_length=length, seeded=bool(server.get("enable_deterministic_inference")))

    async def _probe_logp_of_sglang(self, replica: "_Replica", facts: ServerFacts, probes: Sequence[Request]) -> None:
        """Find `SGLANG_RETURN_ORIGINAL_LOGPROB` out: with it, a token's logp does not move with the temperature."""
        for probe in probes:
            (rollout,) = await self._ask(replica, probe, facts)
            hot = replace(probe, sampling=replace(probe.sampling, temperature=2.0))
            path, body = facts.question(hot)
            answer = await self._post(replica, path, body | {"token_ids_logprob": list(rollout.tokens)})
            ((logp, *_),) = answer["meta_info"]["output_token_ids_logprobs"][0]
            if rollout.logp[0] <= -1e-3:  # else the model is too sure of this token for a temperature to show
                flag = f"SGLANG_RETURN_ORIGINAL_LOGPROB={int(self.logp_of == 'raw')}"
                found = "raw" if abs(logp - rollout.logp[0]) < 1e-4 else "sampled"
                self._check_logp_of(found, replica, remedy=f"start it with {flag}")
                return

    def _check_logp_of(self, found: str | None, replica: "_Replica", *, remedy: str) -> None:
        if found != self.logp_of:
            raise EngineOptionError(
                f"{replica.url} gives the logp of the distribution {found!r}, and logp_of={self.logp_of!r} is asked "
                f"for: {remedy}, or ask for logp_of={found!r}"
            )


# -- What is known of servers and of attempts --------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Replica:
    """One server, as the event loop knows it."""

    url: str
    version: int | None = None
    """Of the newest weights in its last answer; None where it reports none."""

    under_way: int = 0
    sent: int = 0
    why_down: str | None = None
    """None while it is in use."""

    rested_until: float = 0.0
    rests: int = 0
    """In a row."""

    probing: "asyncio.Task[None] | None" = None
    """Finds out whether it is there again."""

    def rest(self, why: str) -> None:
        """Use the others for a while, longer each time; a server that dies loses many requests, and counts once."""
        now = time.monotonic()
        if self.rested_until > now:
            return
        pause_s = min(FIRST_PAUSE_S * 2.0**self.rests, LONGEST_PAUSE_S)
        self.why_down, self.rested_until = why, now + pause_s
        self.rests += 1
        LOG.warning("%s %s; it is left alone for %g s", self.url, why, pause_s)


class _ServerFailedError(Exception):
    """A failure after which the same request may be sent again, to another replica first.

    `rest` says whether the replica is left alone for a while, and `pause_s` how long the server asks to wait, or 0.
    """

    def __init__(self, message: str, *, rest: bool, pause_s: float = 0.0) -> None:
        super().__init__(message)
        self.rest, self.pause_s = rest, pause_s


def _base_urls(urls: str | Sequence[str]) -> list[str]:
    given = [urls] if isinstance(urls, str) else list(urls)
    if not given:
        raise EngineOptionError("urls is empty: give the base URL of one server or of several replicas")
    found = []
    for url in given:
        parts = urlsplit(url)
        if parts.username is not None or parts.password is not None:
            raise EngineOptionError("a URL holds a user or password, which would be in logs: use api_key_env=")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise EngineOptionError(f"urls must hold base URLs as http://host:8000; got {url!r}")
        found.append(url.rstrip("/"))
    if len(set(found)) < len(found):
        raise EngineOptionError(f"urls names one server twice: {found}")
    return found


def _name(request: Request) -> str:
    sampling = request.sampling
    seed = "" if sampling.seed is None else f", seed={sampling.seed}"
    return (
        f"prompt {request.prompt_index} ({len(request.prompt)} tokens, max_new_tokens={sampling.max_new_tokens}, "
        f"n={sampling.n}{seed})"
    )


def _error_of(response: "httpx.Response") -> str:
    """What an answer says is wrong, in any of the servers' ways to say it."""
    with contextlib.suppress(ValueError):
        said = json.loads(response.content)
        for name in ("error", "message", "detail"):
            if isinstance(said, dict) and name in said:
                said = said[name]
        if isinstance(said, str):
            return said[:500]
    return response.text[:200]


def _check_not_started_anew(replica: _Replica, said: Mapping[str, Any]) -> None:
    """Do not use a server of SGLang whose label was a number and is none any more."""
    label = said.get("weight_version")
    if replica.version is not None and not str(label).isdecimal():
        raise _ServerFailedError(
            f"labels its weights {label!r}, and had version {replica.version}: it was started anew and has no weights "
            f"of the trainer yet",
            rest=True,
        )
