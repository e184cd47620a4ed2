"""Errors in the format of OpenAI's API, and the HTTP status of each exception of this package.

`{"error": {"message": …, "type": …, "param": the field it is about or null, "code": …}}`
"""

import re
from collections.abc import Mapping
from typing import Any, final

from rl_generation.errors import EngineDeadError, EngineOptionError, LogpError, ModelError, SampleTimeoutError

__all__ = ["HttpError", "from_engine", "internal"]

OURS = (EngineOptionError, LogpError, ModelError)
"""ValueErrors that no request can help."""


@final
class HttpError(Exception):
    """A refusal or failure, as the client gets it.

    Args:
        status: Of HTTP.
        message: What rule broke, and what to do.
        param: The field of the request that it is about.
        code: A word for programs.
        headers: Further headers of the response.
        details: Further fields of `error`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self._details = dict(details or {})

    @property
    def body(self) -> dict[str, Any]:
        """What is sent as JSON."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": {**error, **self._details}}


def from_engine(error: EngineDeadError | SampleTimeoutError | ValueError) -> HttpError:
    """What an error of the engine means to the client."""
    if isinstance(error, EngineDeadError):
        return HttpError(503, str(error), code="engine_dead", headers={"Retry-After": "10"})
    if isinstance(error, SampleTimeoutError):
        lost = [
            {"prompt_index": sample.prompt_index, "sample_index": sample.sample_index, "tokens": len(sample.tokens)}
            for sample in error.timed_out
        ]
        return HttpError(504, str(error), code="sample_timeout", details={"timed_out": lost})
    if isinstance(error, OURS):
        return HttpError(500, str(error), code="engine_error")
    # An engine speaks of its Sampling, a client of OpenAI's fields.
    message = str(error).replace("max_new_tokens", "max_tokens")
    field = re.match(r"(\w+) must", message)
    return HttpError(400, message, param=field[1] if field else None, code="invalid_value")


def internal() -> HttpError:
    """What a client hears of an unforeseen error; the server's log has the rest."""
    return HttpError(500, "internal error: the server's log says more", code="internal_error")
