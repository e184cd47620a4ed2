"""`python -m rl_launcher.cluster_jobs.wait_for_nodes`: wait until all machines of a Ray cluster are there, or say which are.

Run by the templates on the head, before the recipe. It knows Ray and no scheduler.
"""

import argparse
import socket
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["main", "wait_for_nodes"]

POLL_S = 1.0


class NotJoinedError(RuntimeError):
    """A cluster that was not whole in time."""


def wait_for_nodes(num_nodes: int, *, gpus_per_node: int, deadline: float, left_in: Path | None = None) -> str:
    """Return what is there once `num_nodes` machines with `gpus_per_node` GPUs each are; Ray is connected already.

    Args:
        num_nodes: machines to wait for.
        gpus_per_node: those with fewer do not count.
        deadline: in seconds of `time.monotonic`.
        left_in: a folder in which a machine that gives up leaves a file `left-*`, which says why.

    Raises:
        NotJoinedError: they are not there at the deadline, or one gave up.
    """
    import ray

    while True:
        nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]
        if len([node for node in nodes if node["Resources"].get("GPU", 0) >= gpus_per_node]) >= num_nodes:
            return _described(nodes)
        _check_left(left_in)
        if time.monotonic() > deadline:
            raise NotJoinedError(
                f"{num_nodes} machines with {gpus_per_node} GPUs each were waited for, and there are {len(nodes)}: "
                f"{_described(nodes)}. What the others say is above, or in Ray's logs on them; a firewall between "
                f"machines, and a token that one of them does not see, look like this"
            )
        time.sleep(POLL_S)


def main(arguments: list[str] | None = None) -> None:
    """Wait, and exit 0 when all are there, 1 when not."""
    parser = argparse.ArgumentParser(prog="python -m rl_launcher.cluster_jobs.wait_for_nodes", description=__doc__)
    parser.add_argument("--address", required=True, help="host:port of the head, or auto")
    parser.add_argument("--num-nodes", type=int, required=True)
    parser.add_argument("--gpus-per-node", type=int, required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    parser.add_argument("--left-in", type=Path, help="a folder in which machines that give up leave a file left-*")
    asked = parser.parse_args(arguments)
    deadline = time.monotonic() + asked.timeout_s
    try:
        _connect(asked.address, deadline=deadline, left_in=asked.left_in)
        there = wait_for_nodes(
            asked.num_nodes, gpus_per_node=asked.gpus_per_node, deadline=deadline, left_in=asked.left_in
        )
    except NotJoinedError as error:
        sys.exit(f"rl-launcher: the cluster is not whole. {error}")
    sys.stdout.write(f"rl-launcher: {asked.num_nodes} machines are there: {there}\n")


def _connect(address: str, *, deadline: float, left_in: Path | None) -> None:
    host, _, port = address.rpartition(":")
    while host:  # Ray complains at length of a head that is not up yet
        try:
            socket.create_connection((host, int(port)), timeout=POLL_S).close()
            break
        except OSError as error:
            _check_left(left_in)
            if time.monotonic() > deadline:
                raise NotJoinedError(f"The head at {address} does not answer: {error}") from error
            time.sleep(POLL_S)
    import ray

    while True:
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error")
        except ConnectionError as error:  # its port is open before the head has registered itself
            _check_left(left_in)
            if time.monotonic() > deadline:
                raise NotJoinedError(f"The head at {address} refused: {error}") from error
            time.sleep(POLL_S)
        else:
            return


def _check_left(left_in: Path | None) -> None:
    """Raise NotJoinedError where a machine gave up."""
    if left_in is not None and (left := sorted(left_in.glob("left-*"))):
        raise NotJoinedError("; ".join(path.read_text().strip() for path in left))


def _described(nodes: list[dict[str, Any]]) -> str:
    return ", ".join(
        f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, {node['Resources'].get('GPU', 0):g} GPUs)"
        for node in nodes
    )


if __name__ == "__main__":
    main()
