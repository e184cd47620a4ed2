"""What the benchmarks here generate with, and what they ask for: tiny models of random weights, and new prompts.

Every token is about as likely as every other, so that how long answers become is known: to the limit where nothing
stops them, and geometric, of mean 13, where four of the vocabulary's 51 tokens do.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import random
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # else the first request for logprobs compiles
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else two workers need two NUMA nodes
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""One thread each, and what vLLM needs on a CPU. Before anything imports torch."""

VOCAB_SIZE, PAD, STOPS = 51, 0, (2, 20, 21, 22)
MODELS = {"tiny": (2, 128), "small": (4, 256)}
"""Name → layers, hidden size; the first is the quickstart's, with heads that vLLM's attention on a CPU can take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """So many prompts of 8 to 24 tokens, `n` answers to each."""

    name: str
    prompts: int
    n: int
    max_new_tokens: int
    stops: tuple[int, ...] = ()
    generate_batch: int
    """Rows at once at which `transformers.generate` is fastest; of a long tail, it decodes the finished ones too."""

    def draw(self, seed: int) -> list[list[int]]:
        """Prompts of the same lengths for every seed, and other tokens: no engine has them in its prefix cache."""
        lengths, tokens = random.Random(0), random.Random(seed)
        return [[tokens.randrange(3, VOCAB_SIZE) for _ in range(lengths.randint(8, 24))] for _ in range(self.prompts)]


WORKLOADS = {
    "fixed": Workload(name="fixed", prompts=64, n=1, max_new_tokens=32, generate_batch=64),
    "long tail": Workload(name="long tail", prompts=64, n=8, max_new_tokens=96, stops=STOPS, generate_batch=32),
}


def save_model(name: str, folder: Path) -> str:
    """Write a Qwen3 of random weights in float32, and return where."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    layers, hidden = MODELS[name]
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,  # tied, and a model of random weights repeats its last token
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=STOPS[0],
    )
    path = folder / name
    transformers.Qwen3ForCausalLM(config).save_pretrained(path)
    return str(path)


def vllm_options(model: str):
    """What each vLLM engine here is made with."""
    from rl_generation.vllm import VllmOptions

    return VllmOptions(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=256,
        kv_cache_memory_bytes=256 << 20,
    )


def has_vllm() -> bool:
    return find_spec("vllm") is not None


def cpu_seconds(process_ids=()) -> float:
    """Time that this process and others have been on a core."""
    # What clock_getcpuclockid(3) gives for a process.
    return time.process_time() + sum(time.clock_gettime((~each << 3) | 2) for each in process_ids)


def versions() -> dict[str, str | None]:
    """Of what was measured; None where it is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "transformers", "vllm"):
        found[name] = None
        for distribution in (name, f"{name}-cpu"):  # vLLM for CPUs goes by another name
            if found[name] is None and find_spec(name) is not None:
                found[name] = _version(distribution)
    return found


def machine() -> str:
    return f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"


def show_json(figures: dict[str, object]) -> None:
    """The last line."""
    print(json.dumps({**figures, "versions": versions(), "machine": machine()}))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
