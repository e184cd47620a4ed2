"""Seconds of a refit into vLLM, by phase, beside a checkpoint that is saved on disk and reloaded by vLLM itself.

The two take turns, round by round, in one process; what is saved stays in the cache of the file system. Before each
round the engine has other weights, and after it a greedy answer is compared with that of the other way.

    python benchmarks/refit_vllm.py                     a Llama of 27 M parameters in float32, 109 MB
    python benchmarks/refit_vllm.py --layers 24         and so on: --hidden, --vocabulary, --rounds

Needs vLLM, and transformers, which comes with it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
PHASES = ("prepare", "transfer", "verify", "commit")


def make_policies(arguments, folder: Path) -> list:
    """Two models of the same shape and other weights, and their checkpoints in `folder`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=3 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=arguments.hidden // 64,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    policies = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        policies.append(LlamaForCausalLM(config).float())
        policies[-1].save_pretrained(folder / str(seed))
    return policies


def make_engine(path: Path):
    from vllm import LLM

    from rl_refit.vllm import WORKER_EXTENSION

    return LLM(
        model=str(path),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=64 << 20,
        seed=0,
        worker_extension_cls=WORKER_EXTENSION,
    )


def answer(llm) -> tuple[int, ...]:
    from vllm import SamplingParams, TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=list(range(5, 25)))
    options = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    (request,) = llm.generate([prompt], options, use_tqdm=False)
    return tuple(request.outputs[0].token_ids)


def measure(llm, policies, folder: Path, *, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round, by way and by phase."""
    from rl_refit.refit import Refit
    from rl_refit.source import ModuleSource
    from rl_refit.vllm import VllmSink
    from rl_refit.vllm.reload import must_repair, repack_vocabulary

    sink = VllmSink(llm)
    refits = [Refit(ModuleSource(policy), sink) for policy in policies]
    llm.llm_engine.vllm_config.load_config.load_format = "auto"  # it was made with random weights
    seconds: dict[str, list[float]] = {}
    for number in range(rounds + 1):  # the first warms up: it surveys the engine and allocates the bank
        fresh, other = number % 2, 1 - number % 2
        report = refits[fresh](version=2 * number)
        ours = answer(llm)
        refits[other](version=2 * number + 1)
        start = time.perf_counter()
        policies[fresh].save_pretrained(folder / str(fresh))
        save = time.perf_counter() - start
        start += save
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder / str(fresh))})
        if must_repair():
            llm.apply_model(repack_vocabulary)
        llm.reset_prefix_cache()
        reload = time.perf_counter() - start
        if answer(llm) != ours:
            raise SystemExit("the two ways do not lead to the same weights")
        if number:
            spent = {"refit": report.total_seconds, **report.seconds, "save": save, "reload": reload}
            for way, each in spent.items():
                seconds.setdefault(way, []).append(each)
    print(f"{report.tensors} tensors, {report.bytes / 1e6:.0f} MB, verified: {report.verified}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    if find_spec("vllm") is None:
        print("vLLM is not installed, so there is nothing to compare with")
        print(json.dumps({"benchmark": "refit_vllm", "skipped": "vllm is not installed"}))
        return
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        policies = make_policies(arguments, Path(folder))
        nbytes = sum(parameter.nbytes for parameter in policies[0].parameters())
        llm = make_engine(Path(folder) / "0")
        seconds = measure(llm, policies, Path(folder), rounds=arguments.rounds)
    import torch
    import vllm

    median = {way: statistics.median(spent) for way, spent in seconds.items()}
    print(f"vLLM {vllm.__version__}, medians of {arguments.rounds} rounds")
    disk = median["save"] + median["reload"]
    for way, spent in {**median, "save and reload": disk}.items():
        print(f"{'  ' * (way in PHASES)}{way:20s}{1e3 * spent:9.1f} ms")
    print(f"over the disk it takes {disk / median['refit']:.2f} times as long; the reload alone is not verified")
    figures = {
        "benchmark": "refit_vllm",
        "bytes": nbytes,
        "rounds": arguments.rounds,
        **{f"{way.replace(' ', '_')}_ms": round(1e3 * spent, 2) for way, spent in median.items()},
        "save_and_reload_over_refit": round(disk / median["refit"], 3),
        "commit_over_reload": round(median["commit"] / median["reload"], 3),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
