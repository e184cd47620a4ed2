"""What is expected of a run, written when it starts, so that the report can lay it beside what was measured.

    prediction.json  {"figures": {"phase_s/train": 1.9, "mfu": 0.41, …}, "unknown": {"phase_s/refit": "why"},
                      "stage": "grpo", "device": "8 x NVIDIA H200", "assumed": ["prompts of 256 tokens", …]}

A figure has the name of the metric that it predicts, so any trainer that logs a metric can predict it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from rl_observe.run_directory import RunDirectory, write_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The figures of a prediction, and what it rests on."""

    figures: Mapping[str, float] = field(default_factory=dict)
    """By the name of the metric that is predicted, in its unit: `phase_s/train` in seconds of a logged step,
    `tokens_per_s`, `mfu` as a share, `memory_trainer_peak_bytes` in bytes; whatever the run logs."""

    unknown: Mapping[str, str] = field(default_factory=dict)
    """Why there is no figure of another metric, by its name; or why there is none at all, by the name `prediction`."""

    stage: str | None = None
    """The stage whose steps are meant; None takes all that were logged."""

    device: str | None = None
    """What the run was predicted for, as `8 x NVIDIA H200`; None if that does not matter."""

    assumed: Sequence[str] = ()
    """What the figures rest on, each in a few words."""


def write_prediction(run: RunDirectory, prediction: Prediction) -> None:
    """Write `prediction.json` completely or not at all, in the place of an earlier one.

    Raises:
        RunDirectoryError: the disk refused it.
        ValueError: a figure is not a finite number.
    """
    write_text(run.prediction, json.dumps(asdict(prediction), indent=2, ensure_ascii=False, allow_nan=False))
