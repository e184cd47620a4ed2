"""The seams: all that the algorithms ask of the world, as structural protocols.

`rl_backends`, `rl_generation` and `rl_refit` have classes that match; so may yours, in about forty lines.

Axes: B rows (P prompts x G rollouts, or pairs), T tokens, K words of the vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import TypeIs  # torch brings it

__all__ = [
    "Conversation",
    "ConversationEnvironment",
    "Engine",
    "EntropyPolicy",
    "Environment",
    "EnvironmentReturn",
    "EpisodeStart",
    "LossFn",
    "Message",
    "Policy",
    "Reference",
    "RefitReport",
    "RequestEngine",
    "ResettingEnvironment",
    "Rollout",
    "ScoreModel",
    "SeededBatchEngine",
    "Student",
    "Sums",
    "Teacher",
    "TokenBatch",
    "TopKLogp",
    "ValueModel",
    "VersionSpan",
    "WeightSync",
    "matches",
]

Sums: TypeAlias = dict[str, Tensor]
"""Metric numerators, summed over rows; dividing by the step's global count is the caller's last act."""

Message: TypeAlias = dict[str, Any]
"""One turn of a conversation: `{"role": "user", "content": "..."}`, and `tool_calls` where there are any."""

MatchedT = TypeVar("MatchedT")


def matches(thing: object, protocol: Callable[..., MatchedT]) -> TypeIs[MatchedT]:
    """Return whether `thing` has all methods and attributes of a protocol, its own or handed on by `__getattr__`.

    `isinstance` says the same on Python 3.11. From 3.12 on it does not see what is handed on, and an environment that
    is wrapped in another class would lose its `reset` without a word.
    """
    declaring = [base for base in getattr(protocol, "__mro__", ()) if getattr(base, "_is_protocol", False)]
    declared = {name for base in declaring for name in (*base.__annotations__, *vars(base)) if not name.startswith("_")}
    return all(getattr(thing, name, None) is not None for name in declared)


# -- What trains ---------------------------------------------------------------------------------------------------


@runtime_checkable
class TokenBatch(Protocol):
    """What a policy needs to find in examples: a frozen dataclass of tensors with the axes B, then T if they have more.

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
"""`(output, examples) -> (loss [], sums)`: the part of the step's loss that these rows contribute. The output is the
log-probabilities [B, T], or what `output=` of `forward_backward` asked for."""


@runtime_checkable
class Reference(Protocol):
    """A frozen model that only gives log-probabilities."""

    def logp(self, examples: TokenBatch) -> Float[Tensor, "B T"]:
        """Log-probability of each trainable token given those before it; 0 elsewhere. No gradient."""


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
class EntropyPolicy(Policy, Protocol):
    """A policy whose losses may look at the entropy of each token's distribution: for an entropy bonus."""

    def forward_backward(
        self, examples: BatchT, loss: LossFn[BatchT], *, output: Literal["logp", "logp_and_entropy"] = "logp"
    ) -> Sums:
        """As `Policy`'s; with `"logp_and_entropy"` the loss is given both, stacked to [B, T, 2]."""


@runtime_checkable
class ValueModel(Protocol):
    """What predicts the return from each state: the critic of PPO."""

    def value(self, examples: TokenBatch) -> Float[Tensor, "B T"]:
        """The value of the state before each trainable token, in that token's place; 0 elsewhere. No gradient."""

    def forward_backward(self, examples: BatchT, loss: LossFn[BatchT], *, output: Literal["value"]) -> Sums:
        """As `Policy`'s; the loss is given the values [B, T]."""

    def optim_step(self) -> float:
        """As `Policy`'s."""


@runtime_checkable
class ScoreModel(Protocol):
    """What scores a whole row: a reward model."""

    def score(self, examples: TokenBatch) -> Float[Tensor, " B"]:
        """The score of each row, read at its last token. No gradient."""

    def forward_backward(self, examples: BatchT, loss: LossFn[BatchT], *, output: Literal["score"]) -> Sums:
        """As `Policy`'s; the loss is given the scores [B]."""

    def optim_step(self) -> float:
        """As `Policy`'s."""


@runtime_checkable
class TopKLogp(Protocol):
    """The most probable words in each token's place."""

    @property
    def logp(self) -> Float[Tensor, "B T K"]:
        """Their log-probabilities, normalised over the whole vocabulary; 0 where nothing is trainable."""

    @property
    def token_ids(self) -> Int[Tensor, "B T K"]:
        """Which words they are."""


@runtime_checkable
class Teacher(Protocol):
    """What is distilled from."""

    def topk_logits(self, examples: TokenBatch, k: int) -> TopKLogp:
        """The `k` most probable words in each trainable token's place. No gradient."""


@runtime_checkable
class Student(Policy, Protocol):
    """A policy whose losses may look at the log-probabilities of words that were not sampled."""

    def forward_backward(
        self, examples: BatchT, loss: LossFn[BatchT], *, output: Literal["logp", "logp_of_token_ids"] = "logp"
    ) -> Sums:
        """As `Policy`'s; with `"logp_of_token_ids"` the loss is given those of `examples.token_ids`: [B, T, K]."""


# -- What samples --------------------------------------------------------------------------------------------------


