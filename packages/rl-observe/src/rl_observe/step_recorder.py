"""Record steps beside a training loop: in a process of its own, which writes them and looks for causes of trouble.

    recorder = StepRecorder(run, RecordedStepsConfig(last=4, every=100, around_events=2))
    recorder.record("grpo", 120, StepRollouts(tokens=..., lengths=..., ...), updates=[...])
    recorder.close()

A thread of the loop's process sends each step through a pipe, as JSON and the bytes of its arrays. What takes time is
done at the other end, where it holds no lock of the loop's Python: `RecordedStep.of`, removing credentials, the bundle,
`monitor_step`, and deleting what need not be kept. That process never imports torch, and ends when the pipe does: also
when the loop was killed, and then it writes the step that it has. One step is written at a time: a loop that is faster
than the disk waits, and no step is left out.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import IO, Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rl_observe.config import RecordedStepsConfig
from rl_observe.diagnose import Finding, mismatch_of, monitor_step
from rl_observe.log_files import read_json_lines
from rl_observe.recorded_steps import (
    TEXTS_OF_ROWS,
    RecordedStep,
    RecordedStepError,
    StepRollouts,
    TrainedRows,
    bundles,
    plain,
)
from rl_observe.redaction import Secrets
from rl_observe.run_directory import RunDirectory, describe

__all__ = ["StepRecorder", "write_steps"]

_NO_ARRAYS = {*TEXTS_OF_ROWS, "component_names", "figures", "pieces", "trained"}
_ARRAYS = [each.name for each in fields(StepRollouts) if each.name not in _NO_ARRAYS]
_SIZES = struct.Struct("<QQ")
"""Before each message: bytes of its JSON, and of its arrays."""

ORPHAN_POLL_S = 1.0
"""How often the process that writes looks whether its parent lives."""

Array: TypeAlias = NDArray[Any]


class StepRecorder:
    """Write recorded steps in a process of its own, and delete those that need not be kept.

    One step is written at a time: `record` waits until the step before it is on disk, so that a process that is killed
    loses at most the step that is being written. The process that writes starts with the first step, and again if it
    was killed; the step that it had is then told as unwritten.

    Args:
        run: whose directory they go to.
        config: which steps are kept, and how many bytes they may take.
        secrets: credentials to remove from all texts.
        decode: token ids to text, such as `tokenizer.decode`; each id is decoded once, for viewers.
        warn: called if a step could not be written; the run continues.
        on_finding: called, in another thread, with the stage and each cause of trouble that `monitor_step` finds in a
            step, once per cause; the steps around it are kept. None checks nothing.
    """

    def __init__(
        self,
        run: RunDirectory,
        config: RecordedStepsConfig | None = None,
        *,
        secrets: Secrets | None = None,
        decode: Callable[[list[int]], str] | None = None,
        warn: Callable[[str], object] | None = None,
        on_finding: Callable[[str, Finding], object] | None = None,
    ) -> None:
        self.config = config or RecordedStepsConfig()
        self.decode, self.on_finding = decode, on_finding
        self._found: set[str] = set()
        self._folder, self._secrets, self._warn = run.recorded_steps, secrets or Secrets(), warn
        self._events: set[tuple[str, int]] = set()
        for row in read_json_lines(run.events)[0] if run.events.exists() else []:
            self.keep_around(row.get("stage"), row.get("step"))
        self._waiting: queue.Queue[tuple[dict[str, Any], StepRollouts | Callable[[], StepRollouts]] | None] = (
            queue.Queue(maxsize=1)
        )
        self._thread: threading.Thread | None = None
        self._last_s, self._pause_s = time.monotonic(), 0.0
        self._writer: _Writer | None = None
        self.unwritten: list[str] = []
        """Why steps could not be written, one entry per step."""

    @property
    def enabled(self) -> bool:
        """Whether any step is kept."""
        return self.config.last > 0 or self.config.every > 0

    def record(
        self,
        stage: str,
        step: int,
        rollouts: StepRollouts | Callable[[], StepRollouts],
        *,
        updates: Sequence[Mapping[str, object]] = (),
        about: Mapping[str, object] | None = None,
    ) -> None:
        """Record one step. Arrays must not be changed afterwards: they are read in another thread.

        Args:
            stage: the stage of the step, such as `grpo`.
            step: its number, from 1; with several updates on the same rollouts the number of the last.
            rollouts: what was trained on, or a function that returns it, which is called in the other thread.
            updates: the optimizer steps on these rollouts in their order, as plain data; usual keys are `step`, `loss`,
                `grad_norm`, `learning_rate`, `error`.
            about: whatever else is known, as plain data: `version`, `sampling`, `objective`, `seeds`, `timings`.
        """
        if not self.enabled:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._hand_over_all, name="recorded-steps", daemon=True)
            self._thread.start()
        self._waiting.join()
        now = time.monotonic()
        self._pause_s = min(0.01, (now - self._last_s) / 20)
        self._last_s = now
        data = {"stage": stage, "step": step, "updates": list(updates), "about": dict(about or {})}
        self._waiting.put((data, rollouts))

    def keep_around(self, stage: object, step: object) -> None:
        """Keep the steps around an event at `step` of `stage`; without a step nothing is kept."""
        if isinstance(stage, str) and isinstance(step, int):
            self._events.add((stage, step))

    def discard_after(self, stage: str, step: int) -> None:
        """Delete the recorded steps of `stage` after `step`, which a resumed run is going to take again."""
        for each in bundles(self._folder):
            if each.stage == stage and each.step > step:
                each.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Wait until everything is written; a second call does nothing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._waiting.put(None)
            thread.join()

    def _hand_over_all(self) -> None:
        while (given := self._waiting.get()) is not None:
            # The loop's own Python goes first: it ends this step and asks for the next batch, and then mostly waits.
            time.sleep(self._pause_s)
            try:
                self._hand_over(*given)
            except Exception as error:  # noqa: BLE001 - the run must not end because nobody can look at it
                why = describe(error) if isinstance(error, OSError) else str(error)
                self.unwritten.append(why)
                if len(self.unwritten) == 1 and self._warn is not None:
                    self._warn(f"a step could not be recorded: {why}")
            finally:
                self._waiting.task_done()
        if self._writer is not None:
            self._writer.close()
        self._writer = None
        self._waiting.task_done()

    def _hand_over(self, data: dict[str, Any], given: StepRollouts | Callable[[], StepRollouts]) -> None:
        rollouts = given() if callable(given) else given
        arrays = {name: _array(array) for name in _ARRAYS if (array := getattr(rollouts, name)) is not None}
        arrays |= {f"figures/{name}": _array(array) for name, array in rollouts.figures.items()}
        for number, step in enumerate(rollouts.trained):
            parts = {"rows": step.rows, "trainable": step.trainable, **step.columns}
            arrays |= {f"trained/{number}/{name}": _array(array) for name, array in parts.items()}
        texts: dict[str, list[Any]] = {}
        for name in TEXTS_OF_ROWS:
            if len(values := getattr(rollouts, name)):
                texts[name], arrays[f"texts/{name}"] = _indexed(values)
        if self._writer is None or self._writer.ended:
            self._writer = _Writer.start(
                self._folder, self.config, secrets=self._secrets, monitors=self.on_finding is not None
            )
        head = {
            **data,
            "component_names": list(rollouts.component_names),
            "pieces": rollouts.pieces,
            "texts": texts,
            "decodes": self.decode is not None,
            "events": [*self._events],
            "found": [*self._found],
        }
        answer = self._writer.ask(head, arrays)
        if missing := answer.get("asks"):
            assert self.decode is not None
            try:
                pieces = {each: self.decode([each]) for each in missing}
            except BaseException:
                self._writer.close()  # it waits for them
                raise
            answer = self._writer.ask({"pieces": pieces}, {})
        findings = [Finding(**each) for each in answer["findings"]]
        for finding in findings:
            self._found.add(finding.cause)
            self.keep_around(data["stage"], data["step"])
            if self.on_finding is not None:
                self.on_finding(data["stage"], finding)


# -- The process that writes ---------------------------------------------------------------------------------------


class _Writer:
    """This end of the process that writes: messages go in, and one line comes back for each."""

    def __init__(self, process: subprocess.Popen[bytes], sent: IO[bytes], answers: IO[bytes]) -> None:
        self.process, self._sent, self._answers = process, sent, answers
        self.ended = False

    @classmethod
    def start(cls, folder: Path, config: RecordedStepsConfig, *, secrets: Secrets, monitors: bool) -> _Writer:
        """Start it; what it needs to know goes first."""
        if not sys.executable:
            raise RecordedStepError(
                "steps are written by a second Python, and sys.executable does not say where it is: set it, or record "
                "nothing, by RecordedStepsConfig(last=0, every=0)"
            )
        program = "from rl_observe.step_recorder import write_steps; write_steps()"
        process = subprocess.Popen(  # noqa: S603 - this Python, and nothing of the run
            [sys.executable, "-P", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pipesize=1 << 20,  # most steps fit, and need not wait until the process wakes up
            env={**os.environ, "PYTHONPATH": os.pathsep.join(str(each or Path.cwd()) for each in sys.path)},
            start_new_session=True,  # whoever stops the loop, by Ctrl-C or a signal to its group, lets it finish
        )
        assert process.stdin is not None  # both are pipes
        assert process.stdout is not None
        writer = cls(process, process.stdin, process.stdout)
        start = {"folder": str(folder.absolute()), "config": asdict(config), "monitors": monitors}
        writer._send(start | {"secrets": secrets.values, "parent": os.getpid()}, {})
        return writer

    def ask(self, head: Mapping[str, object], arrays: Mapping[str, Array]) -> dict[str, Any]:
        """Have a step written; returns the `findings` in it that are new, or the token ids whose text it `asks` for.

        Raises:
            RecordedStepError: it cannot be recorded, or the process was killed.
        """
        self._send(head, arrays)
        line = self._answers.readline()
        if not line.endswith(b"\n"):
            self._tell_end()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RecordedStepError(answer["error"])
        return answer

    def close(self) -> None:
        """Let the process end, and wait until it has."""
        self.ended = True
        with contextlib.suppress(BrokenPipeError):
            self._sent.close()
        self._answers.close()
        self.process.wait()

    def _send(self, head: Mapping[str, object], arrays: Mapping[str, Array]) -> None:
        if unsent := [name for name, array in arrays.items() if array.dtype.kind not in "biuf"]:
            raise RecordedStepError(f"{', '.join(unsent)} must hold numbers")
        laid_out = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
        text = json.dumps({**head, "arrays": laid_out}, default=plain).encode()
        values = [np.ascontiguousarray(array).data for array in arrays.values()]
        sizes = _SIZES.pack(len(text), sum(each.nbytes for each in values))
        try:
            self._sent.write(b"".join((sizes, text, *values)))
            self._sent.flush()
        except BrokenPipeError:
            self._tell_end()

    def _tell_end(self) -> NoReturn:
        self.close()
        raise RecordedStepError(
            f"the process that writes recorded steps ended with exit code {self.process.returncode}, and this step is "
            f"lost; the next one is written by a new process"
        )


def _array(given: Any) -> Array:
    """As numpy has it; tensors have a shorter way there than `asarray`."""
    array: Array = given.numpy() if type(given).__module__ == "torch" else np.asarray(given)
    return array


def _indexed(values: Sequence[Any]) -> tuple[list[Any], Array]:
    """Each text once, and which of them stands in each row: many rollouts share theirs."""
    distinct = [*dict.fromkeys(values)]
    place = dict(zip(distinct, range(len(distinct)), strict=True))
    return distinct, np.fromiter(map(place.__getitem__, values), np.int32, len(values))


def write_steps() -> None:
    """Write the steps that come on standard input, and answer each with a line, until the input ends."""
    messages, answers = sys.stdin.buffer, sys.stdout.buffer
    start = _received(messages)
    if start is None:
        return
    folder, config = Path(start[0]["folder"]), RecordedStepsConfig(**start[0]["config"])
    secrets, monitors = Secrets(tuple(start[0]["secrets"])), start[0]["monitors"]
    received, writing = [0], threading.Lock()
    watched = (start[0]["parent"], received, writing)
    threading.Thread(target=_end_as_orphan, args=watched, name="parent", daemon=True).start()
    pieces: dict[int, str] = {}
    starts: dict[str, float | None] = {}  # how far engine and trainer differed in the first step of each stage

    def tell(answer: Mapping[str, object]) -> None:
        try:
            answers.write(json.dumps(answer).encode() + b"\n")
            answers.flush()
        except BrokenPipeError:  # whoever asked was killed; a flush at the end would fail, too, and print
            os._exit(0)

    def learn(texts: Mapping[str, str]) -> None:
        pieces.update(secrets.scrub({int(token): text for token, text in texts.items()}))

    while (message := _received(messages)) is not None:
        received[0] += 1
        head, arrays = message
        try:
            learn(head.pop("pieces"))
            missing = [each for each in np.unique(arrays["tokens"]).tolist() if each >= 0 and each not in pieces]
            if head["decodes"] and missing:
                tell({"asks": missing})
                if (message := _received(messages)) is None:
                    return
                learn(message[0]["pieces"])
            recorded = _recorded(secrets.scrub(head), arrays, pieces)
            with writing:
                recorded.write(folder)
            if monitors and recorded.stage not in starts:
                is_first = recorded.step <= len(recorded.updates)  # a process that goes on did not see it
                starts[recorded.stage] = mismatch_of(recorded) if is_first else None
            shown = monitor_step(recorded, start=starts[recorded.stage]) if monitors else []
            found = [each for each in shown if each.cause not in head["found"]]
            findings = [*{each.cause: each for each in reversed(found)}.values()][::-1]  # the first of each cause
            here = (recorded.stage, recorded.step)
            _delete_old(folder, config, events={*map(tuple, head["events"]), *(here for _ in findings)})
            tell({"findings": [asdict(each) for each in findings]})
        except Exception as error:  # noqa: BLE001 - the run must not end because nobody can look at it
            tell({"error": describe(error) if isinstance(error, OSError) else str(error)})


def _end_as_orphan(parent: int, received: list[int], writing: threading.Lock) -> None:
    """End this process once its parent is gone and what it had sent is written.

    The input ends with the parent, unless another process has the other end of the pipe: one that the parent had
    forked does, and may live for long.
    """
    while os.getppid() == parent:
        time.sleep(ORPHAN_POLL_S)
    seen = -1
    while received[0] != seen:
        seen = received[0]
        time.sleep(ORPHAN_POLL_S)
    with writing:
        os._exit(0)


def _received(messages: IO[bytes]) -> tuple[dict[str, Any], dict[str, Array]] | None:
    """A message's JSON and arrays; None after the last, also where whoever sent it was killed over it."""
    if len(sizes := messages.read(_SIZES.size)) < _SIZES.size:
        return None
    text_size, values_size = _SIZES.unpack(sizes)
    if len(text := messages.read(text_size)) < text_size or len(values := messages.read(values_size)) < values_size:
        return None
    head, arrays, place = json.loads(text), dict[str, Array](), 0
    for name, (dtype, shape) in head.pop("arrays").items():
        arrays[name] = np.frombuffer(values, dtype, math.prod(shape), place).reshape(shape)
        place += arrays[name].nbytes
    return head, arrays


