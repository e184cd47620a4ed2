"""What `verify` runs and compares, as data: the tasks of each layout, and the request that is sent to the processes.

Which checks a task leads to is the table `CHECKS` in `report`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Hook = Callable[..., Any] | str
"""A function, or its import path "package.module:name"."""

BAR = 1e-5
"""Relative error of logits and gradients in fp32 that sums in another order may cost."""

COLLECTIVES, COLLECTIVES_DEEPER = "collectives of a layer", "collectives of a layer, one more"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One computation of the sharded model and of the unsharded one, whose results are compared."""

    name: str
    measure: Literal["step", "clip", "count", "outputs", "checkpoint"] = "step"
    """A step is forward and backward; the others clip bf16 gradients, count collectives, compare the output of every
    module, and save and load."""
    variant: str = "as given"
    """Which of the request's configurations the task runs."""
    length: int = 16  # tokens of a row
    rows: int = 2  # of a microbatch on each data-parallel rank
    microbatches: int = 1
    defer: bool = False  # FSDP reduces gradients at the last microbatch only
    left_padding: bool = False  # rows begin with padding, each of another length
    loss: Literal["logits", "logp", "hidden"] = "logits"
    """What the loss is computed from: gathered logits, vocabulary-parallel log-probabilities, or `linear_logp`."""
    image: bool = False  # each row has an image in it
    freeze: bool = False  # every third parameter takes no gradient
    optimize: bool = False  # gradient norm, clipping and optimizer steps follow
    backend: str = ""  # compile each layer with this backend of torch.compile
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b"] = "1f1b"  # of a pipeline


FIRST_WRONG_OUTPUT = Task(name="where it begins", measure="outputs")
"""Runs after wrong logits."""


def tasks_for(*, tp: int, dp: int = 1, pp: int = 1, images: bool = False) -> tuple[Task, ...]:
    """The tasks of a layout."""
    odd = 15 if tp <= 2 else 4 * tp + 1
    if pp > 1:
        return (
            Task(name="1F1B", microbatches=2 * pp, optimize=True),
            Task(name="GPipe, odd length", microbatches=3, length=odd, schedule="gpipe"),
            Task(name="interleaved 1F1B", microbatches=2 * pp, rows=1, schedule="interleaved_1f1b"),
            Task(name="left padding", microbatches=pp, length=17, left_padding=True),
            Task(name="frozen parameters", microbatches=pp, freeze=True),
            Task(name="uneven vocabulary, other tie", variant="uneven", microbatches=pp, length=17, loss="logp"),
            Task(name="linear_logp", microbatches=pp, loss="hidden"),
        )
    tasks = [
        (True, Task(name="forward and backward", optimize=True)),
        (True, Task(name="odd length", length=odd)),
        (True, Task(name="left padding", length=17, left_padding=True)),
        (True, Task(name="accumulation x3", microbatches=3, rows=1)),
        (dp > 1, Task(name="accumulation x3, deferred sync", microbatches=3, rows=1, defer=True)),
        (True, Task(name="frozen parameters", freeze=True)),
        (True, Task(name="uneven vocabulary, other tie", variant="uneven", length=17, loss="logp")),
        (True, Task(name="linear_logp", loss="hidden")),
        (True, Task(name="bf16 clipping", measure="clip")),
        (True, Task(name="checkpoint round trip", measure="checkpoint")),
        (images, Task(name="with an image", image=True)),
        # FSDP's collectives would be counted too.
        (dp == 1 and tp > 1, Task(name=COLLECTIVES, measure="count")),
        (dp == 1 and tp > 1, Task(name=COLLECTIVES_DEEPER, measure="count", variant="deeper")),
    ]
    return tuple(task for applies, task in tasks if applies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Everything that the processes need; it is pickled. Options of `verify` have the same names here."""

    configs: Mapping[str, Sequence[Any]]
    """Configurations of each variant, of which the first is used that builds and ties what it promises."""
    tasks: tuple[Task, ...]
    tp: int
    dp: int
    pp: int = 1
    full: Any = None
    """The configuration before it was made small, which the plan must fit too; None skips that check."""
    sequence_parallel: bool = False
    output_projections: Literal["rowwise", "colwise"] = "rowwise"
    custom: Any = None
    apply: Hook | None = None
    check_first: bool = True
    logp: Hook | None = None
    grad_norm: Hook | None = None
    clip: Hook | None = None
    trust_remote_code: bool = False
    deadline_s: float = 60.0

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pp * self.tp * self.dp
