"""`processes.json` of a run directory: which process is who, for people with a debugger. Knows no Ray."""

import json
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl_launcher.distributed.failures import Who

__all__ = ["write_processes"]


def write_processes(run_dir: Path, processes: Iterable[Who]) -> Path:
    """Write who is there now, this process as the driver, in the place of what was written before."""
    here = {"role": "driver", "index": 0, "node": socket.gethostname(), "pid": os.getpid()}
    entries: list[dict[str, Any]] = [here]
    entries += [{"role": who.role, "index": who.index, "node": who.node, "pid": who.pid} for who in processes]
    path = run_dir / "processes.json"
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(json.dumps(entries, indent=2), encoding="utf-8")
    unfinished.replace(path)
    return path
