"""What calls the functions of an answer's code, inside the limits. A script: `code.py` hands its text to a `Runner`.

Imports nothing of this package. Reads `{"code", "tests", "nonce"}` from standard input, runs the code once as a module
that is not `__main__`, then every test, and prints a line a test: the nonce and what came of it. What the code itself
prints goes nowhere. The expected values are not here, so that code which looks around does not find them; an `assert`
cannot be hidden like that, and is only held to be reached.
"""

import io
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Run the code and its tests."""
    request = json.load(sys.stdin)
    report = os.fdopen(os.dup(1), "w")
    sys.stdin = io.StringIO("")
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - for the life of the process
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    try:
        exec(compile(request["code"], "solution.py", "exec"), module.__dict__)  # noqa: S102 - what this is for
        broken = None
    except BaseException as error:  # noqa: BLE001 - the code may raise what it likes, SystemExit included
        broken = _described(error)
    for number, test in enumerate(request["tests"]):
        outcome = {"error": broken} if broken else _outcome(test, module)
        report.write(f"\n{request['nonce']} {json.dumps({'test': number, **outcome})}\n")
        report.flush()
    report.flush()
    os._exit(0)  # what the code registered to run at the end, or left running, is of no interest


def _outcome(test: dict[str, Any], module: types.ModuleType) -> dict[str, Any]:
    try:
        if "statements" in test:
            exec(compile(test["statements"], "test.py", "exec"), module.__dict__)  # noqa: S102
            return {"passed": True}
        value = _function(test["function"], module)(*test["args"], **test["kwargs"])
        return {"value": json.loads(json.dumps(value))}
    except BaseException as error:  # noqa: BLE001 - as above
        return {"error": _described(error)}


def _function(name: str, module: types.ModuleType) -> Callable[..., Any]:
    found: Callable[..., Any] | None = getattr(module, name, None)
    if found is None and hasattr(module, "Solution"):  # where exercises ask for a method of such a class
        found = getattr(module.Solution(), name, None)
    if found is None:
        raise NameError("the code defines no function " + name)
    return found


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:300]
    except BaseException:  # noqa: BLE001 - even that is the code's own
        return type(error).__name__


if __name__ == "__main__":
    main()
