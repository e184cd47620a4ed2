"""Tokens a second of the engines and of `transformers.generate`, side by side on one model, one thread each.

Two workloads: 64 prompts and 32 new tokens of each; and a long tail, 64 prompts and 8 answers to each, of geometric
lengths up to 96 tokens. Every engine has a process of its own and waits while another one works; each round asks all of
them, in an order that is drawn anew. Figures are medians over the rounds, ratios are medians of each round's ratio.

`core-s/1k` is what 1000 tokens cost on all cores, in all processes: on a machine with other work, believe it before the
tokens a second. Of vLLM it counts the waiting too, which is a loop there.

    python benchmarks/engines.py                         both models; five minutes with vLLM, one without
    python benchmarks/engines.py --models tiny --engines generate embedded
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from workloads import ENVIRONMENT, MODELS, PAD, WORKLOADS, cpu_seconds, has_vllm, save_model, show_json, vllm_options

ENGINES = {
    "generate": "transformers.generate, no logp",
    "embedded": "TransformersEngine",
    "vllm": "VllmEngine",
}
BATCH = 256


# -- In the process of one engine ------------------------------------------------------------------------------------


def generate_of_transformers(model):
    """What returns the number of tokens, up to and with each first stop token, that `model.generate` sampled."""
    import torch

    def generate(workload, prompts) -> int:
        total = 0
        rows = sorted([prompt for prompt in prompts for _ in range(workload.n)], key=len)
        for start in range(0, len(rows), workload.generate_batch):
            batch = rows[start : start + workload.generate_batch]
            width = max(map(len, batch))
            tokens = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in batch])
            output = model.generate(
                tokens,
                attention_mask=(tokens != PAD).long(),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=workload.max_new_tokens,
                pad_token_id=PAD,
                eos_token_id=list(workload.stops) or None,
            )
            is_stop = torch.isin(output[:, width:], torch.tensor(workload.stops or (-1,))).int()
            total += int((is_stop.cumsum(1) - is_stop == 0).sum())
        return total

    return generate


def generate_of_engine(engine):
    from rl_generation import Sampling

    def generate(workload, prompts) -> int:
        sampling = Sampling(max_new_tokens=workload.max_new_tokens, n=workload.n, stop_token_ids=workload.stops)
        return sum(len(rollout.tokens) for rollout in engine.generate(prompts, sampling))

    return generate


def load_model(path):
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    model.generation_config.eos_token_id = None  # each workload says what ends its answers
    return model


def make(name: str, path: str):
    """The engine: what generates, and the object behind it."""
    if name == "generate":
        model = load_model(path)
        return generate_of_transformers(model), contextlib.nullcontext()
    if name == "embedded":
        from rl_generation.transformers_engine import TransformersEngine

        engine = TransformersEngine(load_model(path), stop_token_ids=[], pad_token_id=PAD, max_batch_size=BATCH)
        return generate_of_engine(engine), contextlib.closing(engine)
    from rl_generation.vllm import VllmEngine

    engine = VllmEngine(vllm_options(path), stop_token_ids=[])
    return generate_of_engine(engine), contextlib.closing(engine)


def serve(name: str, path: str) -> None:
    """Answer each line of the standard input, a workload and a seed, with a line of figures."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    generate, owner = make(name, path)
    processes = getattr(getattr(owner, "thing", None), "process_ids", ())
    with owner:
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            workload_name, seed = json.loads(line)
            workload = WORKLOADS[workload_name]
            prompts = workload.draw(seed)
            cpu, start = cpu_seconds(processes), time.perf_counter()
            tokens = generate(workload, prompts)
            figures = {"seconds": time.perf_counter() - start, "cpu_seconds": cpu_seconds(processes) - cpu}
            print(json.dumps({"tokens": tokens, **figures}), file=answers, flush=True)


# -- In the process that asks ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(name: str, path: str):
    """Ask the process of an engine, for as long as it is needed."""
    command = [sys.executable, __file__, "--serve", name, path]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read() -> str:
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"{ENGINES[name]} failed; see above")
        return line

    def ask(workload, seed):
        process.stdin.write(json.dumps([workload.name, seed]) + "\n")
        process.stdin.flush()
        return json.loads(read())

    with process:
        try:
            read()
            yield ask
        finally:
            process.stdin.close()


def measure(names, path: str, rounds: int):
    """Workload → engine → the figures of each round."""
    with contextlib.ExitStack() as stack:
        ask = {}
        for name in names:
            print(f"starting {ENGINES[name]}", file=sys.stderr, flush=True)
            ask[name] = stack.enter_context(started(name, path))
        found = {workload: {name: [] for name in names} for workload in WORKLOADS}
        order = random.Random(0)
        for number in range(-1, rounds):  # the first warms up
            for workload in WORKLOADS.values():
                for name in order.sample(names, len(names)):
                    figures = ask[name](workload, number)
                    if number >= 0:
                        found[workload.name][name].append(figures)
    return found


def summary(found, first: str):
    """Medians of one workload."""
    speed = {name: [each["tokens"] / each["seconds"] for each in rounds] for name, rounds in found.items()}
    cpu = {name: [each["tokens"] / each["cpu_seconds"] for each in rounds] for name, rounds in found.items()}
    return {
        name: {
            "tokens": statistics.median(each["tokens"] for each in rounds),
            "tokens_per_s": statistics.median(speed[name]),
            "tokens_per_core_s": statistics.median(cpu[name]),
            "ratio": statistics.median(a / b for a, b in zip(speed[name], speed[first], strict=True)),
            "ratio_of_core_time": statistics.median(a / b for a, b in zip(cpu[name], cpu[first], strict=True)),
        }
        for name, rounds in found.items()
    }


def show(model: str, workload, rows, missing) -> None:
    shape = "{} layers, hidden {}".format(*MODELS[model])
    print(f"\n{model} ({shape}), {workload.name}: {workload.prompts} prompts x {workload.n}, up to "
          f"{workload.max_new_tokens} tokens")  # fmt: skip
    print(f"{'':32}{'tokens':>8}{'tokens/s':>10}{'ratio':>7}{'core-s/1k':>11}{'ratio':>7}")
    for name, row in rows.items():
        print(
            f"{ENGINES[name]:32}{row['tokens']:8.0f}{row['tokens_per_s']:10.0f}{row['ratio']:7.2f}"
            f"{1e3 / row['tokens_per_core_s']:11.3f}{row['ratio_of_core_time']:7.2f}"
        )
    for name in missing:
        print(f"{ENGINES[name]:32}vLLM is not installed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="ratios are to the first")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", nargs=2, metavar=("ENGINE", "MODEL"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    if arguments.serve is not None:
        serve(*arguments.serve)
        return
    missing = [] if has_vllm() else [name for name in arguments.engines if name == "vllm"]
    names = [name for name in arguments.engines if name not in missing]
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.models:
            found = measure(names, save_model(model, Path(folder)), arguments.rounds)
            figures[model] = {name: summary(rounds, names[0]) for name, rounds in found.items()}
            for name, rows in figures[model].items():
                show(model, WORKLOADS[name], rows, missing)
    show_json({"benchmark": "engines", "rounds": arguments.rounds, "not_installed": missing, "models": figures})


if __name__ == "__main__":
    main()
