"""What `VllmEngine` costs over the bare `AsyncLLM` inside of it: at most 3 % is promised.

Both generate with one engine, ours and then vLLM's own `generate` of it, with the same SamplingParams, in an order
that is drawn anew for each round; bare vLLM is measured twice, so that the ratio of the two says what the noise is.
vLLM's side is given its prompts and parameters ready made, and reads nothing of what it gets; ours makes and reads
them. Of several answers to a prompt, vLLM makes one request, which it divides; ours makes one of each, and so it can
time out alone. Figures are medians of each round's ratio, with their quartiles.

A further row, `bare, each alone`, asks vLLM for every answer by a request of its own, as ours does.

    python benchmarks/wrapper_overhead.py                    two minutes; exits 1 if the median is above 1.03
    python benchmarks/wrapper_overhead.py --clock core       on a machine with other work
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from workloads import ENVIRONMENT, MODELS, WORKLOADS, cpu_seconds, has_vllm, save_model, show_json, vllm_options

LIMIT = 1.03
CLOCKS = ("wall", "core")
numbers = itertools.count()


def params_of(engine, workload):
    """vLLM's parameters as our engine makes them, with vLLM's own way to give several answers; one object for all."""
    from rl_generation.vllm.samples import to_sampling_params

    params = to_sampling_params(sampling_of(workload), stop_token_ids=engine.stop_token_ids)
    params.n = workload.n
    params.skip_clone = False  # the default: one object for many prompts, which vLLM must copy
    return params


def sampling_of(workload):
    from rl_generation import Sampling

    return Sampling(max_new_tokens=workload.max_new_tokens, n=workload.n, stop_token_ids=workload.stops)


def count(outputs) -> int:
    return sum(len(answer.token_ids) for output in outputs for answer in output.outputs)


def bare(engine, workload):
    """What prepares a call of bare vLLM; the call returns its outputs."""
    from vllm.inputs import tokens_input

    async def answer(prompt, params):
        async for output in engine.vllm.generate(prompt, params, f"bare-{next(numbers)}"):
            last = output
        return last

    async def answer_all(prompts, params):
        return await asyncio.gather(*(answer(prompt, params) for prompt in prompts))

    def prepare(prompts):
        ready, params = [tokens_input(prompt) for prompt in prompts], params_of(engine, workload)
        return lambda: asyncio.run_coroutine_threadsafe(answer_all(ready, params), engine.loop).result()

    return prepare, count


def alone(engine, workload):
    """Bare vLLM with a request for each answer."""
    prepare, count_tokens = bare(engine, replace(workload, n=1))
    return lambda prompts: prepare([prompt for prompt in prompts for _ in range(workload.n)]), count_tokens


def ours(engine, workload):
    sampling = sampling_of(workload)

    def prepare(prompts):
        return lambda: engine.generate(prompts, sampling)

    return prepare, lambda rollouts: sum(len(rollout.tokens) for rollout in rollouts)


def timed(way, prompts):
    """Clock → seconds for each token: on the wall, and on this process's cores."""
    prepare, tokens_of = way
    call = prepare(prompts)
    gc.collect()
    cpu, start = cpu_seconds(), time.perf_counter()
    answers = call()
    spent = {"wall": time.perf_counter() - start, "core": cpu_seconds() - cpu}
    tokens = tokens_of(answers)
    return {clock: seconds / tokens for clock, seconds in spent.items()}


def measure(ways, workload, rounds: int):
    """Way → clock → seconds for each token, a round."""
    names = list(ways)
    found = {name: {} for name in names}
    order = random.Random(0)
    for number in range(-2, rounds):  # the first two warm up
        for place, name in enumerate(order.sample(names, len(names))):
            spent = timed(ways[name], workload.draw(100 * number + place))
            if number >= 0:
                for clock, seconds in spent.items():
                    found[name].setdefault(clock, []).append(seconds)
    return found


def compare(found):
    """Way → clock → median and quartiles of its ratio to bare vLLM."""
    rows = {}
    for name, clocks in found.items():
        rows[name] = {"tokens_per_s": 1 / statistics.median(clocks["wall"])}
        for clock, spent in clocks.items():
            ratios = [a / b for a, b in zip(spent, found["bare"][clock], strict=True)]
            low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
            rows[name][clock] = {"ratio": median, "quartiles": [low, high]}
    return rows


def ways_of(engine, workload):
    """What is compared."""
    found = {"bare": bare(engine, workload), "ours": ours(engine, workload), "bare again": bare(engine, workload)}
    return found if workload.n == 1 else {**found, "bare, each alone": alone(engine, workload)}


def show(workload, rows) -> None:
    print(f"\n{workload.name}: {workload.prompts} prompts x {workload.n}")
    print(f"{'':18}{'tokens/s':>10}" + "".join(f"{clock:>9}{'quartiles':>13}" for clock in CLOCKS))
    for name, row in rows.items():
        cells = "".join(
            f"{row[clock]['ratio']:9.3f}{row[clock]['quartiles'][0]:8.2f}-{row[clock]['quartiles'][1]:.2f}"
            for clock in CLOCKS
        )
        print(f"{name:18}{row['tokens_per_s']:10.0f}{cells}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="tiny", help="the smaller, the dearer a wrapper")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="which one is judged")
    arguments = parser.parse_args()
    if not has_vllm():
        print("vLLM is not installed, so there is nothing to compare with")
        show_json({"benchmark": "wrapper_overhead", "not_installed": ["vllm"]})
        return 0
    os.environ.update(ENVIRONMENT)
    from rl_generation.vllm import VllmEngine

    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(arguments.model, Path(folder))
        with VllmEngine(vllm_options(path), stop_token_ids=[]) as engine:
            for workload in WORKLOADS.values():
                found = measure(ways_of(engine, workload), workload, arguments.rounds)
                figures[workload.name] = compare(found)
                show(workload, figures[workload.name])
    worst = max(rows["ours"][arguments.clock]["ratio"] for rows in figures.values())
    print(f"\nours takes at most {worst:.3f} x bare vLLM ({arguments.clock}); the limit is {LIMIT}")
    settings = {"model": arguments.model, "rounds": arguments.rounds, "clock": arguments.clock, "limit": LIMIT}
    show_json({"benchmark": "wrapper_overhead", **settings, "worst": worst, "holds": worst <= LIMIT, **figures})
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
