"""One process of two sources and two sinks that refit through files: commits, an abort, and a source that is killed.

Arguments: "source" or "sink", rank, "files" or "delta", a private directory. Prints one line of JSON.
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
side, rank, kind, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
meeting = Rendezvous(f"file://{directory}/store", num_sources=2, num_sinks=2, timeout_s=60.0, **{f"{side}_rank": rank})
transport = (Files if kind == "files" else DeltaFiles)(directory / "weights")
weights = new_weights(0)
source = StateSource(manifest_of(2, 0), rank, weights) if side == "source" else None
sink = StateSink(manifest_of(2, 1), rank) if side == "sink" else None
refit = Refit(source, sink, transport, rendezvous=meeting, deadline_s=60.0, verify="full")
outcomes, bases = [], []


def failing(*_arguments, **_options):
    raise OSError("no room for it")


def killed(*_arguments):
    os.kill(os.getpid(), signal.SIGKILL)


expected = None
for version in (1, 2, 3, 4, 5):
    weights = trained(weights, version)
    stage = None if sink is None else sink.stage
    if source is not None:
        source.weights = weights
    elif version == 3 and rank == 1:
        sink.stage = failing
    if version == 5 and side == "source" and rank == 0:
        FileWriter.publish = killed
    try:
        if source is not None:
            refit(version=version)
        else:
            refit.receive(timeout_s=60.0)
        outcomes.append("committed")
        expected = weights
    except (RefitError, OSError) as error:
        outcomes.append(f"{type(error).__name__}: {error}")
    if sink is not None:
        sink.stage = stage
        assert sink.has(expected), f"the weights after version {version} are not those last committed"
    elif kind == "delta":
        bases.append(transport.traffic.base)
print(json.dumps({"outcomes": outcomes, "bases": bases, "version": None if sink is None else sink.version}))
