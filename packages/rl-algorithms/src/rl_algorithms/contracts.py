"""The seams: all that the algorithms ask of the world, as structural protocols.

Knows no engine, no backend, no process group. `rl_backends`, `rl_generation` and `rl_refit` have classes that match;
so may yours, in about forty lines.

Axes: B rows (P prompts x G rollouts, or pairs), T tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias, TypeVar, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = [
    "Conversation",
    "Engine",
    "Environment",
    "EnvironmentReturn",
    "LossFn",
    "Message",
    "Policy",
    "RefitReport",
    "Rollout",
    "Sums",
    "TokenBatch",
    "WeightSync",
]

Sums: TypeAlias = dict[str, Tensor]
"""Metric numerators, summed over rows; dividing by the step's global count is the caller's last act."""

Message: TypeAlias = dict[str, str]
"""One turn of a conversation: `{"role": "user", "content": "..."}`."""


@runtime_checkable
class TokenBatch(Protocol):
    """What a policy needs to find in examples: a frozen dataclass whose tensors are `[B]` or `[B, T]`.

    Rows are right-padded. A policy may cut B anywhere between units of `rows_per_unit` rows, drop padding, and
    spread rows over ranks; the loss is written so that none of this changes the result.
    """

    rows_per_unit: ClassVar[int]
    """How many consecutive rows the loss needs together: 1 for a token loss, 2 for preference pairs."""

    @property
    def tokens(self) -> Int[Tensor, "B T"]:
        """Token ids, right-padded."""

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """Tokens of each row that are not padding."""

    @property
    def trainable(self) -> Bool[Tensor, "B T"]:
        """The tokens whose log-probability the loss looks at; never the first of a row."""


BatchT = TypeVar("BatchT", bound=TokenBatch)

LossFn: TypeAlias = Callable[[Tensor, BatchT], tuple[Tensor, Sums]]
"""`(logp [B T], examples) -> (loss [], sums)`: the part of the step's loss that these rows contribute."""


@runtime_checkable
class Policy(Protocol):
    """The model being trained, wherever and however it is sharded."""

    def logp(self, examples: TokenBatch) -> Float[Tensor, "B T"]:
        """Log-probability of each trainable token given those before it; 0 elsewhere. No gradient."""

    def forward_backward(self, examples: BatchT, loss: LossFn[BatchT]) -> Sums:
        """Accumulate the gradient of `loss` over all of `examples`; return its metric sums over all of them.

        How they are cut along B, over ranks or microbatches, is the policy's affair.
        """

    def optim_step(self) -> float:
        """Clip, update, clear the gradient; return its norm before clipping."""


@runtime_checkable
class Rollout(Protocol):
    """One sampled answer, as the engine produced it."""

    @property
    def tokens(self) -> Sequence[int]:
        """Token ids as sampled, the stop token included when one ended the answer."""

    @property
    def logp(self) -> Sequence[float]:
        """The engine's log-probability of each of `tokens`, at the temperature of sampling."""

    @property
    def truncated(self) -> bool:
        """Whether the token limit, not a stop token, ended the answer."""

    @property
    def version(self) -> int:
        """How many optimizer steps the weights that sampled it had seen."""


SamplingT_contra = TypeVar("SamplingT_contra", contravariant=True)


@runtime_checkable
class Engine(Protocol[SamplingT_contra]):
    """What samples. Its sampling options are its own; the algorithms only hand them on."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingT_contra) -> Sequence[Rollout]:
        """One rollout per prompt, in the order of the prompts. Prompts are token ids."""


@runtime_checkable
class RefitReport(Protocol):
    """Proof that an engine took new weights."""

    @property
    def version(self) -> int:
        """The version that was committed."""


@runtime_checkable
class WeightSync(Protocol):
    """Brings the policy's weights into the engine, or raises and leaves the old ones."""

    def __call__(self, *, version: int) -> RefitReport:
        """Transfer, verify and commit the weights as of `version` optimizer steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What an environment judges: the prompt's messages, the policy's answer, and the data row behind them."""

    messages: tuple[Message, ...]
    """The prompt, without the answer."""

    answer: str
    """The policy's answer as text, without the stop token that ended it."""

    row: Mapping[str, object]
    """Every column of the data row, untouched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentReturn:
    """What an environment says of one conversation."""

    reward: float
    """Finite. The scale is the environment's own."""

    terminated: bool
    """True when the environment has nothing more to say: always, for a single turn."""

    observations: tuple[Message, ...] = ()
    """Messages to append before the policy answers again; empty when terminated."""


@runtime_checkable
class Environment(Protocol):
    """The judge of a batch of conversations."""

    def step(self, conversations: Sequence[Conversation]) -> Sequence[EnvironmentReturn]:
        """One return per conversation, in order."""
