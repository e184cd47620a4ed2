"""Predict a run's memory and speed while it starts, for its report to compare with what is measured.

A process of its own traces the training step on fake tensors, as `explain` does: it takes seconds, and torch's fake
process groups cannot stand beside a real one. It runs at the lowest priority, sees no GPU, and reads neither hub nor
user code, since it is given the model without its weights. Whatever goes wrong in it is named in `prediction.json`, and
never ends a run.
"""

import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rl_algorithms.chat import TokenizedConversation
from rl_algorithms.tokenized_data import Imitated, TokenizedData
from rl_launcher.build.parts import Parts
from rl_launcher.checks.gpu_budget import GPUS, Gpu, Lengths
from rl_launcher.checks.predict import predict_run
from rl_launcher.ray.placement import plan_placement
from rl_launcher.schema import Recipe
from rl_launcher.user_code import Objects
from rl_observe import Prediction, RunDirectory, Secrets, write_prediction

PHASES = {"generate": "phase_s/generate", "train": "phase_s/train", "refit": "phase_s/refit"}
"""Phases of `StepTimes`, and the metrics that a step logs of them; `logp` is a part of `train` there."""
QUIETLY = """
import ctypes, os, signal, sys
os.nice(19)
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group, and is the run's
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a run that is killed leaves nothing behind
"""
CHILD = "from rl_launcher.run.prediction import main; main()"
"""What the process does, after `QUIETLY` and before anything heavy is imported."""
WAIT_SHARE = 0.02
"""Of a run's own time that its end waits for a prediction that is not there yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the process is asked."""

    recipe: Recipe
    skeleton: Any
    """The policy on the meta device."""
    gpu: Gpu | None
    """Each of the run's GPUs, as it was measured; None on CPUs."""
    lengths: Lengths | None
    """Of the rows that are trained on."""


class BackgroundPrediction:
    """A prediction that is being made; `prediction.json` appears when it is there.

    Args:
        run: where it is written.
        question: the run, of which the parts are built.
        secrets: are removed from messages.
    """

    def __init__(self, run: RunDirectory, question: Question, *, secrets: Secrets) -> None:
        self._run, self._question, self._secrets = run, question, secrets
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._make, name="prediction", daemon=True)
        self._thread.start()

    def close(self, *, wait_s: float = 0.0) -> None:
        """End it, after waiting for it that long. A second time does nothing."""
        self._thread.join(wait_s)
        self._closing.set()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        self._thread.join()

    def _make(self) -> None:
        try:
            prediction = self._ask()
        except Exception as error:  # noqa: BLE001 - nothing that goes wrong here may end a run
            prediction = _unknown(f"it failed: {type(error).__name__}: {error}")
        prediction = Prediction(**self._secrets.scrub(vars_of(prediction)))
        try:
            write_prediction(self._run, prediction)
        except (OSError, ValueError) as error:
            if not self._closing.is_set():
                sys.stderr.write(f"the prediction could not be written: {error}\n")

    def _ask(self) -> Prediction:
        # Neither this process's ranks nor its GPUs are the child's.
        hidden = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
        env = {name: value for name, value in os.environ.items() if name not in hidden}
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        asked = pickle.dumps(self._question)
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [sys.executable, "-c", QUIETLY + CHILD]
        with subprocess.Popen(command, env=env, **pipes) as self._process:  # noqa: S603 - a fixed command
            if self._closing.is_set():
                self._process.kill()
            answer, said = self._process.communicate(asked)
        if self._closing.is_set() and self._process.returncode:
            return _unknown("the run ended before it was made")
        if self._process.returncode:
            last = said.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
            return _unknown(f"it failed with exit code {self._process.returncode}: {last[0]}")
        return Prediction(**json.loads(answer.splitlines()[-1]))


def predict_in_background(
    recipe: Recipe, parts: Parts, run: RunDirectory, *, secrets: Secrets
) -> BackgroundPrediction | None:
    """Begin to predict a run whose parts are built; None where it trains nothing."""
    if not recipe.stages or parts.skeleton is None:
        return None
    question = Question(
        recipe=recipe, skeleton=parts.skeleton, gpu=gpu_of(parts), lengths=lengths_of(recipe, parts.data)
    )
    return BackgroundPrediction(run, question, secrets=secrets)


def gpu_of(parts: Parts) -> Gpu | None:
    """The run's GPUs as they were measured: the smallest of them, by name if all have the same; None on CPUs."""
    if parts.selection.config.device != "cuda":
        return None
    if not parts.gpus:
        here = torch.cuda.get_device_properties(0)
        return named_gpu({here.name}, here.total_memory)
    return named_gpu({name for name, _ in parts.gpus}, min(size for _, size in parts.gpus))


