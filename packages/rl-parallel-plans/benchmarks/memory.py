"""Predicted memory of a Llama-3.1-8B training step, FSDP2 over 2 x TP 4, by how the loss reads the lm_head.

16,384 tokens a dp rank (8 rows of 2048), bf16 forward, fp32 shards, gradients and AdamW state, layers recomputed in
backward. Compared with what a gathered lm_head was published to cost against a sharded one on this setup: 3.9 at the
lm_head's forward and 16.3 after forward and backward. Needs transformers, no GPU. Ends with one line of JSON.
"""

import json
import time

import torch
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from rl_parallel_plans.forecast.memory import memory
from rl_parallel_plans.forecast.report import GIB, memory_table

LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
STEP = {"tp": 4, "dp": 2, "batch_size": 8, "sequence_length": 2048, "activation_checkpointing": "full"}
PUBLISHED_GIB = {"after the lm_head": 3.9, "peak": 16.3}


class WholeShard(torch.autograd.Function):
    """Log-probabilities from a rank's whole slice of logits in fp32, as trainers have them that do it in one piece.

    The softmax is kept, and backward makes a one-hot matrix of int64 like it.
    """

    @staticmethod
    def forward(ctx, logits, targets):
        logits = logits.float()
        shifted = logits - logits.amax(-1, keepdim=True)
        log_p = shifted - shifted.exp().sum(-1, keepdim=True).log()
        targets = targets.remainder(logits.shape[-1])
        ctx.save_for_backward(log_p.exp(), targets)
        return log_p.gather(-1, targets[..., None]).squeeze(-1)

    @staticmethod
    def backward(ctx, grad):
        p, targets = ctx.saved_tensors
        mine = (targets >= 0)[..., None]
        chosen = mine * torch.nn.functional.one_hot(targets, num_classes=p.shape[-1])
        return chosen.float().sub_(p).mul_(grad[..., None]), None


def whole_shard(logits, ids):
    local = logits.to_local() if isinstance(logits, DTensor) else logits
    return -WholeShard.apply(local, ids).mean()


CONFIGURATIONS = {
    "gathered": {"lm_head": "gathered"},
    "sharded, in one piece": {"lm_head": "sharded", "loss": whole_shard},
    "sharded, in chunks": {"lm_head": "sharded"},
    "linear_logp": {"lm_head": "linear_logp"},
    "linear_logp, SP, fused AdamW": {"lm_head": "linear_logp", "sequence_parallel": True, "optimizer": "adamw_fused"},
    "linear_logp, all kept": {"lm_head": "linear_logp", "activation_checkpointing": None},
    "gathered, all kept": {"lm_head": "gathered", "activation_checkpointing": None},
}


def main():
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA_8B))
    reports, seconds, cpu_seconds = {}, {}, {}
    for name, options in CONFIGURATIONS.items():
        start, cpu_start = time.perf_counter(), time.process_time()
        reports[name] = memory(model, **{**STEP, **options})
        seconds[name] = round(time.perf_counter() - start, 2)
        cpu_seconds[name] = round(time.process_time() - cpu_start, 2)
    print(memory_table(reports))
    whole, sharded = reports["gathered"], reports["sharded, in one piece"]
    saved = {
        "after the lm_head": whole.phase("after the lm_head").num_bytes - sharded.phase("after the lm_head").num_bytes,
        "peak": whole.peak.num_bytes - sharded.peak.num_bytes,
    }
    print()
    for where, num_bytes in saved.items():
        print(f"sharded in one piece saves {num_bytes / GIB:.2f} GiB ({where}); published: {PUBLISHED_GIB[where]}")
    print(
        f"a prediction took {min(seconds.values())} to {max(seconds.values())} s, {max(cpu_seconds.values())} s of CPU"
    )
    figures = {
        name: {
            "peak_gib": round(report.peak.num_bytes / GIB, 2),
            "peak_phase": report.peak.name,
            "seconds": seconds[name],
            "cpu_seconds": cpu_seconds[name],
            **{phase.name: round(phase.num_bytes / GIB, 2) for phase in report.phases},
        }
        for name, report in reports.items()
    }
    saved_gib = {where: round(num_bytes / GIB, 2) for where, num_bytes in saved.items()}
    told = {"memory": figures, "saved_gib": saved_gib, "published_gib": PUBLISHED_GIB, "torch": torch.__version__}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
