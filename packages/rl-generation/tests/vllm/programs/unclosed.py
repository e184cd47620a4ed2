"""A program that ends with an engine open and a request under way.

python unclosed.py MODEL

Prints the ids of the engine's processes.
"""

import sys

import tiny

from rl_generation.requests import Sampling
from rl_generation.vllm import VllmEngine


def main():
    (model,) = sys.argv[1:]
    engine = VllmEngine(tiny.options(model))
    under_way = engine.submit([5, 6], Sampling(max_new_tokens=480, ignore_eos=True), seed=0)
    engine.generate([[5]], Sampling(max_new_tokens=3))
    print(*engine.process_ids, flush=True)
    return engine, under_way


if __name__ == "__main__":
    kept = main()
