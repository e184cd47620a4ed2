"""What `VllmEngine` and `VllmAsyncEngine` cost over the bare vLLM inside of them: at most 3 % is promised.

Both generate with one engine, ours and then vLLM's own `generate` of it, with the same SamplingParams, in an order
that is drawn anew for each round; bare vLLM is measured twice, so that the ratio of the two says what the noise is.
vLLM's side is given its prompts and parameters ready made, and reads nothing of what it gets; ours makes and reads
them. Of several answers to a prompt, vLLM makes one request, which it divides; ours makes one of each, and so it can
time out alone. Figures are medians of each round's ratio, with their quartiles.

Further rows: `bare, each alone` asks vLLM for every answer by a request of its own, as ours does. `as it comes` is an
`LLM` without statistics and with the plain parameters that one would write oneself.

    python benchmarks/wrapper_overhead.py                    two minutes; exits 1 if the median is above 1.03
    python benchmarks/wrapper_overhead.py --clock core       on a machine with other work; not for the async engine
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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
KINDS = {"in-process": "VllmEngine, in process", "async": "VllmAsyncEngine"}
numbers = itertools.count()


def params_of(engine, workload):
    """vLLM's parameters as our engine makes them, with vLLM's own way to give several answers; one object for all."""
    from rl_generation.vllm.sampling_params import to_sampling_params

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
    from vllm import TokensPrompt

    def prepare(prompts):
        ready = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        params = params_of(engine, workload)
        return lambda: engine.llm.generate(ready, params, use_tqdm=False)

    return prepare, count


def bare_async(engine, workload):
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


def as_it_comes(llm, workload):
    from vllm import SamplingParams, TokensPrompt

    def prepare(prompts):
        ready = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        params = SamplingParams(
            n=workload.n,
            max_tokens=workload.max_new_tokens,
            stop_token_ids=list(workload.stops),
            ignore_eos=True,
            logprobs=0,
        )
        return lambda: llm.generate(ready, params, use_tqdm=False)

    return prepare, count


def alone(make, engine, workload):
    """The same with a request for each answer."""
    prepare, count_tokens = make(engine, replace(workload, n=1))
    return lambda prompts: prepare([prompt for prompt in prompts for _ in range(workload.n)]), count_tokens


def ours(engine, workload):
    sampling = sampling_of(workload)

    def prepare(prompts):
        return lambda: engine.generate(prompts, sampling)

    return prepare, lambda rollouts: sum(len(rollout.tokens) for rollout in rollouts)


def timed(way, prompts):
    """Seconds for each token, by the clock on the wall and on this process's cores."""
    prepare, tokens_of = way
    call = prepare(prompts)
    gc.collect()
    cpu, start = cpu_seconds(), time.perf_counter()
    answers = call()
    spent = (time.perf_counter() - start, cpu_seconds() - cpu)
    tokens = tokens_of(answers)
    return [each / tokens for each in spent]


def measure(ways, workload, rounds: int):
    """Way → clock → seconds for each token, a round."""
    names = list(ways)
    found = {name: {"wall": [], "core": []} for name in names}
    order = random.Random(0)
    for number in range(-2, rounds):  # the first two warm up
        for place, name in enumerate(order.sample(names, len(names))):
            wall, core = timed(ways[name], workload.draw(100 * number + place))
            if number >= 0:
                found[name]["wall"].append(wall)
                found[name]["core"].append(core)
    return found


def compare(found):
    """Way → clock → median and quartiles of its ratio to bare vLLM."""
    rows = {}
    for name, clocks in found.items():
        rows[name] = {"tokens_per_s": 1 / statistics.median(clocks["wall"])}
        for clock, spent in clocks.items():
            ratios = [mine / theirs for mine, theirs in zip(spent, found["bare"][clock], strict=True)]
            low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
            rows[name][clock] = {"ratio": median, "quartiles": [low, high]}
    return rows


@contextlib.contextmanager
def ways_of(kind: str, path: str):
    """What makes the ways to compare, of a workload."""
    from rl_generation.vllm import VllmAsyncEngine, VllmEngine

    def ways(make, engine, workload):
        found = {"bare": make(engine, workload), "ours": ours(engine, workload), "bare again": make(engine, workload)}
        return found if workload.n == 1 else {**found, "bare, each alone": alone(make, engine, workload)}

    if kind == "async":
        with VllmAsyncEngine(vllm_options(path), stop_token_ids=[]) as engine:
            yield lambda workload: ways(bare_async, engine, workload)
        return
    with VllmEngine(vllm_options(path), stop_token_ids=[]) as engine:
        llm = plain_llm(path)
        yield lambda workload: {**ways(bare, engine, workload), "as it comes": as_it_comes(llm, workload)}
        llm.llm_engine.engine_core.shutdown()


def plain_llm(path: str):
    """A second engine in this process, of the same size."""
    from vllm import LLM

    options = vllm_options(path)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        return LLM(
            model=path,
            dtype=options.dtype,
            enforce_eager=options.enforce_eager,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            kv_cache_memory_bytes=options.kv_cache_memory_bytes,
            skip_tokenizer_init=True,
        )
    finally:
        del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]


def show(kind: str, workload, rows) -> None:
    print(f"\n{KINDS[kind]}, {workload.name}: {workload.prompts} prompts x {workload.n}")
    print(f"{'':18}{'tokens/s':>10}{'wall / bare':>13}{'quartiles':>16}{'core / bare':>13}{'quartiles':>16}")
    for name, row in rows.items():
        cells = "".join(
            f"{row[clock]['ratio']:13.3f}{row[clock]['quartiles'][0]:10.3f}-{row[clock]['quartiles'][1]:.3f}"
            for clock in ("wall", "core")
        )
        print(f"{name:18}{row['tokens_per_s']:10.0f}{cells}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="tiny", help="the smaller, the dearer a wrapper")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--clock", choices=("wall", "core"), default="wall", help="which one is judged")
    arguments = parser.parse_args()
    if not has_vllm():
        print("vLLM is not installed, so there is nothing to compare with")
        show_json({"benchmark": "wrapper_overhead", "not_installed": ["vllm"]})
        return 0
    os.environ.update(ENVIRONMENT)
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(arguments.model, Path(folder))
        for kind in arguments.kinds:
            with ways_of(kind, path) as ways:
                figures[kind] = {
                    workload.name: compare(measure(ways(workload), workload, arguments.rounds))
                    for workload in WORKLOADS.values()
                }
            for name, rows in figures[kind].items():
                show(kind, WORKLOADS[name], rows)
    worst = max(rows["ours"][arguments.clock]["ratio"] for each in figures.values() for rows in each.values())
    print(f"\nours takes at most {worst:.3f} x bare vLLM ({arguments.clock}); the limit is {LIMIT}")
    settings = {"model": arguments.model, "rounds": arguments.rounds, "clock": arguments.clock, "limit": LIMIT}
    show_json({"benchmark": "wrapper_overhead", **settings, "worst": worst, "holds": worst <= LIMIT, "kinds": figures})
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
