"""Writes version 1 of a state dict into a directory, again and again, each time killed before another act on the disk.

The n-th attempt writes to <directory>/<n>; the last one is left alone.
"""

import itertools
import os
import signal
import sys
from pathlib import Path

import torch
from files_parties import StateSource, manifest_of, new_weights

from rl_refit.transports import file_writer
from rl_refit.transports.offline import write_version

torch.set_num_threads(1)
source = StateSource(manifest_of(1, None), 0, new_weights(1))
remaining = [0]


def counted(function):
    def act(*arguments, **options):
        remaining[0] -= 1
        if remaining[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    return act


file_writer.FileWriter.write = counted(file_writer.FileWriter.write)
os.fsync = counted(os.fsync)
Path.replace = counted(Path.replace)
Path.unlink = counted(Path.unlink)

for attempt in itertools.count(1):
    child = os.fork()
    if child == 0:
        remaining[0] = attempt
        write_version(source, Path(sys.argv[1]) / f"{attempt}", 1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
