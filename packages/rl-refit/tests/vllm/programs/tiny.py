"""Tiny models of five architectures, engines of them, and what engines say."""

import asyncio
import contextlib
import gc
import re
import threading
from pathlib import Path

import torch

PROMPTS = [list(range(5 + i, 25 + i)) * 8 for i in range(3)]  # 160 tokens: more than a block of the prefix cache

PATIENCE_S = 120


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def start(self, what):
        return asyncio.run_coroutine_threadsafe(what, self.loop)

    def run(self, what):
        return self.start(what).result(PATIENCE_S)

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(PATIENCE_S)
        self.loop.close()


def policy(architecture, seed):
    """A model of transformers with random weights, wide enough that its answers depend on them."""
    import transformers

    shape = {
        "vocab_size": 260,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    head = {"head_dim": 32}  # vLLM's attention on a CPU needs 32 or more
    config, model = {
        "llama": lambda: (transformers.LlamaConfig(**shape), transformers.LlamaForCausalLM),
        "qwen2": lambda: (transformers.Qwen2Config(**shape, tie_word_embeddings=True), transformers.Qwen2ForCausalLM),
        "qwen3": lambda: (
            transformers.Qwen3Config(**shape, **head, tie_word_embeddings=True),
            transformers.Qwen3ForCausalLM,
        ),
        "qwen3_moe": lambda: (
            transformers.Qwen3MoeConfig(
                **shape,
                **head,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                decoder_sparse_step=1,
                norm_topk_prob=True,
            ),
            transformers.Qwen3MoeForCausalLM,
        ),
        "gemma3": lambda: (
            transformers.Gemma3TextConfig(
                **{**shape, "num_hidden_layers": 6}, **head, query_pre_attn_scalar=32, sliding_window=32
            ),
            transformers.Gemma3ForCausalLM,
        ),
    }[architecture]()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = model(config).float().requires_grad_(requires_grad=False)
        if architecture == "gemma3":  # tied and scaled by sqrt(hidden): wider, and it repeats one token for ever
            made.model.embed_tokens.weight.normal_(0, 0.06)
    return made


def source(model):
    """The model as a source under the names of its checkpoint, which has an expert a tensor."""
    from rl_refit.fused import stacked_experts
    from rl_refit.source import ModuleSource

    def experts(module):
        for name, parameter in module.named_parameters():
            found = re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", name)
            if found:
                prefix, part = found.groups()
                names = [f"{prefix}.{expert}.{{}}_proj.weight" for expert in range(len(parameter))]
                pairs = [(each.format("gate"), each.format("up")) for each in names]
                downs = [each.format("down") for each in names]
                yield from stacked_experts(parameter.detach(), pairs if part == "gate_up" else downs, part=part)

    return ModuleSource(model, bindings=experts if hasattr(model.config, "num_experts") else None)


def options(path, **others):
    """What every engine here is made with."""
    return {
        "model": path,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 32 << 20,
        "disable_log_stats": True,
        "seed": 0,
        **others,
    }


@contextlib.contextmanager
def engine(path, **others):
    """An `LLM` for as long as it is needed."""
    from vllm import LLM

    llm = LLM(**options(path, **others))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


@contextlib.contextmanager
def async_engine(loop, path, **others):
    """An `AsyncLLM` that `loop`, a `Loop`, runs for as long as it is needed."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def start():
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**options(path, **others)))

    async def stop():
        engine.shutdown()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    engine = loop.start(start()).result(3 * PATIENCE_S)
    try:
        yield engine
    finally:
        loop.run(stop())


def sampling(**others):
    """Greedy, with the logp of each token, to the full length."""
    from vllm import SamplingParams

    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": 16, "logprobs": 0, "ignore_eos": True, "detokenize": False, **others}
    )


def generate(llm, **others):
    """Tokens, and the logp of each, for every prompt."""
    from vllm import TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in PROMPTS]
    requests = llm.generate(prompts, sampling(**others), use_tqdm=False)
    return [read(request) for request in requests]


def shared_files(process):
    """Inode → whether it is "(deleted)", of the files in shared memory that a process has mapped."""
    rows = (line.split() for line in Path(f"/proc/{process}/maps").read_text().splitlines())
    return {int(row[4]): row[-1] for row in rows if len(row) > 5 and row[5].startswith("/dev/shm/")}


def read(request):
    """Tokens and their logp, of a finished request."""
    (answer,) = request.outputs
    return list(answer.token_ids), [each[t].logprob for t, each in zip(answer.token_ids, answer.logprobs, strict=True)]


def same(ours, theirs, *, tolerance=1e-5):
    """Whether the tokens are the same, and each logp within `tolerance`."""
    return all(
        tokens == others and all(abs(a - b) <= tolerance for a, b in zip(logp, other, strict=True))
        for (tokens, logp), (others, other) in zip(ours, theirs, strict=True)
    )
