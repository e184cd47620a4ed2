"""Time of vLLM's own reload of a checkpoint in shared memory over one memcpy of the same bytes, on the CPU.

A Llama of about 300 tensors in bfloat16. The trainer's half is `save_pretrained` into shared memory, the engine's is
`reload_weights` and a reset of the prefix cache; both count. Two sets of weights take turns, and after each reload the
log-probabilities of an answer must be those that the same weights gave the first time, and not the others'.

    python benchmarks/vllm_reload.py --megabytes 1000 --rounds 7        in an environment with vllm; takes minutes
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time

os.environ |= {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams, TokensPrompt

HIDDEN, INTERMEDIATE, VOCABULARY = 1024, 3072, 1024


def build(megabytes: float, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    per_layer = 2 * (2 * HIDDEN**2 + 2 * HIDDEN * HIDDEN // 2 + 3 * HIDDEN * INTERMEDIATE)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=max(1, round(megabytes * 1e6 / per_layer)),
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
        initializer_range=0.05,
        dtype="bfloat16",
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def answer(llm: LLM) -> list[float]:
    """Log-probabilities of the tokens of a prompt: what the weights say, whatever is sampled."""
    prompt = TokensPrompt(prompt_token_ids=list(range(3, 40)))
    options = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    rows = llm.generate(prompt, options, use_tqdm=False)[0].prompt_logprobs
    return [row[token].logprob for token, row in zip(range(4, 40), rows[1:], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    policies = [build(arguments.megabytes, seed) for seed in (0, 1)]
    copies = [torch.empty_like(parameter) for parameter in policies[0].parameters()]
    nbytes = sum(parameter.nbytes for parameter in policies[0].parameters())
    seconds: dict[str, list[float]] = {"memcpy": [], "save": [], "reload": []}
    first: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory, torch.no_grad():
        policies[0].save_pretrained(directory)
        llm = LLM(
            model=directory,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=64,
            kv_cache_memory_bytes=64 << 20,
            disable_log_stats=True,
        )
        for number in range(arguments.rounds + 2):  # the first two say what the two policies answer
            which = number % 2
            start = time.perf_counter()
            for copy, parameter in zip(copies, policies[which].parameters(), strict=True):
                copy.copy_(parameter)
            copied = time.perf_counter()
            policies[which].save_pretrained(directory)
            saved = time.perf_counter()
            llm.collective_rpc("reload_weights")
            llm.reset_prefix_cache()
            reloaded = time.perf_counter()
            said = answer(llm)
            if said != first.setdefault(which, said) or said == first.get(1 - which):
                raise SystemExit(f"round {number}: the reload did not arrive")
            if number >= 2:
                for name, spent in zip(seconds, (copied - start, saved - copied, reloaded - saved), strict=True):
                    seconds[name].append(spent)
    ms = {name: round(1e3 * statistics.median(spent), 2) for name, spent in seconds.items()}
    ratio = round((ms["save"] + ms["reload"]) / ms["memcpy"], 2)
    print(f"{len(copies)} tensors, {nbytes / 1e6:.0f} MB, medians of {arguments.rounds} rounds")
    print(f"memcpy {ms['memcpy']} ms; save {ms['save']} ms and reload {ms['reload']} ms: {ratio} × memcpy")
    figures = {
        "benchmark": "vllm_reload",
        "tensors": len(copies),
        "bytes": nbytes,
        "rounds": arguments.rounds,
        "memcpy_ms": ms["memcpy"],
        "save_ms": ms["save"],
        "reload_ms": round(ms["save"] + ms["reload"], 2),
        "over_memcpy": ratio,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
