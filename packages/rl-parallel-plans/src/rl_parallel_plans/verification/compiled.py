"""Layers of the sharded model under torch.compile, each by itself, and what the compiler made of them."""

from typing import Any

import torch
from torch import nn

from rl_parallel_plans.structure import stacked_layers


def compile_layers(model: nn.Module, backend: str) -> None:
    """`layer.compile(backend=...)` for every layer of every stack, as torchtitan compiles a model."""
    import torch._inductor.config as inductor
    from torch._dynamo import config
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    inductor.compile_threads = 1  # ranks are forked, and take no pool of processes along
    # Without this, layers beyond the limit run without the compiler, and nothing says so.
    config.fail_on_recompile_limit_hit = True
    for layer in stacked_layers(model).values():
        layer.compile(backend=backend)


def compiler_facts() -> dict[str, Any]:
    """Graphs and graph breaks since `compile_layers`, with the reason of each break."""
    from torch._dynamo.utils import counters

    return {
        "graphs": int(counters["stats"].get("unique_graphs", 0)),
        "breaks": {str(reason).strip().splitlines()[0][:200]: n for reason, n in counters["graph_break"].items()},
    }
