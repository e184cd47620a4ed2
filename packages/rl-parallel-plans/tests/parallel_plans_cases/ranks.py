"""Start processes over gloo, run one function in each, bring back what they return.

One helper process imports torch and transformers once and forks the ranks of each case from itself: a case costs
a fraction of a second instead of one interpreter start per rank.
"""

import json
import os
import subprocess
import sys
from pathlib import Path


class Ranks:
    """Runs cases; a context manager, so that its helper process ends with the tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.helper: subprocess.Popen[str] | None = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.helper is not None:
            self.helper.stdin.close()
            self.helper.wait(timeout=240)
            self.helper.stdout.close()

    def __call__(self, case: str, world: int, **arguments) -> list:
        """What `cases.<case>(**arguments)`, or `<module>.<function>` for "module:function", returned on each rank."""
        if self.helper is None:
            self.helper = self._start()
        self.helper.stdin.write(json.dumps({"case": case, "world": world, "arguments": arguments}) + "\n")
        self.helper.stdin.flush()
        answer = self.helper.stdout.readline()
        if not answer:
            raise RuntimeError(f"the helper process died:\n{self._log()}")
        answer = json.loads(answer)
        if "failed" in answer:
            raise RuntimeError(f"{case} on {world} ranks: {answer['failed']}\n{self._log()}")
        return answer["results"]

    def _start(self):
        one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with (self.folder / "stderr").open("w") as stderr:
            return subprocess.Popen(
                [sys.executable, "-m", "parallel_plans_cases.server", str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, **one_thread, **path},
            )

    def _log(self) -> str:
        return (self.folder / "stderr").read_text()[-4000:]
