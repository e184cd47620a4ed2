"""The figures of a run as they are made: a JSON line and TensorBoard scalars for each logged step, and the samples.

It does not know what a metric means; `glossary` does. The trainer chooses when to log.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NotRequired, Self, TypedDict

from rl_launcher.observe.json_lines import JsonLinesWriter, JsonValue, read_json_lines
from rl_launcher.observe.run_directory import RunDirectory

if TYPE_CHECKING:
    from torch.utils.tensorboard import FileWriter

__all__ = ["MetricError", "MetricsLog", "Sample", "SampleTokens", "read_metrics"]

_OURS = ("stage", "step", "time_s")


class MetricError(ValueError):
    """A metric that cannot be logged under the name it was given."""


class SampleTokens(TypedDict):
    """A conversation as the trainer sees it; the lists have one entry a token."""

    pieces: list[str]
    """The text of each token; together they are the text of all. "" where a letter ends in a later token."""
    logp: list[float | None]
    """The engine's log-probability of the tokens that it sampled; None for all others."""
    trained: list[bool]
    """Whether the loss looks at the token: not at prompts, observations, or what was left out."""
    turns: list[int]
    """Which answer of the conversation the token belongs to, from 0; -1 for what the policy did not say."""


class Sample(TypedDict):
    """One held-out answer."""

    when: Literal["before", "after"]
    """Before or after the training of `stage`."""
    stage: str
    """The stage whose training lies between before and after."""
    prompt: str
    """What was asked; it pairs an answer from before with the one from after."""
    expected: str | None
    """The right answer, where there is one."""
    response: str
    """What the policy answered."""
    reward: float | None
    """What the environment gave for it; 1 or more counts as right. None where nobody judges."""
    truncated: bool
    """Whether the answer ended at the token limit and not with a stop token."""
    tokens: NotRequired[SampleTokens]
    """The whole conversation token by token, of the few answers that are kept so; `token_sample` makes it."""


class MetricsLog:
    """Log a run. Use it as a context manager, around all of its stages.

    with MetricsLog(run) as log:
        log.write("grpo", 1, {"reward": 0.3, "phase_s/generate": 0.11})
    """

    def __init__(self, run: RunDirectory, *, elapsed_s: float = 0.0, tensorboard: bool = True) -> None:
        self._run = run
        self._has_tensorboard = tensorboard
        self._start = time.monotonic() - elapsed_s
        self._lines = JsonLinesWriter(run.metrics)
        self._tensorboard: FileWriter | None = None

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Append one line `{"stage", "step", "time_s", **values}` and the scalars `stage/name` at `step`.

        `time_s` counts seconds since the log was opened, on top of `elapsed_s`. The line is out of this process when
        the call returns. A value that is not finite is null in the line, and absent from TensorBoard, which would draw
        it as zero.

        Raises:
            MetricError: a value is named like a field of the log's own.
            RunDirectoryError: the disk refused the line.
        """
        clashes = sorted(set(values) & set(_OURS))
        if clashes:
            raise MetricError(
                f"metrics of stage {stage!r} at step {step} are named {', '.join(clashes)}, which the log itself "
                f"writes ({', '.join(_OURS)}); name them otherwise"
            )
        numbers = {name: value if isinstance(value, int) else float(value) for name, value in values.items()}
        row: dict[str, JsonValue] = {
            "stage": stage,
            "step": step,
            "time_s": round(time.monotonic() - self._start, 4),
            **numbers,
        }
        self._lines.append(row)
        if self._has_tensorboard:
            self._write_scalars(f"{stage}/", step, numbers)

    def write_samples(self, samples: Iterable[Sample]) -> None:
        """Append held-out answers.

        Raises:
            RunDirectoryError: the disk refused them.
        """
        with JsonLinesWriter(self._run.samples) as lines:
            for sample in samples:
                lines.append(sample)

    def close(self) -> None:
        """Close the files; a second time does nothing."""
        self._lines.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_scalars(self, prefix: str, step: int, values: Mapping[str, float]) -> None:
        # TensorBoard takes a second to import, which reading a run should not pay.
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import FileWriter

        if self._tensorboard is None:
            self._tensorboard = FileWriter(str(self._run.tensorboard))
        finite = [(name, value) for name, value in values.items() if math.isfinite(value)]
        # One event for all scalars of a step: many times as fast as one `SummaryWriter.add_scalar` each.
        scalars = [Summary.Value(tag=prefix + name, simple_value=value) for name, value in finite]
        self._tensorboard.add_summary(Summary(value=scalars), step)


def read_metrics(run: RunDirectory) -> list[dict[str, JsonValue]]:
    """Read the lines of a run in the order in which they were written; [] where nothing was logged yet.

    A torn line is left out; `json_lines.read_json_lines` counts those.
    """
    return read_json_lines(run.metrics).rows if run.metrics.exists() else []
