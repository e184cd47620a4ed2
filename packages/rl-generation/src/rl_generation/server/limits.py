"""How much one client may ask of the server. Does not know what the engine can do: see `rl_generation.requests`."""

from dataclasses import dataclass, fields
from typing import ClassVar, final

from rl_generation.server.errors import HttpError

__all__ = ["ServerLimits"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Bounds beyond which a request is refused before it costs anything; each refusal names its bound."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    max_body_bytes: int = 8 << 20
    """Size of a request's body; the default holds about a million token ids. Larger ones get status 413."""

    body_timeout_s: float = 30.0
    """Seconds within which a body must have arrived; a slower client gets status 408."""

    max_prompts: int = 1024
    """Prompts in one request to `/v1/completions`; more get status 400."""

    max_answers: int = 1024
    """Answers to one request, its prompts times `n`; more get status 400."""

    max_stop_and_bad_words: int = 64
    """Stop strings, stop token ids and bad words of one request together; more get status 400. Each is looked for at
    every token of every answer, of all clients' in the same batch."""

    max_requests_in_flight: int = 1024
    """POST requests at one time, those that wait for the engine included; one more gets status 429."""

    retry_after_s: int = 1
    """Seconds after which a client that got status 429 is told to try again (`Retry-After`)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"{field.name} must be above 0; got {field.name}={value!r}")

    def check_counts(self, *, prompts: int, n: int = 1) -> None:
        """Refuse more prompts than one request may have, or more answers, `n` to each, than it may ask for.

        Raises:
            HttpError: 400.
        """
        if prompts > self.max_prompts:
            message = f"prompt holds {prompts} prompts; the limit here is {self.max_prompts}"
            raise HttpError(400, message, param="prompt", code="too_many_prompts")
        if (answers := prompts * n) > self.max_answers:
            message = f"{prompts} prompts with n={n} ask for {answers} answers; the limit here is {self.max_answers}"
            raise HttpError(400, message, param="n", code="too_many_answers")

    def check_words(self, count: int) -> None:
        """Refuse more stop strings, stop token ids and bad words than are looked for in one request's answers.

        Raises:
            HttpError: 400.
        """
        if count > self.max_stop_and_bad_words:
            message = (
                f"{count} of stop + stop_token_ids + bad_words; max_stop_and_bad_words is "
                f"{self.max_stop_and_bad_words} here"
            )
            raise HttpError(400, message, param="stop", code="too_many_words")
