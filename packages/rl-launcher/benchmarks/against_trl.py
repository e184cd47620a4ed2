"""One GRPO step against TRL's GRPOTrainer: samples a second, and what is learnt, side by side in one run.

Two tasks: the quickstart's, whose answers are short, and one whose answers have a long tail of lengths. On each, the
quickstart's tiny model first imitates noisy demonstrations; from those weights both sides go on with GRPO: the same
prompts in the same order, the same reward function, 32 prompts and 8 answers each to a batch, four optimizer steps on
it, the same loss, clip, learning rate and AdamW, float32, one thread. Ours is all that `rl-launcher run` does, refit,
logs and TensorBoard included; TRL's trainer has logging and saving off.

Each side is a process of its own, and they take turns, a batch at a time: what else the machine does meets both alike.
A turn goes from one call of the reward function to the next. The held-out prompts are asked by our evaluator, of the
weights that both sides have left.

    python benchmarks/against_trl.py [--quick] [--seeds 2] [--only short] [--without-signal drop]

About six minutes on two cores that do nothing else. The last line is JSON with every figure, and whether the bars hold:
at least 3 times as many samples a second on short answers and 6 times on the long tail, by the ratio of medians, and
greedy held-out accuracy no worse than TRL's by more than twice the standard error (not judged with one seed).
"""

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from _trl_job import BATCH, TASKS, Job, Task, sft_overrides

from rl_algorithms.chat import Chat
from rl_algorithms.environments import RewardFunctionEnvironment
from rl_algorithms.evaluation import evaluate
from rl_backends import load_causal_lm, load_tokenizer
from rl_generation import Sampling, TransformersEngine
from rl_launcher.quickstart import sort_digits
from rl_launcher.recipe_files import load_object, load_recipe
from rl_launcher.run import run
from rl_launcher.schema import Recipe

HERE = Path(__file__).parent
RECIPE = HERE.parents[2] / "recipes" / "quickstart.yaml"
SIDES = {"ours": HERE / "_trl_ours.py", "trl": HERE / "_trl_theirs.py"}
WARM_UP = 2  # batches at the beginning that are not counted: allocators and caches fill
QUICK_BATCHES = 6
WINDOWS = 5  # of the curve, in the table
Turn = dict[str, float]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


class Side:
    """A process that trains when it is its turn."""

    def __init__(self, script: Path, job: Job, log: Path) -> None:
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(script), job.to_argument()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
            )

    def report(self) -> Turn:
        """The next line that it says."""
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args[1]} ended early:\n{self._log.read_text()[-4000:]}")
        return json.loads(line)

    def go_on(self) -> None:
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def finish(self) -> None:
        """Let it train on its last batch, and save."""
        self.go_on()
        if self._process.wait() != 0:
            raise SystemExit(f"{self._process.args[1]} failed:\n{self._log.read_text()[-4000:]}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def in_turns(jobs: dict[str, Job], folder: Path) -> dict[str, list[Turn]]:
    """Run all sides, one at a time; the report of each batch."""
    with contextlib.ExitStack() as stack:
        sides = {name: Side(SIDES[name], job, folder / f"{name}.log") for name, job in jobs.items()}
        for side in sides.values():
            stack.callback(side.kill)
        turns = {name: [side.report()] for name, side in sides.items()}  # all have their first batch
        order = list(sides)
        for _ in range(next(iter(jobs.values())).batches - 1):
            for name in order:
                sides[name].go_on()
                turns[name].append(sides[name].report())
            order.reverse()
        for side in sides.values():
            side.finish()
    return turns


class Examiner:
    """Asks the held-out prompts of a task of any weights."""

    def __init__(self, task: Task, num_prompts: int) -> None:
        self._task = task
        self._rows = load_object(task.source, wanted="a function")().held_out[:num_prompts]

    def __call__(self, folder: str) -> dict[str, float]:
        """Share of right answers, greedy and sampled, with their standard errors."""
        model, tokenizer = load_causal_lm(folder), load_tokenizer(folder)
        stops = [tokenizer.eos_token_id]
        chat = Chat(tokenizer, prompt_format="chat", stop_token_ids=stops)
        engine = TransformersEngine(model, stop_token_ids=stops, pad_token_id=tokenizer.pad_token_id)
        prompts = [chat.prompt(row) for row in self._rows]
        environment = RewardFunctionEnvironment(reward=sort_digits.reward)
        figures = {}
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            sampling = Sampling(max_new_tokens=self._task.max_new_tokens, temperature=temperature, seed=0)
            accuracy = evaluate(prompts, engine=engine, sampling=sampling, environment=environment, chat=chat)
            figures |= {name: accuracy.mean, f"{name}_error": accuracy.standard_error}
        return figures


def imitated(task: Task, folder: Path) -> str:
    """The weights that both sides begin with."""
    with contextlib.redirect_stdout(sys.stderr):
        run(load_recipe(RECIPE, schema=Recipe, overrides=sft_overrides(task, folder)))
    return str(folder / "model")


def measure(name: str, task: Task, *, seeds: int, without_signal: str, folder: Path) -> dict[str, object]:
    """All runs on one task."""
    start, examine = imitated(task, folder / "imitation"), Examiner(task, num_prompts=1000)
    before, runs = examine(start), []
    for seed in range(seeds):
        place = folder / str(seed)
        place.mkdir()
        shared = {"task": name, "seed": seed, "batches": task.batches, "start": start, "without_signal": without_signal}
        jobs = {side: Job(out=str(place / side), **shared) for side in SIDES}
        turns = in_turns(jobs, place)
        held_out = {side: examine(f"{job.out}/model") for side, job in jobs.items()}
        runs.append({"seed": seed, "turns": turns, "held_out": held_out})
    return summary(task, before=before, runs=runs)


def summary(task: Task, *, before: dict[str, float], runs: list[dict]) -> dict[str, object]:
    """Ratio of medians, curves, and how far apart the two have come out."""

    def median(side: str, clock: str) -> float:
        return statistics.median(turn[clock] for each in runs for turn in each["turns"][side][WARM_UP:])

    turns = [turn for each in runs for side in SIDES for turn in each["turns"][side]]
    held_out = {side: [each["held_out"][side] for each in runs] for side in SIDES}
    greedy = {side: statistics.fmean(each["greedy"] for each in held_out[side]) for side in SIDES}
    error = error_of_difference(held_out)
    ratio = median("trl", "wall_s") / median("ours", "wall_s")
    return {
        "samples_per_s": {side: round(BATCH / median(side, "wall_s"), 1) for side in SIDES},
        "batch_s": {side: round(median(side, "wall_s"), 4) for side in SIDES},
        "ratio": round(ratio, 3),
        "ratio_cpu": round(median("trl", "cpu_s") / median("ours", "cpu_s"), 3),
        "bar": task.bar,
        "answer_length_mean": round(statistics.fmean(turn["mean_length"] for turn in turns), 1),
        "answer_length_longest": max(turn["longest"] for turn in turns),
        "held_out_before": rounded(before),
        "held_out_after": {side: [rounded(each) for each in held_out[side]] for side in SIDES},
        "greedy_after": {side: round(value, 4) for side, value in greedy.items()},
        "greedy_difference": round(greedy["ours"] - greedy["trl"], 4),
        "greedy_difference_error": round(error, 4),
        "reward": {
            side: [[round(turn["reward"], 3) for turn in each["turns"][side]] for each in runs] for side in SIDES
        },
        "fast_enough": ratio >= task.bar,
        "learns_as_much": None if len(runs) < 2 else greedy["ours"] - greedy["trl"] >= -2 * error,
    }


def error_of_difference(held_out: dict[str, list[dict[str, float]]]) -> float:
    """Standard error of the difference of greedy accuracy: of which prompts are asked, and of which seeds are run.

    The same prompts are asked every time, so more runs do not make that part smaller. With one run, seeds say nothing.
    """
    of_prompts = [statistics.fmean(each["greedy_error"] for each in runs) for runs in held_out.values()]
    number = min(map(len, held_out.values()))
    of_seeds = [statistics.stdev(each["greedy"] for each in runs) if number > 1 else 0.0 for runs in held_out.values()]
    return math.hypot(*of_prompts, *(each / math.sqrt(number) for each in of_seeds))


def rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in figures.items()}


