"""What a call of the engine must pass before any of it is submitted. Starts nothing, waits for nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, final

from rl_generation.requests import Limits, Request, Sampling, make_requests
from rl_generation.vllm.lora import LoraAdapter, check_lora
from rl_generation.vllm.options import VllmOptions
from rl_generation.vllm.sampling_params import check_for_vllm
from rl_generation.vllm.timeouts import DEFAULT_TIMEOUT_S, check_timeout

__all__ = ["Admission", "CallOptions", "Manner", "Prompts", "Samplings", "check_version"]

Prompts = Sequence[Sequence[int]]
"""Token ids."""

Samplings = Sampling | Sequence[Sampling]
"""One for all prompts, which is spread over them, or one for each."""


class CallOptions(TypedDict, total=False):
    """What any call that generates takes besides."""

    lora: LoraAdapter | None
    """The adapter to answer with; None is the model as it is."""

    timeout_s: float | None
    """Of each sample; None is the engine's."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """What holds for all samples of a call."""

    timeout_s: float
    """Of each sample, from its submission; may be infinite."""

    lora: Any = None
    """vLLM's LoRARequest; None for the model as it is."""

    request_id: str | None = None
    """What the caller named the call."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The rules of one engine."""

    options: VllmOptions
    limits: Limits
    timeout_s: float | None
    """Of a sample, where its call does not say; None where nobody has set one."""

    def requests(
        self,
        prompts: Prompts,
        sampling: Samplings,
        *,
        lora: LoraAdapter | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        otherwise_s: float = DEFAULT_TIMEOUT_S,
    ) -> tuple[list[Request], Manner]:
        """Return what a call comes to, with `otherwise_s` for each sample where nobody has set a limit.

        Raises:
            PromptError: A request cannot be served.
            EngineOptionError: The timeout is impossible, or there is no place for adapters.
        """
        requests = make_requests(prompts, sampling, self.limits)
        for request in requests:
            check_for_vllm(request, self.limits)
        if lora is not None:
            check_lora(lora, self.options)
        limit_s = self.timeout_s or otherwise_s if timeout_s is None else check_timeout(timeout_s)
        adapter = None if lora is None else lora.request()
        return requests, Manner(timeout_s=limit_s, lora=adapter, request_id=request_id)


def check_version(version: int) -> None:
    """Raise ValueError where `version` is no number of optimizer steps."""
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise ValueError(f"a version counts optimizer steps and is at least 0; got version={version!r}")
