"""Stands before every route: who may ask, from where, and how many at once.

Without an API key only this machine is served, and the `Host` header must say so: a web page in a browser here could
otherwise reach the server under a name of its own that resolves to 127.0.0.1 (DNS rebinding). And bodies must be
declared as JSON, which a page of another origin may not send without asking.
"""

import asyncio
import hmac
import ipaddress
from typing import final

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rl_generation.server.errors import HttpError
from rl_generation.server.generation import ClientGoneError
from rl_generation.server.limits import ServerLimits

__all__ = ["Guard", "check_api_key", "is_loopback", "read_body"]

OPEN = ("/health",)


@final
class Guard:
    """ASGI middleware that lets a request through, or answers it.

    Args:
        app: What is guarded.
        api_key: Clients must send it as `Authorization: Bearer …`; None serves clients on this machine alone.
        bounds: Of requests in flight.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, bounds: ServerLimits) -> None:
        self._app = app
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()
        self._bounds = bounds
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except HttpError as error:
            await JSONResponse(error.body, status_code=error.status, headers=error.headers)(scope, receive, send)
            return
        counted = scope["method"] == "POST"
        self._in_flight += counted
        try:
            await self._app(scope, receive, send)
        except ClientGoneError:
            pass  # nobody is there to answer to
        finally:
            self._in_flight -= counted

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._expected is None:
            self._check_host(headers.get("host", ""))
        elif scope["path"] not in OPEN:
            self._check_key(headers.get("authorization", ""))
        if scope["method"] == "POST":
            self._check_post(headers)

    def _check_host(self, host: str) -> None:
        name = host.rsplit(":", 1)[0] if host.count(":") == 1 or "]:" in host else host
        if not is_loopback(name.strip("[]")):
            message = f"this server has no API key and serves its own machine alone, not as {host[:100]!r}"
            raise HttpError(403, message, code="host_refused")

    def _check_key(self, given: str) -> None:
        # In a time that does not depend on how much of the key is right. Headers are latin-1.
        if self._expected is None or not hmac.compare_digest(given.encode("latin-1"), self._expected):
            message = "an API key is needed, and must be right: Authorization: Bearer <key>"
            raise HttpError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _check_post(self, headers: Headers) -> None:
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HttpError(415, f"Content-Type must be application/json; got {kind[:100]!r}", code="invalid_type")
        if self._in_flight >= self._bounds.max_requests_in_flight:
            raise HttpError(
                429,
                f"{self._in_flight} requests are in flight, the limit here; try again",
                code="too_many_requests",
                headers={"Retry-After": str(self._bounds.retry_after_s)},
            )


async def read_body(request: Request, bounds: ServerLimits) -> bytes:
    """Read a body within its bounds of size and time.

    Raises:
        HttpError: 413 or 408.
        ClientGoneError: The client disconnected before its end.
    """
    length = request.headers.get("content-length", "0")
    body = bytearray()
    try:
        async with asyncio.timeout(bounds.body_timeout_s):
            if length.isdecimal() and int(length) > bounds.max_body_bytes:
                raise _too_large(bounds)
            async for part in request.stream():
                body += part
                if len(body) > bounds.max_body_bytes:
                    raise _too_large(bounds)
    except TimeoutError:
        message = f"the body did not arrive within {bounds.body_timeout_s} s"
        raise HttpError(408, message, code="body_timeout") from None
    except ClientDisconnect:
        raise ClientGoneError from None
    return bytes(body)


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


def _too_large(bounds: ServerLimits) -> HttpError:
    message = f"the body is larger than {bounds.max_body_bytes} bytes, the limit here: send fewer prompts at once"
    return HttpError(413, message, code="body_too_large", headers={"Connection": "close"})
