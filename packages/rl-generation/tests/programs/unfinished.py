"""The commands, with a generation that cannot end before it is interrupted: its last batch waits.

python unfinished.py BATCHES ANSWERS_OF_A_BATCH ARGUMENTS_OF_THE_COMMAND...
"""

import contextlib
import itertools
import sys
import time
from unittest import mock

from rl_generation.cli import main
from rl_generation.commands import generate as generate_command
from rl_generation.transformers_engine import TransformersEngine


@contextlib.contextmanager
def last_batch_waits(batches, size, wait):
    """Meanwhile the command asks for `size` answers at once, and an engine waits before the last of so many batches."""
    generate, numbers = TransformersEngine.generate, itertools.count(1)

    def generate_or_wait(engine, *asked):
        if next(numbers) == batches:
            wait()
        return generate(engine, *asked)

    with (
        mock.patch.object(generate_command, "BATCH_ANSWERS", size),
        mock.patch.object(TransformersEngine, "generate", generate_or_wait),
    ):
        yield


if __name__ == "__main__":
    with last_batch_waits(int(sys.argv[1]), int(sys.argv[2]), lambda: time.sleep(600)):
        sys.exit(main(sys.argv[3:]))