def rows_of(name: str, figures: dict) -> Iterator[str]:
    """The table of one task."""
    before = figures["held_out_before"]
    yield (
        f"{name}: answers of {figures['answer_length_mean']} tokens, the longest {figures['answer_length_longest']}; "
        f"held out before: greedy {before['greedy']:.3f}, sampled {before['sampled']:.3f}"
    )
    for side in SIDES:
        curve = windows_of(figures["reward"][side])
        yield (
            f"  {side:<5} {figures['samples_per_s'][side]:7.1f} samples/s   "
            f"reward {' '.join(f'{part:.3f}' for part in curve)}   "
            f"held out after: greedy {figures['greedy_after'][side]:.3f}"
        )
    yield (
        f"  ratio {figures['ratio']:.2f} (CPU seconds {figures['ratio_cpu']:.2f}; the bar is {figures['bar']}); greedy "
        f"difference {figures['greedy_difference']:+.3f} ± {figures['greedy_difference_error']:.3f}"
    )


def windows_of(curves: list[list[float]]) -> list[float]:
    """A curve over batches in a few windows, the mean over seeds."""
    length = len(curves[0])
    cuts = [round(length * part / WINDOWS) for part in range(WINDOWS + 1)]
    return [
        statistics.fmean(value for curve in curves for value in curve[low:high])
        for low, high in itertools.pairwise(cuts)
    ]


def arguments() -> argparse.Namespace:
    """As the head of this file tells."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_BATCHES} batches and one seed: does it run?")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each side on each task")
    parser.add_argument("--only", choices=list(TASKS), help="one task")
    parser.add_argument(
        "--without-signal",
        choices=["keep", "drop"],
        default="keep",
        help="groups whose rewards are all equal, on our side: keep them as TRL does, or drop them as the quickstart",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="makes runs so many times as long")
    return parser.parse_args()


def main() -> None:
    """Run everything, print the tables and the figures."""
    chosen = arguments()
    os.environ.update(ENVIRONMENT)
    torch.set_num_threads(1)
    started = time.perf_counter()
    figures: dict[str, object] = {}
    sys.path.insert(0, str(HERE))
    with tempfile.TemporaryDirectory() as folder:
        for name, task in TASKS.items():
            if chosen.only not in {None, name}:
                continue
            batches = QUICK_BATCHES if chosen.quick else round(task.batches * chosen.scale)
            place = Path(folder) / name.replace(" ", "_")
            place.mkdir()
            seeds = 1 if chosen.quick else chosen.seeds
            asked = {"seeds": seeds, "without_signal": chosen.without_signal}
            figures[name] = measure(name, replace(task, batches=batches), folder=place, **asked)
            print("\n".join(rows_of(name, figures[name])), flush=True)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "trl", "accelerate")}
    load = f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"
    wall = round(time.perf_counter() - started, 1)
    about = {"quick": chosen.quick, "without_signal": chosen.without_signal, "versions": versions, "machine": load}
    print(json.dumps({**figures, **about, "wall_s": wall}))


if __name__ == "__main__":
    main()
