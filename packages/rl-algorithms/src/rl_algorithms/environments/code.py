r"""A code verifier: run the program in a response against the tests of its row.

THE PROGRAM RUNS UNDER RESOURCE LIMITS, WHICH ARE NOT A SECURITY BOUNDARY: see `sandbox.py`. Pass your own `Runner` for
programs that you would not run yourself.

Column `tests` holds a list, or the same as JSON text; each test is one of

    {"input": "3 4\n", "output": "7\n"}                  a program: standard input and output, blanks at line ends apart
    {"function": "add", "args": [3, 4], "expected": 7}   a function, or a method of a class `Solution`; JSON values
    "assert add(3, 4) == 7"                              statements that must not raise

A test that is none of these (JSON cut off, arguments that are no list, statements that this Python cannot compile) is a
failure of the data, and not of the response. Expected outputs and values are compared here and never reach the
program. Statements do, and code that is out to deceive could pass them without being right; prefer the other two.
"""

import contextlib
import functools
import json
import math
import secrets
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from rl_algorithms.choices import check_fields
from rl_algorithms.data.fields import parse_json
from rl_algorithms.environments.answers import Extract, code_block
from rl_algorithms.environments.sandbox import PROBE_S, Execution, Limits, Runner, SandboxError, check_runs, run_python
from rl_algorithms.environments.scores import Score, takes_text

__all__ = ["CodeTests", "code_tests"]

COMPILING = threading.Lock()  # what ignores warnings does so for every thread


@dataclass(slots=True, kw_only=True)
class CodeTests:
    """A reward function: 1 for an answer whose program passes all of the row's `tests`, else 0; None without tests.

    Its scores have metrics: `tests_passed` is the share of tests that passed, `timed_out` is 1 where a deadline passed.
    A runner that cannot run the program is a failure and no 0.
    """

    limits: Limits = field(default_factory=Limits)
    """Of each program: one for every test with an input, and one for all others together."""

    sample_timeout_s: float = 60.0
    """Seconds for all tests of an answer; those that it leaves no time for have not passed."""

    partial: bool = False
    """True rewards the share of tests that passed. It also rewards a program for passing the easy ones."""

    num_workers: int = 1
    """How many answers are tested at once."""

    extract: Extract = code_block
    """How the program is found in the answer. Where it gives None, the whole answer is the program."""

    runner: Runner = run_python
    """What runs programs; `run_python` runs them on this machine, under limits and without a security boundary."""

    takes_text: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fields(self, infinite=("sample_timeout_s",))
        for name in ("sample_timeout_s", "num_workers"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be > 0")

    def __call__(self, completions: Sequence[str], tests: Sequence[object]) -> list[Score | None]:
        """One score per answer.

        Raises:
            CannotJudgeError: this machine runs no program at all under these limits.
        """
        if self.runner is run_python and any(column is not None for column in tests):
            check_runs(replace(self.limits, wall_s=PROBE_S))
        pairs = list(zip(completions, tests, strict=True))
        if self.num_workers == 1 or len(pairs) < 2:
            return [self._score(*pair) for pair in pairs]
        with ThreadPoolExecutor(max_workers=min(self.num_workers, len(pairs))) as threads:
            return list(threads.map(lambda pair: self._score(*pair), pairs))

    def _score(self, text: str, column: object) -> Score | None:
        if column is None:
            return None
        try:
            tests = _parse(column)
        except (ValueError, TypeError, RecursionError) as error:
            return Score.failure(f"column 'tests' cannot be used: {error}")
        source = self.extract(text)
        try:
            passed, timed_out = self._passed(text if source is None else source, tests)
        except SandboxError as error:
            return Score.failure(f"the program could not be run: {error}")
        share = sum(passed) / len(tests)
        metrics = {"tests_passed": share, "timed_out": float(timed_out)}
        return Score(share if self.partial else float(all(passed)), metrics=metrics)

    def _passed(self, source: str, tests: Sequence[Mapping[str, Any]]) -> tuple[list[bool], bool]:
        """Which tests passed, and whether a deadline did."""
        deadline = time.monotonic() + self.sample_timeout_s
        passed, timed_out = [False] * len(tests), False
        called = [index for index, test in enumerate(tests) if "input" not in test]
        if called:
            some, timed_out = self._called(source, [tests[index] for index in called], deadline)
            for index, verdict in zip(called, some, strict=True):
                passed[index] = verdict
        for index, test in enumerate(tests):
            # One failure decides where nothing is given for the others, and a program that hangs is asked once.
            if "input" not in test or (not self.partial and (timed_out or not all(passed[:index]))):
                continue
            execution = self._run(source, test["input"], deadline)
            timed_out |= execution is None or execution.ending == "timeout"
            passed[index] = (
                execution is not None and execution.succeeded and _lines(execution.stdout) == _lines(test["output"])
            )
        return passed, timed_out

    def _called(self, source: str, tests: Sequence[Mapping[str, Any]], deadline: float) -> tuple[list[bool], bool]:
        nonce = secrets.token_hex(16)  # so that what the code prints is no report
        hidden = [{key: value for key, value in test.items() if key != "expected"} for test in tests]
        request = json.dumps({"code": source, "tests": hidden, "nonce": nonce})
        execution = self._run(_harness(), request, deadline)
        if execution is None:
            return [False] * len(tests), True
        reports: dict[int, dict[str, Any]] = {}
        for line in execution.stdout.split("\n"):
            if line.startswith(nonce):
                with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):  # cut off by a limit
                    report = json.loads(line[len(nonce) :])
                    reports[report["test"]] = report
        verdicts = [_agrees(test, reports.get(number, {})) for number, test in enumerate(tests)]
        return verdicts, execution.ending == "timeout"

    def _run(self, source: str, stdin: str, deadline: float) -> Execution | None:
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        return self.runner(source, stdin=stdin, limits=replace(self.limits, wall_s=min(self.limits.wall_s, left)))


