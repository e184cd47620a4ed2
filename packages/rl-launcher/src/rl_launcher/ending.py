"""How a run ends: its model, or what can be saved of one that ends early; then summary, trackers and report.

What ends a run early has a name (`rl_launcher.health.CONDITIONS`), and its message says how to go on.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from rl_launcher.checkpointing import CheckpointError, Keeper, find_latest, save_in_a_step
from rl_launcher.checkpointing.exporting import fill_folder
from rl_launcher.checkpointing.files import appearing, write_text
from rl_launcher.checkpointing.space import describe_space
from rl_launcher.errors import RestartableError, RunStoppedError
from rl_launcher.health import Reporter, is_disk_full, name_of, reaction_to
from rl_launcher.observe import RunDirectory, RunLog, write_report
from rl_launcher.parts import Parts

__all__ = ["conclude", "end_early", "save_adapter", "save_model", "weights_lost"]


def weights_lost(error: BaseException) -> bool:
    """Whether there is nothing left in memory that could be saved."""
    return isinstance(error, RestartableError) and error.weights_lost


def save_model(parts: Parts, folder: Path) -> None:
    """Write model and tokenizer as one Hugging Face folder, whole or not at all."""
    with appearing(folder) as unfinished:
        fill_folder(unfinished, policy=parts.policy, tokenizer=parts.tokenizer)


def save_adapter(parts: Parts, folder: Path, *, base_model_name: str) -> None:
    """Write the adapters in PEFT's format, before the model that they are merged in; nothing, where there are none.

    One that is there is of an end that was killed before it wrote the model.
    """
    if parts.selection.adapters is None:
        return
    shutil.rmtree(folder, ignore_errors=True)
    policy: Any = parts.policy  # a backend with adapters, or the ranks that have them
    policy.save_adapter(folder, base_model_name=base_model_name)


def end_early(
    error: BaseException,
    *,
    directory: RunDirectory,
    parts: Parts,
    keeper: Keeper,
    events: Reporter,
    at_once: bool,
) -> RunStoppedError:
    """Save where the run stands, and say how to go on, or that nothing could be saved."""
    name, progress = name_of(error), keeper.progress
    cause = _cause(error)
    if is_disk_full(error):
        cause += f". {describe_space(directory.path)}: free some, or start again with run_dir on another disk"
    rest = _saved(directory, parts, keeper, lost=at_once or weights_lost(error))
    events.report(name, cause, reaction=reaction_to(name), stage=progress.stage, step=progress.step)
    stopped = RunStoppedError(
        f"{cause}\n{rest}", interrupted=name == "interrupted", to_be_resumed=name == "must_save_by"
    )
    stopped.__cause__ = error
    return stopped


def conclude(
    directory: RunDirectory, summary: dict[str, Any], *, log: RunLog, events: Reporter, failed: bool
) -> list[str]:
    """Write summary and report, and let the trackers go; what cannot be written is told, and takes nothing away."""
    status = "interrupted" if summary["ended_by"] in {"interrupted", "must_save_by"} else "failed"
    unwritten = list(events.unwritten)

    def finish() -> None:
        summary.update(log.finish(summary, status=status if failed else "finished"))  # type: ignore[arg-type]

    def write() -> None:
        write_text(directory.summary, json.dumps(log.secrets.scrub(summary), indent=2))

    for action in (finish, write, lambda: write_report(directory)):
        try:
            action()
        except (OSError, ValueError) as error:
            unwritten.append(str(error))
    return unwritten


def _saved(directory: RunDirectory, parts: Parts, keeper: Keeper, *, lost: bool) -> str:
    """Save what can be gone on from, or else the weights; return what there is now, and how to go on."""
    progress, again = keeper.progress, f"rl-launcher resume {directory.path}"
    exact = not lost and progress.version == parts.policy.version
    try:
        if exact and progress.total:
            keeper.save()
            return (
                f"Saved after {parts.policy.version} optimizer steps; weights, log and report are in {directory.path}. "
                f"Go on with: {again}"
            )
        if (latest := find_latest(directory)) is not None:
            return f"The newest whole checkpoint is {latest.folder.name}, {latest.describe()}. Go on with: {again}"
        if lost or exact:
            return f"No checkpoint was saved. Begin anew with: {again}"
        folder = save_in_a_step(progress, parts, directory)
    except Exception as second:  # noqa: BLE001 - the first cause is what the user must hear
        return f"The weights could NOT be saved: {second}{_left(directory)}"
    return (
        f"It ended in the middle of a batch of rollouts, from where no run goes on exactly, and before its first "
        f"checkpoint (checkpointing.save_period). The weights of that moment are in {folder}. Start from them: "
        f"rl-launcher export {folder} FOLDER, then policy.model_name=FOLDER sft=null run_dir=<another>"
    )


def _left(directory: RunDirectory) -> str:
    """What was saved before something could not be."""
    try:
        latest = find_latest(directory)
    except CheckpointError as error:
        return f". {error}"
    if latest is None:
        return ""
    return f". {latest.folder.name}, {latest.describe()}, is whole. Go on with: rl-launcher resume {directory.path}"


def _cause(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"stopped: {error}" if isinstance(error, ValueError | RuntimeError) else f"failed: {error!r}"
