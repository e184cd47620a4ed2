"""What recording a step costs: CPU time of the loop's thread, of the thread that hands over and of the process that
writes, and bytes on disk.

    python packages/rl-observe/benchmarks/recorded_steps.py

CPU times are used, since another process on the machine changes them little. The work of a step is not measured here:
a step of 256 rollouts of 512 tokens takes seconds on any machine, of which 1 % are tens of milliseconds.
"""

import json
import tempfile
import time
from pathlib import Path

import numpy as np

from rl_observe import RecordedStepsConfig, RunDirectory, StepRecorder, StepRollouts
from rl_observe.recorded_steps import RecordedStep

STEPS = 5


def make(rows, prompt, response, seed, *, different):
    """Rollouts with everything that a GRPO step records, and text of four characters a token, from few words or any."""
    rng = np.random.default_rng(seed)
    width = prompt + response
    lengths = prompt + rng.integers(response // 4, response + 1, rows)
    places = np.arange(width)
    sampled = (places >= prompt) & (places < lengths[:, None])
    logp = np.where(sampled, -rng.random((rows, width)), np.nan).astype(np.float32)
    words = rng.choice(["abc ", "def ", "ghi ", "jkl "], (rows, response))
    if different:
        words = rng.integers(97, 123, (rows, response, 4), dtype=np.uint8).view("S4")[..., 0].astype(str)
    return StepRollouts(
        tokens=rng.integers(0, 50_000, (rows, width)),
        lengths=lengths,
        response=sampled,
        logp_old=np.nan_to_num(logp),
        logp=logp,
        advantage=np.where(sampled, rng.normal(size=(rows, 1)), np.nan),
        loss=logp,
        turns=np.where(sampled, 0, -1),
        versions=np.where(sampled, seed, -1),
        rewards=rng.random(rows),
        groups=np.arange(rows) // 8,
        update=np.zeros(rows, dtype=int),
        responses=["".join(row[: int(n) - prompt]) for row, n in zip(words, lengths, strict=True)],
        prompts=[f"prompt {row // 8}" for row in range(rows)],
        sources=[f"rows.jsonl line {row // 8}" for row in range(rows)],
    )


def writer_time(recorder):
    """CPU seconds of the process that writes."""
    return time.clock_gettime(~recorder._writer.process.pid << 3 | 2)  # what clock_getcpuclockid(3) gives


def measure(rows, prompt, response, *, different=False):
    """Figures of one shape."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory.create(Path(folder) / "run")
        recorder = StepRecorder(run, RecordedStepsConfig(last=STEPS), decode=lambda ids: f"<{ids[0]}>")
        batches = [make(rows, prompt, response, seed, different=different) for seed in range(STEPS)]
        recorder.record("grpo", STEPS + 1, batches[0])  # starts the process
        recorder._waiting.join()
        of_loop, of_process, of_writer = [], [], []
        for step, batch in enumerate(batches, 1):
            before, loop, writer = time.process_time(), time.thread_time(), writer_time(recorder)
            recorder.record("grpo", step, batch)
            of_loop.append(time.thread_time() - loop)
            recorder._waiting.join()
            of_process.append(time.process_time() - before)
            of_writer.append(writer_time(recorder) - writer)
        recorder.close()
        read = RecordedStep.read(next(run.recorded_steps.glob("*.zip")))
        least = 4 * int(read.filled.sum()) + 8 * int(read.response.sum())
        size = read.path.stat().st_size
    return {
        "rollouts": rows,
        "tokens": int(read.filled.sum()),
        "different_texts": different,
        "loop_ms": round(1000 * float(np.median(of_loop)), 3),
        "thread_ms": round(1000 * float(np.median(of_process) - np.median(of_loop)), 2),
        "writer_ms": round(1000 * float(np.median(of_writer)), 1),
        "bytes": size,
        "bytes_over_tokens_and_logp": round(size / least, 3),
        "cut": read.cut,
    }


if __name__ == "__main__":
    short = [measure(256, 8, 9, different=different) for different in (False, True)]
    figures = [*short, measure(256, 128, 384, different=True), measure(64, 1000, 3000)]
    for each in figures:
        print(
            f"{each['rollouts']} rollouts, {each['tokens']} tokens: {each['loop_ms']} ms in the loop, "
            f"{each['thread_ms']} ms in its other thread, {each['writer_ms']} ms in the writer, "
            f"{each['bytes'] / 1e6:.2f} MB, "
            f"{each['bytes_over_tokens_and_logp']} times the tokens and log-probabilities"
            f"{', texts all different' if each['different_texts'] else ''}"
            f"{', without ' + ', '.join(each['cut']) if each['cut'] else ''}"
        )
    print(json.dumps({"figures": figures}))
