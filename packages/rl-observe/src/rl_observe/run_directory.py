"""The directory of one run: the names of its files, how it is created, and how an earlier one is opened."""

from __future__ import annotations

import errno
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_observe.recorded_steps import RecordedSteps

_REASONS = {
    errno.EACCES: "permission denied",
    errno.EPERM: "operation not permitted",
    errno.EROFS: "the file system is read-only",
    errno.ENOSPC: "no space is left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.ENAMETOOLONG: "a name in the path is too long",
    errno.ENOTDIR: "a parent of the path is a file, not a directory",
    errno.EEXIST: "a parent of the path is a file, not a directory",
    errno.ENOENT: "no directory can be created there",
}


class RunDirectoryError(ValueError):
    """A run directory that cannot be created, opened or written."""


class _Entry:
    """A file or folder of the run, by its name, with what it holds as its docstring."""

    def __init__(self, name: str, holds: str) -> None:
        self._name, self.__doc__ = name, holds

    def __get__(self, run: RunDirectory, owner: type[RunDirectory]) -> Path:
        return run.path / self._name


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of one run. Make one with `create` or `open`; the constructor checks nothing."""

    path: Path
    """The directory itself, absolute."""

    made: Path | None = field(default=None, compare=False)
    """The outermost directory that `create` had to make; None if the run directory existed already and was empty."""

    recipe = _Entry("recipe.yaml", "The settings of the run, as YAML (JSON is YAML too).")
    origins = _Entry("recipe_origins.json", "Where each key of the recipe was set, by dotted key.")
    versions = _Entry("versions.json", "Software, hardware and commit (see `collect_versions`).")
    metrics = _Entry("metrics.jsonl", "One flat JSON object per logged step (see `MetricsLog`).")
    samples = _Entry(
        "samples.jsonl", "Held-out responses before and after training, one JSON object per line (see `Sample`)."
    )
    spans = _Entry("spans.jsonl", "Start and end of each piece of work, one JSON object per line (see `SpanLog`).")
    events = _Entry(
        "events.jsonl", "Conditions that occurred and the reaction to each, one JSON object per line (see `EventLog`)."
    )
    refits = _Entry("refits.jsonl", "Every refit, one JSON object per line (see `RefitLog`).")
    prediction = _Entry("prediction.json", "What was expected of the run when it started (see `Prediction`).")
    summary = _Entry("summary.json", "The figures of the whole run, one JSON object.")
    report = _Entry("report.html", "The page that `write_report` makes of all other files.")
    recorded_steps = _Entry("steps", "The folder of recorded steps (see `StepRecorder`).")
    trace = _Entry("trace.json", "Spans and events for a trace viewer (see `write_trace`).")
    tensorboard = _Entry("tensorboard", "The folder of TensorBoard event files.")
    profile = _Entry("profile", "The folder of `torch.profiler` recordings (see `Profiler`).")
    trackers = _Entry(
        "trackers.json", "The id of the run at each tracker, so that a resumed run continues there; one JSON object."
    )
    model = _Entry("model", "The trained model, a Hugging Face folder.")
    adapter = _Entry("adapter", "The trained adapter in PEFT's format, if the run trained one; `model` has it merged.")

    @classmethod
    def create(cls, path: Path | str) -> RunDirectory:
        """Create an empty run directory, parents included, and check that it is writable.

        Raises:
            RunDirectoryError: the path is not empty, or cannot be created or written. Directories created on the
                way are removed again.
        """
        folder = Path(path).expanduser().absolute()
        created: list[Path] = []
        try:
            if not folder.is_dir() and (folder.exists() or folder.is_symlink()):
                raise RunDirectoryError(
                    f"run_dir={str(folder)!r} is a file, and a run needs a directory; "
                    f"choose another run_dir=… or delete it"
                )
            for place in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
                place.mkdir()
                created.append(place)
            if names := sorted(entry.name for entry in folder.iterdir()):
                held = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
                raise RunDirectoryError(
                    f"run_dir={str(folder)!r} exists and is not empty (it holds {held}); "
                    f"choose another run_dir=… or delete it"
                )
            # An existing directory may be read-only or on a full disk: only a written byte proves otherwise.
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(b"\0")
                probe.flush()
        except OSError as error:
            for place in reversed(created):
                place.rmdir()
            raise RunDirectoryError(
                f"run_dir={str(folder)!r} cannot be written: {describe(error)}; choose another run_dir=…"
            ) from error
        return cls(folder, made=created[0] if created else None)

    @classmethod
    def open(cls, path: Path | str) -> RunDirectory:
        """Open the directory of an earlier run.

        Raises:
            RunDirectoryError: there is no such directory, or it holds no file of a run.
        """
        run = cls(Path(path).expanduser().absolute())
        if not run.path.is_dir():
            what = "is a file" if run.path.exists() else "does not exist"
            raise RunDirectoryError(f"run_dir={str(run.path)!r} {what}; name the directory of an earlier run")
        marks = (run.recipe, run.metrics, run.summary)
        if not any(mark.is_file() for mark in marks):
            names = ", ".join(mark.name for mark in marks)
            raise RunDirectoryError(
                f"run_dir={str(run.path)!r} is not a run directory: it has none of {names}; name another directory"
            )
        return run

    @property
    def steps(self) -> RecordedSteps:
        """The recorded steps by number, those of the stage that was recorded last (see `RecordedSteps`)."""
        from rl_observe.recorded_steps import RecordedSteps

        return RecordedSteps(self)

    def discard(self) -> None:
        """Delete the run, and those of its parents that `create` made."""
        if self.made is not None:
            shutil.rmtree(self.made, ignore_errors=True)
            return
        for entry in self.path.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink()


def write_text(path: Path, text: str) -> Path:
    """Write a file of a run completely or not at all, and return its path.

    Raises:
        RunDirectoryError: the disk refused it; an earlier version of the file is still there.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise RunDirectoryError(f"{path} cannot be written: {describe(error)}") from error
    return path


def describe(error: OSError) -> str:
    """Say why the operating system refused, with the path if it named one."""
    reason = _REASONS.get(error.errno or 0, error.strerror or type(error).__name__)
    return f"{reason} ({error.filename})" if error.filename else reason
