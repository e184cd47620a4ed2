"""`RunResult`: what a run left behind, for a program or a notebook."""

from __future__ import annotations

import json
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_launcher.errors import Refusal

if TYPE_CHECKING:
    from rl_observe import RunDirectory


class RunResult:
    """What a run left behind.

    Args:
        run_dir: of the run, or of an earlier one.
        summary: what the run returned; None reads `summary.json`.

    Raises:
        RunDirectoryError: the folder is not a run directory.
    """

    def __init__(self, run_dir: str | Path, summary: dict[str, Any] | None = None) -> None:
        from rl_observe import RunDirectory

        self._run: RunDirectory = RunDirectory.open(run_dir)
        self._summary = summary

    @property
    def run_dir(self) -> Path:
        """The run directory, absolute."""
        return self._run.path

    @property
    def report(self) -> Path:
        """The report: one HTML file that needs nothing else to be opened."""
        return self._run.report

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The run's result in figures, as `summary.json` holds it; empty if the run was killed before its end."""
        if self._summary is not None:
            return self._summary
        if not self._run.summary.is_file():
            return {}
        summary: dict[str, Any] = json.loads(self._run.summary.read_text(encoding="utf-8"))
        return summary

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict for each logged step, in order: `stage`, `step`, `reward`, `loss`, ..."""
        from rl_observe import read_metrics

        return [dict(line) for line in read_metrics(self._run)]

    @cached_property
    def dataframe(self) -> Any:
        """`metrics` as a `pandas.DataFrame`.

        Raises:
            Refusal: pandas is not installed.
        """
        return self.to_pandas()

    def to_pandas(self) -> Any:
        """Return `metrics` as a new `pandas.DataFrame`.

        Raises:
            Refusal: pandas is not installed.
        """
        try:
            pandas: Any = import_module("pandas")
        except ImportError as error:
            raise Refusal("a DataFrame needs pandas: pip install pandas; .metrics is a list of dicts") from error
        return pandas.DataFrame(self.metrics)

    @cached_property
    def model(self) -> Any:
        """The trained model, loaded from `run_dir/model` when first asked for, in evaluation mode on the CPU.

        Raises:
            Refusal: the run ended early and has written no model.
        """
        from rl_backends import load_causal_lm

        return load_causal_lm(self._model_folder()).eval()

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer that was saved with the model.

        Raises:
            Refusal: the run ended early and has written no model.
        """
        from rl_backends import load_tokenizer

        return load_tokenizer(self._model_folder())

    def _model_folder(self) -> str:
        if not self._run.model.is_dir():
            raise Refusal(
                f"{self.run_dir} holds no model, since the run ended early. Continue it: "
                f"rl_launcher.resume({str(self.run_dir)!r}); or export a checkpoint: rl-launcher export "
                f"{self.run_dir} FOLDER"
            )
        return str(self._run.model)

    def __repr__(self) -> str:
        """One short screen: where the run is, what came of it, and what to look at next."""
        shown = {key: value for key, value in self.summary.items() if key.startswith(("held_out_", "pair_"))}
        shown |= {key: self.summary[key] for key in ("algorithm", "steps", "wall_s") if key in self.summary}
        if self.summary.get("interrupted"):
            shown["ended_by"] = self.summary.get("ended_by")
        lines = [f"  {key:<26} {value:.4g}" for key, value in shown.items() if isinstance(value, int | float)]
        lines += [f"  {key:<26} {value}" for key, value in shown.items() if isinstance(value, str)]
        attributes = "  .metrics  .dataframe  .model  .tokenizer  .summary  .report"
        return "\n".join([f"RunResult({str(self.run_dir)!r})", *lines, attributes])

    def _repr_html_(self) -> str:
        """What a notebook shows: the summary of the report."""
        from rl_observe.report import summary_html

        return summary_html(self._run)
