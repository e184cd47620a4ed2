"""The process that forks a session for each question: `-m rl_parallel_plans.verification.server FOLDER LIFELINE`.

Imports what every session needs and computes nothing itself, so that there is nothing that a fork could break. Reads
questions from standard input, writes answers to standard output, both with their length before them.
"""

import os
import pickle
import shutil
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import torch

from rl_parallel_plans.errors import PlanError, UnusableModelError
from rl_parallel_plans.verification.forked import Forked, watch


def main() -> None:
    """Answer until standard input ends."""
    folder, lifeline = Path(sys.argv[1]), int(sys.argv[2])
    watch(lifeline)
    torch.set_num_threads(1)
    answers, questions = os.fdopen(os.dup(1), "wb"), sys.stdin.buffer
    os.dup2(2, 1)  # whatever a model prints is no answer
    _import_early()
    number = 0
    while (question := _read(questions)) is not None:
        home = folder / str(number)
        home.mkdir()
        answer = _session(question, home, lifeline)
        answers.write(len(answer).to_bytes(8, "big") + answer)
        answers.flush()
        shutil.rmtree(home, ignore_errors=True)
        number += 1


def _import_early() -> None:
    for name in ("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "transformers.modeling_utils"):
        with suppress(ImportError):  # the session says so, where it matters
            import_module(name)


def _read(stream: BinaryIO) -> bytes | None:
    header = stream.read(8)
    return stream.read(int.from_bytes(header, "big")) if len(header) == 8 else None


def _session(question: bytes, home: Path, lifeline: int) -> bytes:
    """The answer of a forked process, or why there is none."""

    def run() -> None:
        from rl_parallel_plans.verification.session import answer

        (home / "answer").write_bytes(pickle.dumps(_safely(lambda: answer(question, home, lifeline))))

    session = Forked(run, log=home / "session.log", lifeline=lifeline)
    status = session.wait()
    path = home / "answer"
    if status or not path.exists():
        return pickle.dumps({"failed": f"the session ended with {status or 'no answer'}:\n{session.tail()}"})
    return path.read_bytes()


def _safely(answer: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return answer()
    except Exception as error:  # noqa: BLE001 - whatever a model of somebody else raises
        return {
            "failed": f"{type(error).__name__}: {error}",
            "refused": isinstance(error, PlanError),
            "unusable": isinstance(error, UnusableModelError),
            "traceback": traceback.format_exc(),
        }


if __name__ == "__main__":
    main()
