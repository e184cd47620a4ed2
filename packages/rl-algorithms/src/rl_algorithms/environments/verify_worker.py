"""The process that judges what may take for ever: mathematics and patterns. A script: `workers.py` starts it.

Imports nothing of this package. Reads a request a line, writes a reply a line. Python's recursion, memory and time may
all run out in a request; then the reply says so, or the process dies and the parent notices.
"""

import importlib
import json
import logging
import math
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

PARSED_CHARACTERS = 2_000  # of an answer that nobody marked: enough for a last sentence with its formula


def main() -> None:
    """Answer requests until there are no more."""
    memory_bytes, timeout_s = int(sys.argv[1]), float(sys.argv[2])
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no reply
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    logging.disable(logging.CRITICAL)
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "import":
            reply = _imported(request["what"])
        else:
            # Whoever started this may be gone, and nobody left to keep the deadline; the alarm ends the process.
            signal.alarm(math.ceil(timeout_s) + 1)
            reply = _answered(request)
            signal.alarm(0)
        out.write(json.dumps(reply) + "\n")
        out.flush()


def _imported(what: str) -> dict[str, Any]:
    if what == "math":
        try:
            importlib.import_module("math_verify")  # optional, and without types
        except ImportError as error:
            return {"died": f"math-verify cannot be imported ({error}); pip install 'rl-algorithms[math]'"}
    return {"ready": True}


def _answered(request: dict[str, Any]) -> dict[str, Any]:
    tasks: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"regex": _regex, "math": _math}
    try:
        return tasks[request["do"]](request)
    except (Exception, RecursionError, MemoryError) as error:  # noqa: BLE001 - whatever a parser does to strange text
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def _regex(request: dict[str, Any]) -> dict[str, Any]:
    return {"matches": re.fullmatch(request["pattern"], request["text"]) is not None}


def _math(request: dict[str, Any]) -> dict[str, Any]:
    math_verify: Any = importlib.import_module("math_verify")
    # None: math-verify's own deadlines are signals, and ours is kept outside.
    gold = math_verify.parse(_boxed(request["gold"]), parsing_timeout=None)
    text = _boxed(request["answer"]) if request["marked"] else request["answer"][-PARSED_CHARACTERS:]
    answer = math_verify.parse(text, parsing_timeout=None)
    return {
        "same": bool(math_verify.verify(gold, answer, timeout_seconds=None)),
        "gold": bool(gold),
        "answer": bool(answer),
    }


def _boxed(text: str) -> str:
    return "\\boxed{" + text.strip().strip("$").strip() + "}"


if __name__ == "__main__":
    main()
