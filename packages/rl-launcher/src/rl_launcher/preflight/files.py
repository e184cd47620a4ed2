"""Whether the files that a recipe names are there. Reads none of them."""

import fcntl
import tempfile
from pathlib import Path

from rl_backends.loading.files import local_folder
from rl_launcher.checkpointing.claim import NAME as CLAIM
from rl_launcher.errors import LauncherError
from rl_launcher.observe import check_trackers
from rl_launcher.observe.glossary import METRICS, metric_of
from rl_launcher.recipe.problems import nearest
from rl_launcher.recipe_schema import Recipe
from rl_launcher.user_code import is_import_string, named_code

__all__ = ["check_files", "taken"]

READABLE = {".jsonl", ".json", ".parquet"}
LOGGED_BY = {"held_out_loss": "sft", "held_out_margin": "dpo", "held_out_pair_accuracy": "dpo"}
"""Of figures that one stage alone measures, which."""


def check_files(recipe: Recipe, *, new_run: bool) -> None:
    """Refuse a model folder, a data file or a user's file that is not there, and a run directory that is.

    Raises:
        ValueError: naming the key, the file and one that is called nearly the same.
    """
    for key, text in named_code(recipe).items():
        _check_code(key, text)
    if not is_import_string(recipe.data.source):
        _check_data(recipe.data.source)
    for key, name in _models(recipe).items():
        if not is_import_string(name):
            try:
                local_folder(name)
            except ValueError as error:
                raise LauncherError(f"{key}={error}{_like(Path(name).expanduser())}") from error
    check_trackers(recipe.logger)
    _check_metric(recipe)
    if new_run:
        if (reason := taken(recipe.run_dir)) is not None:
            raise LauncherError(reason)
        _check_writable(recipe.run_dir)


def _models(recipe: Recipe) -> dict[str, str]:
    names = {"policy.model_name": recipe.policy.model_name}
    if recipe.distill is not None:
        names["distill.teacher.model_name"] = recipe.distill.teacher.model_name
    return names


def _check_metric(recipe: Recipe) -> None:
    """Refuse checkpoints that are kept for a figure which no step would log: none would be kept."""
    name = recipe.checkpointing.metric_name
    if not recipe.checkpointing.keep_top_k:
        return
    what = f"checkpointing.keep_top_k={recipe.checkpointing.keep_top_k} keeps the best by metric_name={name}, and"
    if metric_of(name) is None:
        like = nearest(name, list(METRICS))
        raise LauncherError(f"{what} no run logs that{f'; did you mean {like[0]}?' if like else ''}")
    stage = LOGGED_BY.get(name)
    if stage is not None and stage not in recipe.stages:
        raise LauncherError(f"{what} only {stage} logs that, which is not in this recipe; choose another")


def _check_code(key: str, text: str) -> None:
    place = text.rpartition(":")[0]
    if not place.endswith(".py"):
        return
    path = Path(place).expanduser()
    if not path.is_file():
        raise LauncherError(
            f"{key}={text}: there is no file {path}{_like(path) or f'; looked in {path.parent.absolute()}'}"
        )


def _check_data(source: str) -> None:
    path = Path(source).expanduser()
    is_path = path.suffix in READABLE or source.startswith((".", "/", "~"))
    if is_path and not path.exists():
        where = _like(path) or f"; looked in {path.parent.absolute()}"
        raise LauncherError(f"data.source={source}: there is no such file{where}")


def taken(run_dir: str) -> str | None:
    """Why a new run would be refused this directory; None where nothing is in it."""
    folder = Path(run_dir).expanduser()
    if not (folder.is_dir() and any(folder.iterdir())):
        return None
    if (holder := _holder(folder)) is not None:
        return f"run_dir={run_dir!r} is that of a run which {holder} is carrying out now; choose another run_dir=…"
    held = ", ".join(sorted(entry.name for entry in folder.iterdir())[:4])
    return (
        f"run_dir={run_dir!r} exists and is not empty (it holds {held}, …); choose another run_dir=… or delete it. "
        f"A run that was interrupted goes on by: rl-launcher resume {run_dir}"
    )


def _holder(folder: Path) -> str | None:
    """Who holds the claim on a run's directory; None where nobody does, as after a process that was killed."""
    try:
        with (folder / CLAIM).open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read() or "a process that has just begun"
    except OSError:  # no claim, or a file system without locks
        return None
    return None


def _check_writable(run_dir: str) -> None:
    """A folder that cannot be written would else be told to be full: `/proc` has 0 bytes free."""
    folder = Path(run_dir).expanduser().absolute()
    existing = next((parent for parent in (folder, *folder.parents) if parent.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        why = (error.strerror or type(error).__name__).lower()
        raise LauncherError(
            f"run_dir={run_dir!r} cannot be written: {existing}: {why}; choose another run_dir=…"
        ) from error


def _like(path: Path) -> str:
    """The entries beside `path` with nearly its name."""
    beside = sorted({entry.name for entry in path.parent.iterdir()} - {path.name}) if path.parent.is_dir() else []
    like = nearest(path.name, beside)
    return f"; did you mean {path.parent / like[0]}?" if like else ""
