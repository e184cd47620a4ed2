"""The commands, with a generation that cannot end before it is interrupted: its last chunk waits.

python unfinished.py CHUNKS ARGUMENTS_OF_THE_COMMAND...
"""

import contextlib
import itertools
import sys
import time
from unittest import mock

from rl_generation.cli import main
from rl_generation.transformers_engine import TransformersEngine


@contextlib.contextmanager
def last_chunk_waits(chunks, wait):
    """Meanwhile an engine calls `wait` before it answers the last of so many chunks."""
    generate, numbers = TransformersEngine.generate, itertools.count(1)

    def generate_or_wait(engine, *asked):
        if next(numbers) == chunks:
            wait()
        return generate(engine, *asked)

    with mock.patch.object(TransformersEngine, "generate", generate_or_wait):
        yield


if __name__ == "__main__":
    with last_chunk_waits(int(sys.argv[1]), lambda: time.sleep(600)):
        sys.exit(main(sys.argv[2:]))
