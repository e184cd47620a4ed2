"""The log of a run that goes on from an earlier step: what came after that step is cut off, and kept beside it.

A killed process has logged steps of which nothing else is left; they are taken again, and no step is logged twice.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from rl_launcher.checkpointing.saving import LOGS
from rl_launcher.observe import RunDirectory, read_metrics

__all__ = ["cut_history"]

DISCARDED = ".discarded"


def cut_history(run: RunDirectory, *, logs: Mapping[str, int]) -> list[str]:
    """Cut every file of the log to the bytes that it had; return what was done, in words, [] if nothing was.

    What is cut off is appended to `NAME.discarded`. TensorBoard's files are written anew from what is left of
    `metrics.jsonl`, since nothing can be cut out of them.
    """
    cut = {name: lines for name in LOGS if (lines := _cut(run.path / name, logs.get(name, 0)))}
    if run.metrics.name in cut and run.tensorboard.is_dir():
        _rewrite_tensorboard(run)
    return [f"{lines} lines of {name} after it are in {name}{DISCARDED}" for name, lines in cut.items()]


def _cut(path: Path, num_bytes: int) -> int:
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        file.seek(num_bytes)
        rest = file.read()
        if not rest:
            return 0
        with path.with_name(path.name + DISCARDED).open("ab") as discarded:
            discarded.write(rest if rest.endswith(b"\n") else rest + b"\n")
            discarded.flush()
            os.fsync(discarded.fileno())
        file.truncate(num_bytes)
        os.fsync(file.fileno())
    return rest.count(b"\n") + (not rest.endswith(b"\n"))


def _rewrite_tensorboard(run: RunDirectory) -> None:
    # TensorBoard takes a second to import, and few runs come here.
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard import FileWriter

    files = [path for path in run.tensorboard.iterdir() if ".tfevents." in path.name]
    began = min((path.stat().st_ctime for path in files), default=0.0)
    for path in files:
        path.rename(path.with_name(DISCARDED + "-" + path.name.replace("tfevents", "discarded")))
    writer = FileWriter(str(run.tensorboard))
    for row in read_metrics(run):
        stage, step, time_s = row["stage"], int(str(row["step"])), float(str(row["time_s"]))
        values = [
            Summary.Value(tag=f"{stage}/{name}", simple_value=value)
            for name, value in row.items()
            if name not in {"stage", "step", "time_s"} and isinstance(value, int | float)
        ]
        writer.add_summary(Summary(value=values), step, walltime=began + time_s)
    writer.close()
