"""The interpreter in which a dry run happens: one JSON request in, one line of JSON out.

Keeps the caller's process free of a process group and of everything that DTensor remembers.
"""

import json
import os
import sys
from typing import Any

from rl_backends.dry_run.explanation import answer_here


def main() -> None:
    """Answer the request on stdin; nothing else reaches stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    try:
        answer: dict[str, Any] = answer_here(request)
    except ValueError as refusal:  # of ours, and of what ours builds on: PlanError too
        answer = {"refused": str(refusal)}
    answers.write(f"{json.dumps(answer)}\n")
    answers.flush()


if __name__ == "__main__":
    main()
