"""Inspect the Ray cluster that a run starts itself: which ports are open to whom, and where a secret can be read.

argv[1]: JSON of {"folder": of the run, "secret": value of an environment variable of the actors}.
Prints one line of JSON.
"""

import json
import os
import sys
from pathlib import Path

from rl_launcher.ray.cluster import RayRuntime
from rl_launcher.ray.placement import EnginePlace, Placement, RankPlace
from rl_launcher.schema import ClusterConfig

LISTENING = "0A"
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


class Looking:
    """What an actor says of its process."""

    def variable(self, name):
        return os.environ.get(name)


def descendants():
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def sockets_of(pid):
    try:
        links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return set()
    return {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:")}


def listening_beyond_loopback(pids):
    own = set().union(*map(sockets_of, pids))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == LISTENING and row[9] in own and row[1].split(":")[0] not in LOOPBACK]


def holds(path, secret):
    """Whether the secret is in a file; not in one that Ray has removed since it was listed."""
    try:
        return secret.encode() in path.read_bytes()
    except FileNotFoundError:
        return False


def main(task):
    placement = Placement(
        num_slots=(1,),
        device="cpu",
        colocated=True,
        ranks=(RankPlace(rank=0, node=0, slot=0),),
        engines=(EnginePlace(engine=0, slots=((0, 0),)),),
    )
    folder = Path(task["folder"])
    config = ClusterConfig(runtime="ray", env_vars={"A_SECRET": task["secret"]})
    runtime = RayRuntime.start(config, placement, run_dir=folder)
    actor = runtime.start_actor(role="trainer", index=0, node=0, slots=(0,))
    actor.make(Looking, timeout_s=60)
    session = Path(runtime._folder.path)
    files = [path for path in [*session.rglob("*"), *folder.rglob("*")] if path.is_file()]
    seen = {
        "variable": actor.call("variable", "A_SECRET", timeout_s=60),
        "written": [str(path) for path in files if holds(path, task["secret"])],
        "beyond_loopback": listening_beyond_loopback(descendants()),
        "num_processes": len(descendants()),
    }
    runtime.close()
    runtime.close()
    print(json.dumps({**seen, "session": str(session), "session_left": session.exists(), "files": len(files)}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
