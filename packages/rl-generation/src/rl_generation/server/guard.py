"""Stands before every route: who may ask, from where, how much and how many at once, and how a refusal is answered.

Without an API key only this machine is served, and the `Host` header must say so: a web page in a browser here could
otherwise reach the server under a name of its own that resolves to 127.0.0.1 (DNS rebinding). And bodies must be
declared as JSON, which a page of another origin may not send without asking.

Every error has the format of OpenAI's API:
`{"error": {"message": …, "type": …, "param": the field it is about or null, "code": …}}`
"""

import asyncio
import hmac
import ipaddress
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rl_generation.errors import EngineDeadError, EngineOptionError, LogpError, ModelError, SampleTimeoutError

# -- Errors -----------------------------------------------------------------------------------------------------------


class HttpError(Exception):
    """A refusal or failure, as the client gets it; `param` is the field that it is about, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """What is sent as JSON."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        """All that is sent."""
        return JSONResponse(self.body, status_code=self.status, headers=self.headers)


def from_engine(error: EngineDeadError | SampleTimeoutError | ValueError) -> HttpError:
    """What an error of the engine means to the client."""
    if isinstance(error, EngineDeadError):
        return HttpError(503, str(error), code="engine_dead", headers={"Retry-After": "10"})
    if isinstance(error, SampleTimeoutError):
        return HttpError(504, str(error), code="sample_timeout")
    if isinstance(error, EngineOptionError | LogpError | ModelError):  # no request can help
        return HttpError(500, str(error), code="engine_error")
    # An engine speaks of its Sampling, a client of OpenAI's fields.
    message = str(error).replace("max_new_tokens", "max_tokens")
    field = re.match(r"(\w+) must", message)
    return HttpError(400, message, param=field[1] if field else None, code="invalid_value")


def internal() -> HttpError:
    """What a client hears of an unforeseen error; the server's log has the rest."""
    return HttpError(500, "internal error: the server's log says more", code="internal_error")


def error_handlers() -> dict[Any, Callable[[Request, Exception], Awaitable[Response]]]:
    """What makes each exception of an application an answer; an unforeseen one goes into the server's log besides."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, EngineDeadError):
            error = from_engine(error)
        elif isinstance(error, HTTPException):
            message = f"{request.method} {request.url.path}: {error.detail}"
            code = "not_found" if error.status_code == 404 else None
            error = HttpError(error.status_code, message, code=code, headers=error.headers)
        return (error if isinstance(error, HttpError) else internal()).response

    return dict.fromkeys((HttpError, EngineDeadError, HTTPException, Exception), answer)


# -- How much ---------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Bounds beyond which a request is refused before it costs anything; each refusal names its bound."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    max_body_bytes: int = 8 << 20
    """Size of a request's body; the default holds about a million token ids. Larger ones get status 413."""

    body_timeout_s: float = 30.0
    """Seconds within which a body must have arrived; a slower client gets status 408."""

    max_answers: int = 1024
    """Answers to one request, its prompts times `n`; more get status 400."""

    max_stop_and_bad_words: int = 64
    """Stop strings, stop token ids and bad words of one request together; more get status 400. Each is looked for at
    every token of every answer, of all clients' in the same batch."""

    max_requests_in_flight: int = 1024
    """POST requests at one time, those that wait for the engine included; one more gets status 429."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"{field.name} must be above 0; got {field.name}={value!r}")

    def check_counts(self, *, prompts: int, n: int = 1) -> None:
        """Raise HttpError 400 for more answers, `n` to each prompt, than one request may ask for."""
        if (answers := prompts * n) > self.max_answers:
            message = f"{prompts} prompts with n={n} ask for {answers} answers; the limit here is {self.max_answers}"
            raise HttpError(400, message, param="n" if n > 1 else "prompt", code="too_many_answers")

    def check_words(self, given: Mapping[str, Any]) -> None:
        """Raise HttpError 400 for more stop strings, stop token ids and bad words than one request may look for."""
        values = [given.get(name) or () for name in ("stop", "stop_token_ids", "bad_words")]
        count = sum(len(value) if isinstance(value, list | tuple) else 1 for value in values)
        if count > self.max_stop_and_bad_words:
            most = self.max_stop_and_bad_words
            message = f"{count} of stop + stop_token_ids + bad_words; max_stop_and_bad_words is {most} here"
            raise HttpError(400, message, param="stop", code="too_many_words")


async def read_body(request: Request, bounds: ServerLimits) -> bytes:
    """Read a body within its bounds of size and time; HttpError 413 or 408 beyond them."""
    most, body = bounds.max_body_bytes, bytearray()
    try:
        async with asyncio.timeout(bounds.body_timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    message = f"the body is larger than {most} bytes, the limit here: send fewer prompts at once"
                    raise HttpError(413, message, code="body_too_large", headers={"Connection": "close"})
    except TimeoutError:
        message = f"the body did not arrive within {bounds.body_timeout_s} s"
        raise HttpError(408, message, code="body_timeout") from None
    return bytes(body)


# -- Who, and how many at once ----------------------------------------------------------------------------------------


class Guard:
    """ASGI middleware that lets a request through, or answers it.

    Clients must send `api_key` as `Authorization: Bearer …`, but for `/health`; None serves this machine alone.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, bounds: ServerLimits) -> None:
        self._app, self._bounds = app, bounds
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        counted = False
        try:
            if scope["type"] == "http":
                self._check(scope)
                counted = scope["method"] == "POST"
            self._in_flight += counted
            await self._app(scope, receive, send)
        except HttpError as refusal:
            await refusal.response(scope, receive, send)
        except ClientDisconnect:
            pass  # nobody is there to answer to
        finally:
            self._in_flight -= counted

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._expected is None:
            host = headers.get("host", "")
            name = host.rsplit(":", 1)[0] if host.count(":") == 1 or "]:" in host else host
            if not is_loopback(name.strip("[]")):
                message = f"this server has no API key and serves its own machine alone, not as {host[:100]!r}"
                raise HttpError(403, message, code="host_refused")
        # In a time that does not depend on how much of the key is right. Headers are latin-1.
        elif scope["path"] != "/health" and not hmac.compare_digest(
            headers.get("authorization", "").encode("latin-1"), self._expected
        ):
            message = "an API key is needed, and must be right: Authorization: Bearer <key>"
            raise HttpError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if scope["method"] == "POST":
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise HttpError(415, f"Content-Type must be application/json; got {kind[:100]!r}", code="invalid_type")
            if self._in_flight >= self._bounds.max_requests_in_flight:
                message = f"{self._in_flight} requests are in flight, the limit here; try again"
                raise HttpError(429, message, code="too_many_requests", headers={"Retry-After": "1"})


def check_api_key(api_key: str | None) -> None:
    """Raise ValueError where the API key is empty, or no text that a header can hold; None is no key."""
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip()):
        raise ValueError("api_key must be printable ASCII and not empty; None serves this machine alone")


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, can only be this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