@runtime_checkable
class VersionSpan(Protocol):
    """Which weights made the tokens from `start` to before `end` of an answer."""

    @property
    def version(self) -> int:
        """How many optimizer steps they had seen."""

    @property
    def start(self) -> int:
        """The first of the tokens, counted from the start of the answer."""

    @property
    def end(self) -> int:
        """One after the last."""


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
    def versions(self) -> Sequence[VersionSpan]:
        """Which weights made which tokens: several spans where weights changed while it was sampled. Without gaps."""


SamplingT_contra = TypeVar("SamplingT_contra", contravariant=True)


@runtime_checkable
class Engine(Protocol[SamplingT_contra]):
    """What samples. Its sampling options are its own; the algorithms only hand them on."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingT_contra) -> Sequence[Rollout]:
        """One rollout per prompt, in the order of the prompts. Prompts are token ids."""


@runtime_checkable
class RequestEngine(Engine[SamplingT_contra], Protocol[SamplingT_contra]):
    """An engine that also takes one request at a time, while others are being generated.

    With it every episode goes on by itself: its next turn starts as soon as its own answer has been judged.
    """

    def submit(self, prompt: Sequence[int], sampling: SamplingT_contra, *, seed: int) -> Future[Any]:
        """Begin to answer one prompt; the future has the `Rollout`, or raises why there is none.

        Never waits for other requests. May be called from any thread, and the future may be completed by any. (Its type
        says `Any`, since to a type checker a future of an engine's own rollouts is no future of these.)

        Args:
            prompt: token ids.
            sampling: as in `generate`.
            seed: of this request alone, in [0, 2^31): the same request of a repeated run has the same. An engine that
                samples by seeds uses it, together with that of `sampling` where it has one; then no rollout depends on
                what is generated beside it, nor on when.
        """


@runtime_checkable
class SeededBatchEngine(Engine[SamplingT_contra], Protocol[SamplingT_contra]):
    """An engine that also takes a batch whose requests have seeds of their own.

    Where the environment judges batches, and nothing is gained by single requests, it spares a future for each.
    """

    def generate_seeded(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingT_contra, *, seeds: Sequence[int]
    ) -> Sequence[Rollout]:
        """What `submit` would answer to each prompt with its seed, in the order of the prompts."""


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


# -- What judges ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStart:
    """How an episode begins."""

    messages: tuple[Message, ...]
    """What the policy answers first."""

    tools: tuple[Mapping[str, object], ...] = ()
    """JSON schemas of the tools that it may call, for the chat template."""

    state: object = None
    """Whatever the environment wants back with the first answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What an environment judges: the messages so far, the policy's newest answer, and the data row behind them."""

    messages: tuple[Message, ...]
    """All before the answer: the prompt, earlier answers and observations."""

    answer: str
    """The policy's newest answer as text, without the stop token that ended it."""

    row: Mapping[str, object]
    """Every column of the data row, untouched."""

    tokens: tuple[int, ...] = ()
    """The newest answer as it was sampled, the stop token included."""

    version: int = 0
    """How many optimizer steps the weights had seen that sampled its last token."""

    state: object = None
    """What the environment returned last for this conversation; None at first."""

    turn: int = 0
    """How many answers came before this one."""

    truncated: bool = False
    """Whether the token limit cut the answer off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentReturn:
    """What an environment says of one conversation."""

    reward: float
    """Of this answer alone; finite. A conversation's reward is the sum over its answers."""

    terminated: bool
    """True when the environment has nothing more to say: always, for a single turn."""

    truncated: bool = False
    """True when the environment stopped at a limit of its own; the conversation ends, and might have gone on."""

    observations: tuple[Message, ...] = ()
    """Messages to append before the policy answers again; empty when it ended."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    """The parts of `reward` by name, where several are told apart (GDPO). All conversations name the same ones."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the log, averaged over conversations."""

    state: object = None
    """Whatever the environment wants back with the next answer."""

    failed: str | None = None
    """Why this conversation says nothing of the policy (a tool that timed out, a sandbox that died). It then ends, is
    not trained on, and no baseline counts it."""


@runtime_checkable
class Environment(Protocol):
    """The judge of a batch of conversations. It keeps nothing of them itself: their state travels with them."""

    def step(self, conversations: Sequence[Conversation]) -> Sequence[EnvironmentReturn]:
        """One return per conversation, in order."""


@runtime_checkable
class ConversationEnvironment(Environment, Protocol):
    """An environment that also takes one conversation at a time, while others are generated and judged.

    It judges each by itself: nothing that it says depends on which other conversations there are.
    """

    def submit(self, conversation: Conversation) -> Future[EnvironmentReturn] | None:
        """Begin to judge one newest answer; never waits for it. May be called from any thread.

        None leaves this conversation to `step`, which is then given all such conversations together, once every other
        episode has ended or waits for the same.
        """


@runtime_checkable
class ResettingEnvironment(Environment, Protocol):
    """An environment that says itself how an episode begins. Others begin with the row's prompt."""

    def reset(self, rows: Sequence[Mapping[str, object]], *, seeds: Sequence[int]) -> Sequence[EpisodeStart]:
        """One start per row. Rollouts of one group have equal rows, and equal seeds."""
