"""Predicted memory of a Llama-3.1-8B training step, FSDP2 over 2 x TP 4, by how the loss reads the lm_head.

16,384 tokens a dp rank (8 rows of 2048), bf16 forward, fp32 shards, gradients and AdamW state, layers recomputed in
backward. Compared with what a gathered lm_head was published to cost against a sharded one on this setup: 3.9 at the
lm_head's forward and 16.3 after forward and backward. Needs transformers, no GPU. Ends with one line of JSON.
"""

import json
import time
from pathlib import Path

import torch

from rl_parallel_plans.forecast.fit import GIB
from rl_parallel_plans.forecast.memory import memory
from rl_parallel_plans.forecast.report import memory_table
from rl_parallel_plans.model_source import build, read_config

LLAMA_8B = Path(__file__).parent / "llama-3.1-8b"
STEP = {"tp": 4, "dp": 2, "batch_size": 8, "sequence_length": 2048, "activation_checkpointing": "full"}
PUBLISHED_GIB = {"after the lm_head": 3.9, "peak": 16.3}


CONFIGURATIONS = {
    "gathered": {"lm_head": "gathered"},
    "sharded, in one piece": {"lm_head": "one_piece"},
    "sharded, in chunks": {"lm_head": "sharded"},
    "linear_logp": {"lm_head": "linear_logp"},
    "linear_logp, SP, fused AdamW": {"lm_head": "linear_logp", "sequence_parallel": True, "optimizer": "adamw_fused"},
    "linear_logp, all kept": {"lm_head": "linear_logp", "activation_checkpointing": None},
    "gathered, all kept": {"lm_head": "gathered", "activation_checkpointing": None},
}


def main():
    model = build(read_config(LLAMA_8B))
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
