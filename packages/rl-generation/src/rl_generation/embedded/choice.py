"""Choose how a model generates: by continuous batching where that is shown to be right, otherwise by `generate`."""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from rl_generation.embedded.continuous_batching import ContinuousBatching, Counters, Progress, Row
from rl_generation.embedded.inspection import Support
from rl_generation.embedded.proof import why_not_continuous
from rl_generation.embedded.slot_model import SlotModel
from rl_generation.embedded.whole_batches import WholeBatches
from rl_generation.errors import ModelError
from rl_generation.rollout import LogpOf

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ContinuousBatchingChoice", "Runner", "make_runner"]

ContinuousBatchingChoice = Literal["auto", "required", "off"]
"""`"auto"` warns where a model cannot have it, `"required"` refuses such a model, `"off"` does without."""

CPU_CACHE_BYTES = 4 << 30
DEVICE_CACHE_FRACTION = 0.5


class Runner(Protocol):
    """What the engine needs of a way to generate. One thread at a time."""

    counters: Counters

    @property
    def max_cache_tokens(self) -> int | None:
        """Tokens that its cache may hold; None where there is no bound."""

    @property
    def running(self) -> int:
        """Answers being generated."""

    @property
    def waiting(self) -> int:
        """Answers that wait for a place."""

    @property
    def cache_usage(self) -> float:
        """Share of the cache's bound that is in use."""

    def add(self, rows: Sequence[Row]) -> None:
        """Take answers in; they start in this order."""

    def advance(self, *, stream: bool) -> list[Progress]:
        """Generate some more; return who has ended, and with `stream` every new token."""

    def abort(self, owner: object) -> list[Progress]:
        """Take the answers that somebody wanted out, as they are."""

    def commit_version(self, version: int) -> None:
        """From here on, tokens are made by the weights of `version`."""

    def clear(self) -> None:
        """Forget all answers, and give the cache back."""

    def explain(self) -> list[str]:
        """How it generates, in lines for people."""


def make_runner(
    model: "PreTrainedModel",
    *,
    support: Support,
    choice: ContinuousBatchingChoice,
    record_decoding: bool,
    pad_token_id: int,
    max_batch_size: int,
    max_cache_tokens: int | None,
    logp_of: LogpOf,
) -> Runner:
    """Return what generates with `model`, which counts its weights as version 0; warn where it is not continuous.

    Raises:
        ModelError: Continuous batching is required and not possible.
    """
    slots = SlotModel(
        model, pad_token_id=pad_token_id, logits_to_keep=support.logits_to_keep, record_decoding=record_decoding
    )
    reason = _why_not(slots, support, choice)
    if reason is None:
        return ContinuousBatching(
            slots,
            max_batch_size=max_batch_size,
            max_cache_tokens=max_cache_tokens or _default_cache_bytes(model.device) // slots.cache.token_bytes,
            vocab_size=support.vocab_size,
            logp_of=logp_of,
        )
    if choice == "required":
        raise ModelError(f"continuous_batching='required', but {reason}: pass 'auto' to take model.generate instead")
    if choice == "auto":
        warnings.warn(
            f"{reason}: the engine takes model.generate instead of continuous batching, which is slower; pass "
            f"continuous_batching='off' to agree",
            stacklevel=3,
        )
    return WholeBatches(
        model,
        reason=reason,
        pad_token_id=pad_token_id,
        max_batch_size=max_batch_size,
        vocab_size=support.vocab_size,
        logp_of=logp_of,
    )


def _why_not(slots: SlotModel, support: Support, choice: ContinuousBatchingChoice) -> str | None:
    if choice == "off":
        return "continuous_batching='off'"
    if support.missing:
        return f"{type(slots.model).__name__}'s forward has no {', '.join(support.missing)}"
    return why_not_continuous(slots, num_layers=support.num_layers, vocab_size=support.vocab_size)


def _default_cache_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_CACHE_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * DEVICE_CACHE_FRACTION)
