"""Real processes for one question: a server that imports torch and transformers once, and forks.

    caller ── server ── session (builds the model, computes the truth) ── ranks (shard, measure)

Whoever dies takes everything below along: all of them watch one pipe whose other end only the caller holds. Nothing
here knows what is measured. Works from scripts, notebooks and pytest alike: the server is a command, not a fork of the
caller, so that a caller with threads or with a GPU is no matter.
"""

import atexit
import os
import pickle
import select
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.verification.pickling import packed
from rl_parallel_plans.verification.question import Question

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
ALONE = {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false", "TORCH_CPP_LOG_LEVEL": "ERROR"}
STARTUP_S = 120.0


class Processes:
    """A server that answers one question after the other; a context manager."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="rl_parallel_plans_", ignore_cleanup_errors=True)
        self._server: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def answer(self, question: Question) -> dict[str, Any]:
        """What the session of the question returned: `{"source", "facts", ...}` or `{"failed": text}`."""
        with self._lock:
            if self._server is None or self._server.poll() is not None:
                self._start()
            assert self._server is not None
            assert self._server.stdin is not None
            assert self._server.stdout is not None
            data = packed(question)
            try:
                self._server.stdin.write(len(data).to_bytes(8, "big") + data)
                self._server.stdin.flush()
                deadline_s = STARTUP_S + question.deadline_s * (len(question.tasks) + 2)
                if not select.select([self._server.stdout], [], [], deadline_s)[0]:
                    self._kill()
                    return {"failed": f"no answer in {deadline_s:.0f} s:\n{self._log()}"}
                size = int.from_bytes(self._server.stdout.read(8), "big")
                answer = self._server.stdout.read(size)
            except BrokenPipeError:
                answer = b""
            except BaseException:  # an interrupted answer would be taken for the next one's
                self._kill()
                raise
            if not answer:
                self._kill()
                return {"failed": f"the server of the ranks died:\n{self._log()}"}
            result: dict[str, Any] = pickle.loads(answer)  # noqa: S301 - from the process started here
            return result

    def close(self) -> None:
        """End the server and everything below it."""
        self._kill()
        self._folder.cleanup()

    def _start(self) -> None:
        self._kill()
        watched, self._lifeline = os.pipe()
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            with (Path(self._folder.name) / "stderr").open("wb") as stderr:
                self._server = subprocess.Popen(  # noqa: S603 - this interpreter, our own module
                    [sys.executable, "-m", "rl_parallel_plans.verification.server", self._folder.name, str(watched)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    pass_fds=(watched,),
                    env={**os.environ, **ONE_THREAD, **ALONE, **path},
                )
        except OSError as error:
            raise PlanError(f"cannot start {sys.executable} for the ranks: {error}") from error
        finally:
            os.close(watched)

    def _kill(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        if self._server is not None:
            for stream in (self._server.stdin, self._server.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):
                        stream.close()
            self._server.kill()
            self._server.wait()
            self._server = None

    def _log(self) -> str:
        path = Path(self._folder.name) / "stderr"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""


_shared: list[Processes] = []


def shared() -> Processes:
    """The server of this process, started when first asked and ended with the process."""
    if not _shared:
        _shared.append(Processes())
        atexit.register(_shared[0].close)
    return _shared[0]
