"""Wait until all nodes have joined a Ray cluster, or report which ones have.

The scripts of cluster jobs run `python -m rl_launcher.cluster_jobs.wait_for_nodes` on the head node before the recipe.
"""

import argparse
import socket
import sys
import time
from pathlib import Path
from typing import Any

POLL_S = 1.0


class NotJoinedError(RuntimeError):
    """Not all nodes of a cluster joined in time."""


def wait_for_nodes(num_nodes: int, *, gpus_per_node: int, deadline: float, left_in: Path | None = None) -> str:
    """Wait for the nodes, and return a description of them. Ray must be connected already.

    Nodes with fewer GPUs than `gpus_per_node` do not count. `deadline` is in seconds of `time.monotonic`. In the folder
    `left_in` a node that gives up leaves a file `left-*` with the reason.

    Raises:
        NotJoinedError: the deadline has passed, or a node gave up.
    """
    import ray

    while True:
        nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]
        if len([node for node in nodes if node["Resources"].get("GPU", 0) >= gpus_per_node]) >= num_nodes:
            return _described(nodes)
        _check_left(left_in)
        if time.monotonic() > deadline:
            raise NotJoinedError(
                f"{num_nodes} nodes with {gpus_per_node} GPUs each were expected, and there are {len(nodes)}: "
                f"{_described(nodes)}. The others' messages are above, or in Ray's logs on them; the usual causes are "
                f"a firewall between the nodes, and a token that one of them cannot read"
            )
        time.sleep(POLL_S)


def main(arguments: list[str] | None = None) -> None:
    """Exit with 0 when all nodes have joined, with 1 if they have not."""
    parser = argparse.ArgumentParser(prog="python -m rl_launcher.cluster_jobs.wait_for_nodes", description=__doc__)
    parser.add_argument("--address", required=True, help="host:port of the head, or auto")
    parser.add_argument("--num-nodes", type=int, required=True)
    parser.add_argument("--gpus-per-node", type=int, required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    parser.add_argument("--left-in", type=Path, help="a folder in which nodes that give up leave a file left-*")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.timeout_s
    try:
        _connect(options.address, deadline=deadline, left_in=options.left_in)
        joined = wait_for_nodes(
            options.num_nodes, gpus_per_node=options.gpus_per_node, deadline=deadline, left_in=options.left_in
        )
    except NotJoinedError as error:
        sys.exit(f"rl-launcher: not all nodes have joined. {error}")
    sys.stdout.write(f"rl-launcher: {options.num_nodes} nodes have joined: {joined}\n")


def _connect(address: str, *, deadline: float, left_in: Path | None) -> None:
    host, _, port = address.rpartition(":")
    while True:
        try:
            if host:  # tried first, since Ray prints long errors about a head that is not up yet
                socket.create_connection((host, int(port)), timeout=POLL_S).close()
            import ray

            # May still fail: the port opens before the head has registered itself.
            ray.init(address=address, log_to_driver=False, logging_level="error")
        except OSError as error:  # Ray raises ConnectionError, which is one
            _check_left(left_in)
            if time.monotonic() > deadline:
                raise NotJoinedError(f"The head at {address} does not answer: {error}") from error
            time.sleep(POLL_S)
        else:
            return


def _check_left(left_in: Path | None) -> None:
    """Raise NotJoinedError if a node gave up."""
    if left_in is not None and (left := sorted(left_in.glob("left-*"))):
        raise NotJoinedError("; ".join(path.read_text().strip() for path in left))


def _described(nodes: list[dict[str, Any]]) -> str:
    return ", ".join(
        f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, {node['Resources'].get('GPU', 0):g} GPUs)"
        for node in nodes
    )


if __name__ == "__main__":
    main()