def _recorded(head: dict[str, Any], arrays: Mapping[str, Array], pieces: Mapping[int, str]) -> RecordedStep:
    """The step of a message."""
    given: dict[str, Any] = {name: array for name, array in arrays.items() if "/" not in name}
    for name, values in head["texts"].items():
        given[name] = [values[row] for row in arrays[f"texts/{name}"].tolist()]
    figures, trained = dict[str, Array](), defaultdict[str, dict[str, Array]](dict)
    for name, array in arrays.items():
        kind, _, rest = name.partition("/")
        if kind == "figures":
            figures[rest] = array
        elif kind == "trained":
            number, _, column = rest.partition("/")
            trained[number][column] = array
    rows_of_steps = [
        TrainedRows(rows=each.pop("rows"), trainable=each.pop("trainable"), columns=each) for each in trained.values()
    ]
    rollouts = StepRollouts(
        **given, figures=figures, trained=rows_of_steps, pieces=pieces, component_names=head["component_names"]
    )
    return RecordedStep.of(head["stage"], head["step"], rollouts, updates=head["updates"], about=head["about"])


def _delete_old(folder: Path, config: RecordedStepsConfig, *, events: set[tuple[str, int]]) -> None:
    """Delete what the configuration does not keep; if there are too many bytes, the oldest of the rest."""
    found = bundles(folder)  # oldest first
    newest = {each.path for each in found[max(0, len(found) - config.last) :]}
    around = {
        each.path
        for each in found
        for stage, step in events
        if each.stage == stage and abs(each.step - step) <= config.around_events * max(each.stride, 1)
    }
    kept = []
    for each in found:
        if each.path in newest | around or (config.every and each.step % config.every == 0):
            kept.append(each)
        else:
            each.path.unlink(missing_ok=True)
    # The newest go last, and those around an event before them: they explain what happened.
    kept.sort(key=lambda each: (each.path in newest, each.path in around))
    total = sum(each.size for each in kept)
    for each in kept:
        if total <= config.max_bytes:
            break
        each.path.unlink(missing_ok=True)
        total -= each.size
        if each.path == found[-1].path:
            raise RecordedStepError(
                f"step {each.step} of {each.stage} takes {each.size} bytes, and max_bytes={config.max_bytes}"
            )
