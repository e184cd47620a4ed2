"""What a rank pays to plan a refit of a trillion parameters, from FSDP over 256 ranks to 128 expert-parallel ranks.

    python packages/rl-refit/benchmarks/plan_at_scale.py [--sources 256] [--sinks 128] [--layers 61] [--experts 384]

The shapes are those of Kimi K2, an expert a tensor. Timed in this process, with nothing but manifests: the plan of all
parties and its hash, and the buckets of the busiest sink rank and of one source rank, which are all that a rank makes.
The bars are 10 s and 500 MB a rank. The last line is JSON.
"""

import argparse
import json
import resource
import time

from rl_refit import Layout, Manifest, TensorMeta, plan_refit
from rl_refit.schedule import make_schedule

HIDDEN, EXPERT, VOCAB = 7168, 2048, 163_840


def sides(sources, sinks, layers, experts):
    """The manifests: every tensor cut over its rows, and each expert on one rank, the rest on every rank."""
    sharded = Layout.from_placements((sources,), (0,))
    everywhere = Layout.from_placements((sinks,), (None,))
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    owners = {}
    for layer in range(layers):
        shapes |= {
            f"model.layers.{layer}.self_attn.{name}.weight": shape
            for name, shape in (
                ("q_a_proj", (1536, HIDDEN)),
                ("q_b_proj", (12_288, 1536)),
                ("kv_a_proj_with_mqa", (576, HIDDEN)),
                ("kv_b_proj", (16_384, 512)),
                ("o_proj", (HIDDEN, 8192)),
            )
        }
        for expert in range(experts):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            for name, shape in (("gate", (EXPERT, HIDDEN)), ("up", (EXPERT, HIDDEN)), ("down", (HIDDEN, EXPERT))):
                shapes[f"{prefix}.{name}_proj.weight"] = shape
                owners[f"{prefix}.{name}_proj.weight"] = expert * sinks // experts
    on_one = {
        (rank, shape): Layout.from_boxes({each: [_whole(shape)] if each == rank else [] for each in range(sinks)})
        for rank in range(sinks)
        for shape in ((EXPERT, HIDDEN), (HIDDEN, EXPERT))
    }
    source, sink = [], []
    for name, shape in shapes.items():
        layout = on_one[owners[name], shape] if name in owners else everywhere
        source.append(TensorMeta(name=name, shape=shape, dtype="bfloat16", layout=sharded))
        sink.append(TensorMeta(name=name, shape=shape, dtype="bfloat16", layout=layout))
    return Manifest(tuple(source)), Manifest(tuple(sink))


def _whole(shape):
    from rl_refit import Region

    return Region("", (0,) * len(shape), shape)


def main():
    """Plan, and say what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("sources", 256), ("sinks", 128), ("layers", 61), ("experts", 384)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    source, sink = sides(asked.sources, asked.sinks, asked.layers, asked.experts)
    source.hash(), sink.hash()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    plan = plan_refit(source, sink)
    plan.hash()
    planned = time.process_time()
    schedule = make_schedule(plan, bucket_bytes=4 << 20)
    received = sum(len(stream.buckets) for stream in schedule.of(sink_rank=0))
    of_sink = time.process_time()
    sent = sum(len(stream.buckets) for stream in schedule.of(source_rank=0))
    of_source = time.process_time()
    figures = {
        "tensors": len(sink.tensors),
        "parameters": sum(meta.total_bytes for meta in sink.tensors) // 2,
        "routes": plan.num_routes,
        "kinds": len(plan.tensors),
        "plan_s": round(planned - start, 2),
        "sink_rank_s": round(of_sink - planned, 2),
        "source_rank_s": round(of_source - of_sink, 2),
        "buckets": [received, sent],
        "megabytes": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
