"""Writes version 1 of a state dict into a directory, and is killed before its n-th act on the disk; prints how many."""

import os
import signal
import sys
from pathlib import Path

from files_parties import StateSource, manifest_of, new_weights

from rl_refit.transports import file_writer
from rl_refit.transports.offline import write_version

directory, last_act = Path(sys.argv[1]), int(sys.argv[2])
acts = 0


def counted(function):
    def act(*arguments, **options):
        global acts
        acts += 1
        if acts == last_act:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    return act


file_writer.FileWriter.write = counted(file_writer.FileWriter.write)
os.fsync = counted(os.fsync)
Path.replace = counted(Path.replace)
Path.unlink = counted(Path.unlink)

write_version(StateSource(manifest_of(1, None), 0, new_weights(1)), directory, 1)
print(acts)
