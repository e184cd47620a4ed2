"""What is asked of the ranks: configurations, a way to shard, tasks to measure. Values only; they are pickled."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

COLLECTIVES, COLLECTIVES_DEEPER = "collectives of a layer", "collectives of a layer, one more"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing that sharded ranks and an unsharded process both do, so that the numbers can be compared."""

    name: str
    """Name of the check."""
    variant: str = "as given"
    """Which configuration of the question it runs."""
    length: int = 16
    """Tokens of a row."""
    rows: int = 2
    """Rows of a microbatch on each data-parallel rank."""
    microbatches: int = 1
    """Backwards before the gradients are looked at."""
    defer: bool = False
    """Whether FSDP reduces gradients at the last microbatch only."""
    left_padding: bool = False
    """Whether rows begin with padding, each with another number of words."""
    loss: Literal["logits", "logp", "hidden"] = "logits"
    """What the loss is made of: gathered logits, the vocabulary-parallel log-probabilities, or `linear_logp`."""
    image: bool = False
    """Whether each row has an image in it."""
    freeze: bool = False
    """Whether every third parameter takes no gradient."""
    optimize: bool = False
    """Whether norm, clipping and an optimizer step follow."""
    backend: str = ""
    """Backend of torch.compile that each layer is compiled with; empty compiles nothing."""
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b"] = "1f1b"
    """In which order a pipeline runs forwards and backwards."""
    only: Literal["", "clip", "count", "outputs", "checkpoint"] = ""
    """Not a backward: clip bf16 gradients, count collectives, compare the output of each module, or save and load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Everything that the processes need to know."""

    configs: Mapping[str, Sequence[Any]]
    """Small configurations of each variant: the first that builds, and ties what it says, is taken."""
    tp: int
    dp: int
    tasks: tuple[Task, ...]
    pp: int = 1
    full: Any = None
    """The configuration before it was made small: the plan must fit that model too. None not to look."""
    sequence_parallel: bool = False
    output_projections: Literal["rowwise", "colwise"] = "rowwise"
    custom: Any = None
    """Custom plan as `plan_for` takes it."""
    apply: Callable[..., Any] | str | None = None
    """Function (model, mesh) that shards by itself, in the place of `parallelize`."""
    check_first: bool = True
    """Whether a plan with problems is refused; otherwise it is run as `parallelize_module` runs it."""
    logp: Callable[..., Any] | str | None = None
    """Function (logits, targets) in the place of `get_logprobs_from_vocab_parallel_logits`."""
    grad_norm: Callable[..., Any] | str | None = None
    """Function (parameters) in the place of `get_grad_norm`."""
    clip: Callable[..., Any] | str | None = None
    """Function (parameters, max_norm, total_norm) in the place of `clip_grad_by_total_norm_`."""
    trust_remote_code: bool = False
    deadline_s: float = 60.0
    """Seconds that one round of tasks may take."""

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.pp * self.tp * self.dp
