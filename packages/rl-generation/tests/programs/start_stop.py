"""Starts an engine, generates with it and stops it, again and again; says what is held after each time.

    python start_stop.py KIND CYCLES MODEL

KIND: `embedded` or `vllm`. MODEL: the folder of a checkpoint.
Prints one line of JSON: what was held before the first time and after each, and which objects outlived theirs.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import json
import os
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from footprint import Footprint, footprint, mapped_by_family, threads

from rl_generation.requests import Sampling

PROMPTS = [[1, 5, 6], [1, 7, 8, 9, 10]]
SAMPLING = Sampling(max_new_tokens=8, n=2, ignore_eos=True)
ENDLESS = Sampling(max_new_tokens=100, ignore_eos=True)
seen: set[int] = set()
"""Inodes of what was in shared memory while engines were running."""


def embedded(path: str) -> list[object]:
    """One stopped while it works; and one some of whose streams nobody reads to the end."""
    from rl_generation.transformers_engine import TransformersEngine

    models = [copy.deepcopy(load(path)) for _ in range(2)]
    alone, streamed = (TransformersEngine(model, stop_token_ids=[2], pad_token_id=0) for model in models)
    check(alone.generate(PROMPTS, SAMPLING))
    alone.submit(PROMPTS[0], ENDLESS, seed=0)
    seen.update(mapped_by_family())
    alone.close()
    asyncio.run(read(streamed))
    streamed.close()
    return [alone, streamed, *models]


@functools.cache
def load(path: str):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path)


async def read(engine) -> None:
    """One stream to its end, and one to its first tokens."""
    tokens = [delta.tokens async for delta in engine.stream(PROMPTS[0], SAMPLING)]
    if sum(map(len, tokens)) != SAMPLING.n * SAMPLING.max_new_tokens:
        raise SystemExit(f"a stream brought {tokens}")
    stream = engine.stream(PROMPTS[1], ENDLESS)
    await anext(stream)
    await stream.aclose()


def options(path: str):
    from rl_generation.vllm import VllmOptions

    return VllmOptions(
        model=path,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=8,
        kv_cache_memory_bytes=64 << 20,
    )


def of_vllm(path: str) -> list[object]:
    """Asked for whole answers and for streams, and stopped while it works."""
    from rl_generation.vllm import VllmEngine

    with VllmEngine(options(path)) as engine:
        check(engine.generate(PROMPTS, SAMPLING))
        asyncio.run(read(engine))
        engine.submit(PROMPTS[0], ENDLESS, seed=0)
        seen.update(mapped_by_family())
        return [engine, engine.vllm]


KINDS: dict[str, Callable[[str], list[object]]] = {"embedded": embedded, "vllm": of_vllm}


def check(rollouts) -> None:
    if [len(rollout.tokens) for rollout in rollouts] != [SAMPLING.max_new_tokens] * len(PROMPTS) * SAMPLING.n:
        raise SystemExit(f"unexpected answers: {rollouts}")


def cycle(kind: str, path: str) -> list[weakref.ref]:
    return [weakref.ref(each) for each in KINDS[kind](path)]


def settle(before: Footprint, *, patience_s: float) -> None:
    """Wait a little for threads that have ended to be gone: Python says so before the system does."""
    deadline = time.monotonic() + patience_s
    while sum(threads().values()) > sum(before.threads.values()) and time.monotonic() < deadline:
        time.sleep(0.005)


def import_engine(kind: str) -> None:
    """Whatever is imported once sets environment variables, and keeps the frames of errors that it overcame."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if kind != "embedded":
        from vllm import LLM, EngineArgs  # noqa: F401
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: F401


def main() -> None:
    kind, cycles, path = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    temporary = Path(tempfile.gettempdir())
    import_engine(kind)
    before = footprint(temporary, seen)
    held, outlived = [], []
    for number in range(int(cycles)):
        made = cycle(kind, path)
        gc.collect()
        if number == 0:
            gc.freeze()  # modules, which never go: to look at them each time costs more than a cycle
        outlived.append([type(thing).__name__ for each in made if (thing := each()) is not None])
        # After the first time some may stay for good, and to wait for them is in vain.
        settle(held[0] if held else before, patience_s=60.0 if held else 10.0)
        held.append(footprint(temporary, seen))
    figures = {"before": before.as_dict(), "after": [each.as_dict() for each in held], "outlived": outlived}
    print(json.dumps(figures), file=answers, flush=True)


if __name__ == "__main__":
    main()
