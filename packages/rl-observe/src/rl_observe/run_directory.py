"""The folder of one run: where each of its files lies, how the folder is made, and how it is found again.

It knows names and places. It does not know what any file holds; `metrics` and `report` do.

    recipe.yaml   metrics.jsonl   samples.jsonl   summary.json   versions.json   report.html   recipe_origins.json
    spans.jsonl   events.jsonl    refits.jsonl    trackers.json  trace.json
    tensorboard/  profile/        model/ (a Hugging Face folder)
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["RunDirectory", "RunDirectoryError"]

_REASONS = {
    errno.EACCES: "permission denied",
    errno.EPERM: "the operation is not permitted here",
    errno.EROFS: "the file system is read-only",
    errno.ENOSPC: "no space is left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.ENAMETOOLONG: "a name in the path is too long",
    errno.ENOTDIR: "a file stands where a folder has to be",
    errno.EEXIST: "a file stands where a folder has to be",
    errno.ENOENT: "no folder can be made there",
}


class RunDirectoryError(ValueError):
    """A run directory that cannot be made, found or written."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of one run. Make one with `create` or `open`, which check what the constructor does not."""

    path: Path
    """The folder itself, absolute."""

    made: Path | None = field(default=None, compare=False)
    """The outermost folder that `create` made for it; None where the folder was there already, and empty."""

    @classmethod
    def create(cls, path: Path | str) -> RunDirectory:
        """Make an empty run directory, parents included, and prove that it can be written.

        Raises:
            RunDirectoryError: something is there already, or the folder cannot be made or written. Then no
                folder made on the way is left behind.
        """
        folder = _absolute(path)
        try:
            missing = [each for each in (folder, *folder.parents) if not each.exists()]
            _refuse_what_is_there(folder)
            _make_writable_folder(folder)
        except OSError as error:
            raise RunDirectoryError(
                f"run_dir={str(folder)!r} cannot be written: {describe(error)}; choose another run_dir=…"
            ) from error
        return cls(folder, made=missing[-1] if missing else None)

    def discard(self) -> None:
        """Remove the run, and of the folders around it only those that `create` made."""
        if self.made is not None:
            shutil.rmtree(self.made, ignore_errors=True)
            return
        for entry in self.path.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink()

    @classmethod
    def open(cls, path: Path | str) -> RunDirectory:
        """Find the directory of an earlier run.

        Raises:
            RunDirectoryError: there is no such folder, or no file of a run is in it.
        """
        run = cls(_absolute(path))
        if not run.path.is_dir():
            what = "is a file" if run.path.exists() else "does not exist"
            raise RunDirectoryError(f"run_dir={str(run.path)!r} {what}; name the folder of an earlier run")
        marks = (run.recipe, run.metrics, run.summary)
        if not any(mark.is_file() for mark in marks):
            names = ", ".join(mark.name for mark in marks)
            raise RunDirectoryError(
                f"run_dir={str(run.path)!r} is not the folder of a run: it holds none of {names}; name another folder"
            )
        return run

    @property
    def recipe(self) -> Path:
        """The resolved recipe, as YAML."""
        return self.path / "recipe.yaml"

    @property
    def metrics(self) -> Path:
        """One flat JSON object a line, one line a logged step."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard event files."""
        return self.path / "tensorboard"

    @property
    def samples(self) -> Path:
        """Held-out answers before and after training, one JSON object a line."""
        return self.path / "samples.jsonl"

    @property
    def spans(self) -> Path:
        """What was done when, one JSON object a span (see `SpanLog`)."""
        return self.path / "spans.jsonl"

    @property
    def events(self) -> Path:
        """Conditions that occurred, and what was done about each, one JSON object a line (see `EventLog`)."""
        return self.path / "events.jsonl"

    @property
    def refits(self) -> Path:
        """Every refit, one JSON object a line (see `RefitLog`)."""
        return self.path / "refits.jsonl"

    @property
    def trackers(self) -> Path:
        """Under which names the trackers know the run, so that a resumed one goes on there; one JSON object."""
        return self.path / "trackers.json"

    @property
    def origins(self) -> Path:
        """Where each key of the recipe was written; one JSON object."""
        return self.path / "recipe_origins.json"

    @property
    def trace(self) -> Path:
        """The spans and the events, for a trace viewer (see `write_trace`)."""
        return self.path / "trace.json"

    @property
    def profile(self) -> Path:
        """The folder of what `torch.profiler` recorded (see `Profiler`)."""
        return self.path / "profile"

    @property
    def summary(self) -> Path:
        """The figures of the whole run, one JSON object."""
        return self.path / "summary.json"

    @property
    def versions(self) -> Path:
        """What the run was made with, one JSON object (see `collect_versions`)."""
        return self.path / "versions.json"

    @property
    def model(self) -> Path:
        """The trained model, a Hugging Face folder."""
        return self.path / "model"

    @property
    def adapter(self) -> Path:
        """The trained adapter in PEFT's format, of a run that trains adapters; merged it is `model`."""
        return self.path / "adapter"

    @property
    def report(self) -> Path:
        """The page that `write_report` makes of all the rest."""
        return self.path / "report.html"


def describe(error: OSError) -> str:
    """Say in words why the operating system refused, with the path that it named."""
    reason = _REASONS.get(error.errno or 0, error.strerror or type(error).__name__)
    return f"{reason} ({error.filename})" if error.filename else reason


def _absolute(path: Path | str) -> Path:
    return Path(path).expanduser().absolute()


def _refuse_what_is_there(folder: Path) -> None:
    if folder.is_dir():
        names = sorted(entry.name for entry in folder.iterdir())
        if names:
            some = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            raise RunDirectoryError(
                f"run_dir={str(folder)!r} exists and is not empty (it holds {some}); "
                f"choose another run_dir=… or delete it"
            )
    elif folder.exists() or folder.is_symlink():
        raise RunDirectoryError(
            f"run_dir={str(folder)!r} is a file, and a run needs a folder; choose another run_dir=… or delete it"
        )


def _make_writable_folder(folder: Path) -> None:
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    made: list[Path] = []
    try:
        for place in reversed(missing):
            place.mkdir()
            made.append(place)
        # A folder that exists may still be read-only or full: only a byte that reaches it proves otherwise.
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0")
            probe.flush()
    except OSError:
        for place in reversed(made):
            place.rmdir()
        raise
