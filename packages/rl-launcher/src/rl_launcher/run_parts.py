"""The parts of a run, with the same few methods in this process and on Ray.

The loops of `rl_algorithms` need less than this (`rl_algorithms.contracts`); what is added here starts, saves and ends.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

from rl_algorithms.chat import Chat, Demonstration, Prompt, TokenizedConversation
from rl_algorithms.contracts import Environment, Reference, Teacher
from rl_algorithms.data import SkippedRows
from rl_backends import BackendSelection, OptimizerConfig
from rl_launcher.engine_middleware import RunEngine, ServingEngine
from rl_observe.health import EventQueue
from rl_refit import RefitReport

if TYPE_CHECKING:
    from rl_algorithms.tokenized_data import PreferenceExamples

__all__ = ["Judge", "Parts", "ServingEngine", "TrainedPolicy", "WeightSync"]


class TrainedPolicy(Protocol):
    """A policy that can be trained and saved: a backend of rl_backends, or a group of ranks that each hold one."""

    version: int
    """Optimizer steps that the weights have seen."""

    @property
    def learning_rate(self) -> float:
        """Of the next step."""

    def start_training(self, optimizer: OptimizerConfig, *, num_steps: int, temperature: float = 1.0) -> None:
        """Start a stage with a fresh optimizer."""

    def logp(self, examples: Any) -> Tensor:
        """As in `rl_algorithms.contracts.Policy`, like the following two."""

    def forward_backward(self, examples: Any, loss: Any, *, output: Any = "logp") -> dict[str, Tensor]:
        """Accumulate the gradient; return sums over all rows."""

    def optim_step(self) -> float:
        """Clip, update, clear the gradient; return its norm before clipping."""

    def freeze_reference(self) -> Reference:
        """The policy as it is now, frozen."""

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a Hugging Face model folder, whole or not at all."""

    def save_checkpoint(self, folder: str | Path, *, weights: bool = True) -> Any:
        """Write optimizer, schedule and weights for any number of ranks; whole or not at all."""

    def load_checkpoint(self, folder: str | Path, *, weights: bool = True, optimizer: bool = True) -> Any:
        """Load what `save_checkpoint` wrote; without `optimizer` its weights alone."""

    def explain(self) -> str:
        """How it is sharded, and why."""

    def close(self) -> None:
        """End what it holds: processes, groups, memory."""


@runtime_checkable
class Judge(Environment, Protocol):
    """An environment that counts what it could not judge."""

    errors: int
    """Responses, or episodes, that could not be judged so far."""

    def check(self, columns: set[str]) -> None:
        """Refuse data without a column that the reward needs."""


class WeightSync(Protocol):
    """Transfers new weights into the engine, and counts what it did."""

    count: int
    """Verified and committed refits."""

    last: RefitReport | None
    """The report of the latest one."""

    def __call__(self, *, version: int) -> RefitReport:
        """Transfer, verify and commit."""

    def metrics(self) -> dict[str, float]:
        """Bytes and seconds of the latest refit, for the log."""

    def explain(self) -> str:
        """What each refit transfers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything a run is made of."""

    policy: TrainedPolicy
    selection: BackendSelection
    """Which backend trains, and why."""
    engine: RunEngine
    weight_sync: WeightSync
    environment: Judge
    teacher: Teacher | None
    """The teacher to distil from; None without such a stage."""
    chat: Chat
    tokenizer: Any
    prompts: list[Prompt]
    """To train on."""
    held_out: list[Prompt]
    unasked: int
    """Held-out prompts that are too long to sample a response, in a run without an `env`."""
    demonstrations: list[Demonstration | TokenizedConversation]
    """Empty without an sft stage."""
    held_out_demonstrations: list[Demonstration | TokenizedConversation]
    """For its held-out loss; also empty if held-out rows have no answer."""
    pairs: "PreferenceExamples | None"
    """Given preference pairs; None if the data have none, or no stage trains on them."""
    skipped: SkippedRows
    """Which rows of the data were left out."""
    placement: str
    """Which process holds what, in words."""
    close: Callable[[], None]
    """End every process and free what the parts hold; a second call does nothing."""
    events: EventQueue = field(default_factory=EventQueue)
    """What happens to the parts, as an engine that is restarted, for the recorder to report."""
    figures: Callable[[], dict[str, float]] = dict
    """What the parts count, as engines that died, for the log."""
    reached: Callable[[str, int], None] = lambda _, __: None
    """Called when a step of a stage is done, and with 0 at its start: for profilers in other processes."""
