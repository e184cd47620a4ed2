"""One process of two sources and two sinks that refit through files: commits, an abort, and a source that is killed.

Arguments: "source" or "sink", rank, a private directory. First through `Files`, then through `DeltaFiles`, in
whose last refit source 0 is killed before its file gets its name. Prints one line of JSON.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from files_parties import StateSink, StateSource, manifest_of, new_weights, trained

from rl_refit import Refit, RefitError, Rendezvous
from rl_refit.delta.transport import DeltaFiles
from rl_refit.transports.file_writer import FileWriter
from rl_refit.transports.files import Files

torch.set_num_threads(1)
side, rank, directory = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])


def failing(*_arguments, **_options):
    raise OSError("no room for it")


def killed(*_arguments):
    os.kill(os.getpid(), signal.SIGKILL)


def take_part(name, transport, versions):
    """Refit to each of `versions`; version 3 fails at sink 1, version 5 kills source 0."""
    ranks = {f"{side}_rank": rank}
    meeting = Rendezvous(f"file://{directory}/store", num_sources=2, num_sinks=2, name=name, **ranks)
    source = StateSource(manifest_of(2, 0), rank, new_weights(0)) if side == "source" else None
    sink = StateSink(manifest_of(2, 1), rank) if side == "sink" else None
    refit = Refit(source, sink, transport, rendezvous=meeting, deadline_s=180.0, verify="full")
    outcomes, bases, weights, expected = [], [], new_weights(0), None
    for version in versions:
        weights = trained(weights, version)
        if version == 5 and (side, rank) == ("source", 0):
            FileWriter.publish = killed
        try:
            if source is not None:
                source.weights = weights
                refit(version=version)
            else:
                sink.stage = failing if (version, rank) == (3, 1) else type(sink).stage.__get__(sink)
                refit.receive(timeout_s=180.0)
            outcomes.append("committed")
            expected = weights
        except (RefitError, OSError) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
        if sink is not None:
            assert sink.has(expected), f"the weights after version {version} are not those last committed"
        elif name == "delta":
            bases.append(transport.traffic.base)
    return {"outcomes": outcomes, "bases": bases, "version": None if sink is None else sink.version}


print(
    json.dumps(
        {
            "files": take_part("files", Files(directory / "files"), (1, 2, 3, 4)),
            "delta": take_part("delta", DeltaFiles(directory / "delta"), (1, 2, 3, 4, 5)),
        }
    )
)