@takes_text
def code_tests(completions: Sequence[str], tests: Sequence[object]) -> list[Score | None]:
    """`CodeTests()` as a plain function, to be named in a recipe."""
    return CodeTests()(completions, tests)


@functools.cache
def _harness() -> str:
    return Path(__file__).with_name("code_harness.py").read_text()


def _parse(column: object) -> list[dict[str, Any]]:
    """The tests of a row in one form."""
    if isinstance(column, str):
        column = _parse_text(column)
    tests = [column] if isinstance(column, Mapping) else column
    if not isinstance(tests, Sequence) or isinstance(tests, str | bytes) or not tests:
        raise ValueError(f"it must be a list of tests that is not empty, or that as JSON; found {column!r:.80}")
    return [_parse_one(test, number) for number, test in enumerate(tests)]


def _parse_text(text: str) -> object:
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        if text.lstrip().startswith(("[", "{")):
            raise ValueError(f"it starts like JSON but cannot be parsed ({error}): {text[:80]!r}") from error
        return [text]  # statements


def _parse_one(test: object, number: int) -> dict[str, Any]:
    """One test in its form. What is wrong with it is the data's fault, and must not look like a wrong answer."""
    if isinstance(test, str):
        _check_statements(test, number)
        return {"statements": test}
    # Arrow gives every test the keys of any: None is then what was never there.
    given = {name for name, value in test.items() if value is not None} if isinstance(test, Mapping) else set()
    if isinstance(test, Mapping) and {"input", "output"} <= given:
        return {name: _stream(test[name], name, number) for name in ("input", "output")}
    if isinstance(test, Mapping) and "function" in given and "expected" in test:
        called = {"args": [], "kwargs": {}, **{name: test[name] for name in given & {"function", "args", "kwargs"}}}
        for name, kinds in {"function": (str,), "args": (list, tuple), "kwargs": (dict,)}.items():
            if not isinstance(called[name], kinds):
                raise TypeError(f"test {number}: {name!r} must be a {kinds[0].__name__}, found {called[name]!r:.80}")
        try:
            json.dumps(called)
            return {**called, "expected": json.loads(json.dumps(test["expected"], allow_nan=False))}
        except (ValueError, TypeError) as error:
            raise ValueError(f"test {number} has what is no JSON value: {error}") from error
    raise ValueError(
        f"test {number} must be statements, an object with 'input' and 'output', or one with 'function', 'args' and "
        f"'expected'; found {test!r:.80}"
    )


def _check_statements(test: str, number: int) -> None:
    try:
        with COMPILING, warnings.catch_warnings(action="ignore"):
            compile(test, "test.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError) as error:
        raise ValueError(f"test {number} is no Python: {error}: {test[:80]!r}") from error


def _stream(value: object, name: str, number: int) -> str:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise TypeError(f"test {number}: {name!r} must be text, found {type(value).__name__} {value!r:.80}")
    return str(value)


def _agrees(test: Mapping[str, Any], report: Mapping[str, Any]) -> bool:
    if "statements" in test:
        return report.get("passed") is True
    try:
        return "value" in report and _equal(report["value"], test["expected"])
    except (OverflowError, RecursionError):  # an integer that no float holds; lists in lists in lists
        return False


def _equal(value: Any, expected: Any) -> bool:
    """JSON values, floats to six digits; True is not 1."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, int | float) and isinstance(expected, int | float):
        return value == expected or math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9)
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_equal, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_equal(value[key], expected[key]) for key in value)
    return bool(value == expected)


def _lines(text: str) -> list[str]:
    """Lines without blanks at their ends, nor empty ones at the text's."""
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines
