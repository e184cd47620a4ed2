"""Whose turn it is: of two training processes one at a time computes, and each says how long a batch took it.

Both call the same reward function once a batch. There a process says what the time since its turn began was, and waits
to be told to go on: what lies between two calls is one whole step of GRPO, whoever takes it, in whatever order.
"""

import json
import os
import re
import statistics
import sys
import time

import _trl_job

from rl_launcher.quickstart import sort_digits


class Turns:
    """Speaks to the process that began this one: a line out for each batch, a line in for each turn.

    It has standard output for itself; what others print there goes to standard error.
    """

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._began: tuple[float, float] | None = None

    def over(self, **figures: float) -> None:
        """Report the turn, and wait for the next."""
        if self._began is not None:
            wall, cpu = self._began
            figures |= {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        print(json.dumps(figures), file=self._out, flush=True)
        if not sys.stdin.readline():
            raise SystemExit("nobody is there to go on for")
        self._began = time.perf_counter(), time.process_time()


SPECIAL_TOKEN = re.compile("<[a-z]+>")
TURNS: list[Turns] = []
"""One, in a process that takes turns."""


def reward(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """1 for the right answer, 0 for any other. Whole batches end a turn; the one prompt of an evaluation does not."""
    rewards = sort_digits.reward(completions, answer)
    if TURNS and len(rewards) == _trl_job.BATCH:
        lengths = [len(SPECIAL_TOKEN.sub("x", completion)) for completion in completions]  # a character is a token
        TURNS[0].over(reward=statistics.fmean(rewards), mean_length=statistics.fmean(lengths), longest=max(lengths))
    return rewards
