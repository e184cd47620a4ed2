"""How long a sample may take, and what is said of those that took longer."""

import math
import os
from collections.abc import Sequence

from rl_generation.errors import EngineOptionError, SampleTimeoutError, TimedOutSample
from rl_generation.rollout import Rollout

__all__ = ["DEFAULT_TIMEOUT_S", "TIMEOUT_VARIABLE", "check_timeout", "sample_timeout_s", "timeout_error"]

TIMEOUT_VARIABLE = "NRL_VLLM_ASYNC_TIMEOUT_SECONDS"
"""The environment variable that bounds each sample of a `VllmEngine`, in seconds."""

DEFAULT_TIMEOUT_S = 600.0
"""Of a request that is awaited, streamed or submitted, where nobody says."""


def sample_timeout_s() -> float | None:
    """Read `NRL_VLLM_ASYNC_TIMEOUT_SECONDS`; None where it is not set.

    Raises:
        EngineOptionError: It is not a positive, finite number.
    """
    text = os.environ.get(TIMEOUT_VARIABLE)
    if text is None:
        return None
    try:
        return check_timeout(float(text), name=TIMEOUT_VARIABLE)
    except ValueError:
        raise EngineOptionError(
            f"{TIMEOUT_VARIABLE} must be a positive, finite number of seconds; got {text!r}. Unset it for "
            f"{DEFAULT_TIMEOUT_S:.0f}, and no limit for generate"
        ) from None


def check_timeout(timeout_s: float, *, name: str = "timeout_s") -> float:
    """Return `timeout_s`.

    Raises:
        EngineOptionError: It is not positive, or not finite.
    """
    if not 0.0 < timeout_s < math.inf:
        raise EngineOptionError(f"{name} must be a positive, finite number of seconds; got {name}={timeout_s!r}")
    return timeout_s


def timeout_error(
    timed_out: Sequence[TimedOutSample], rollouts: Sequence[Rollout], *, timeout_s: float
) -> SampleTimeoutError:
    """What to raise once every other sample has ended."""
    first, others = timed_out[0], len(timed_out) - 1
    more = f", and so did {others} other{'s' if others > 1 else ''}" if others else ""
    finished = "1 that finished is" if len(rollouts) == 1 else f"{len(rollouts)} that finished are"
    return SampleTimeoutError(
        f"sample {first.sample_index} of prompt {first.prompt_index} was aborted after {timeout_s:g} seconds, having "
        f"reached {len(first.tokens)} tokens{more}; the {finished} in this error's `rollouts`. The time counts from "
        f"the submission of a sample and includes its wait for a place in the batch: lower max_new_tokens or the "
        f"number of prompts in a call, or double it, {TIMEOUT_VARIABLE}={2 * timeout_s:g}",
        timed_out=timed_out,
        rollouts=rollouts,
    )