def named_gpu(names: set[str], memory_bytes: int) -> Gpu:
    """A GPU as it was measured, with the bandwidth of its data sheet, which is 0 where that is not known here."""
    name = next(iter(names)) if len(names) == 1 else ""
    bandwidth = next((each.bytes_per_s for each in GPUS.values() if each.device_name == name), 0.0)
    return Gpu(name, memory_bytes, bandwidth)


def lengths_of(recipe: Recipe, data: TokenizedData) -> Lengths | None:
    """Mean tokens of what the recipe's last stage reads and trains on; responses to be sampled are not known."""
    if data.prompts and recipe.headline != "sft":
        return Lengths(prompt=_mean([len(prompt.tokens) for prompt in data.prompts]))
    pairs, rows = data.pairs, list[tuple[int, int]]()  # tokens of a row, and those of them that are trained on
    if recipe.headline == "sft":
        rows = [(len(each.tokens), _num_trained(each)) for each in data.demonstrations]
    elif pairs is not None:
        rows = [*zip(pairs.train.lengths.tolist(), pairs.train.trainable.sum(dim=1).tolist(), strict=True)]
    elif data.labelled is not None:
        rows = [(len(each.tokens), sum(each.trainable)) for each in data.labelled.train]
    if not rows:
        return None
    response = _mean([trained for _, trained in rows])
    return Lengths(prompt=_mean([length for length, _ in rows]) - response, response=response)


def _num_trained(row: Imitated) -> int:
    return sum(row.trainable) if isinstance(row, TokenizedConversation) else len(row.tokens) - row.prompt_length


def _mean(numbers: Sequence[int]) -> float:
    return sum(numbers) / len(numbers)


def prediction_of(question: Question) -> Prediction:
    """Predict by the names of the metrics that a run logs.

    Raises:
        ValueError: what the backend or the engine would refuse.
    """
    recipe, gpu = question.recipe, question.gpu
    placement = plan_placement(recipe)
    predicted = predict_run(recipe, placement, Objects(model=question.skeleton), gpu=gpu, lengths=question.lengths)
    figures: dict[str, float] = {}
    unknown: dict[str, str] = {}
    peak = predicted.figures["rank_peak_bytes"]
    if peak is None:
        unknown["memory_trainer_peak_bytes"] = "the step could not be traced; explain says why"
    else:
        figures["memory_trainer_peak_bytes"] = peak
    if predicted.gpus is not None:
        for phase, num_bytes in predicted.gpus.figures["phase_bytes"].items():
            figures[f"memory_device_bytes/{phase}"] = num_bytes
    times = predicted.times
    assert times is not None  # the model is given
    for phase, name in PHASES.items():
        if phase == "generate" and times.overlaps:
            unknown[name] = "asynchronous: responses are sampled beside the steps, and no phase of one"
        elif phase in times.phases:
            figures[name] = times.phases[phase] + (times.phases.get("logp", 0.0) if phase == "train" else 0.0)
        elif phase in times.unknown:
            unknown[name] = times.unknown[phase]
    if times.total is None:
        unknown["tokens_per_s"] = "the seconds of a step are not known"
    else:  # the log counts tokens that are sampled, or else those that are trained on
        figures["tokens_per_s"] = times.rows * times.response / times.total
    if times.mfu is None:
        unknown["mfu"] = times.unknown.get("train", "the run trains nothing")
    else:
        figures["mfu"] = times.mfu
    number = sum(placement.num_slots)
    device = f"{number} x {gpu.device_name or 'GPU'}" if gpu is not None else "the CPU"
    return Prediction(figures=figures, unknown=unknown, stage=recipe.headline, device=device, assumed=times.assumed)


def _unknown(why: str) -> Prediction:
    return Prediction(unknown={"prediction": why})


def vars_of(prediction: Prediction) -> dict[str, Any]:
    """The fields of a prediction; it has slots, and no `__dict__`."""
    return {name: getattr(prediction, name) for name in Prediction.__dataclass_fields__}


def main() -> None:
    """In the child: read a `Question`, print the answer as a line of JSON."""
    prediction = prediction_of(pickle.load(sys.stdin.buffer))  # noqa: S301 - what this run's own process has written
    sys.stdout.write(json.dumps(vars_of(prediction)) + "\n")


if __name__ == "__main__":
    main()
