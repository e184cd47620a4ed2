"""The cells of the table: models by meshes by layouts of the batch, cells of their own, and what each must come to.

A cell is exact (every quantity within its bar) or refused in the words that stand here.
"""

import dataclasses
import itertools

import transformers

from parity.problems import Problem
from rl_backends import KernelsConfig, LoraConfig

BAR = 1e-5
BFLOAT16_BAR = 5e-2

MODELS = ("Llama", "Qwen2", "Qwen3", "Gemma-3", "Mistral", "Phi-3", "Qwen3-MoE")
MESHES = {  # ranks, configuration, the share of the parameters that a rank may hold at most
    "1": (1, {}, 1.0),
    "FSDP2": (2, {}, 0.5),
    "TP2": (2, {"tensor_parallel_size": 2}, 0.5),
    "TP2+SP": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}, 0.5),
    "CP2": (2, {"context_parallel_size": 2}, 0.5),
    "EP2": (2, {"expert_parallel_size": 2}, 0.5),
    "FSDP4": (4, {}, 0.25),
    "HSDP 2x2": (4, {"data_parallel_replicate_size": 2}, 0.5),
    "FSDP2×TP2": (4, {"tensor_parallel_size": 2}, 0.25),
}
OTHER_MESHES = {  # for cells of their own
    "FSDP2×CP2": (4, {"context_parallel_size": 2}, 0.25),
    "CP2×TP2": (4, {"context_parallel_size": 2, "tensor_parallel_size": 2}, 0.25),
    "CP2×TP2+SP": (
        4,
        {"context_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True},
        0.25,
    ),
    "EP2×CP2": (4, {"expert_parallel_size": 2, "context_parallel_size": 2}, 0.25),
    "EP2×TP2": (4, {"expert_parallel_size": 2, "tensor_parallel_size": 2}, 0.25),
    "FSDP2×EP2": (4, {"expert_parallel_size": 2}, 0.25),
    "FSDP2×TP2+SP": (4, {"tensor_parallel_size": 2, "sequence_parallel": True}, 0.25),
    "PP2": (2, {"pipeline_parallel_size": 2}, 1.0),  # of its stage
    "PP2×FSDP2": (4, {"pipeline_parallel_size": 2}, 0.5),
    "PP2×TP2+SP": (4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True}, 0.5),
}
LAYOUTS = {
    "padded": {"micro_batch_size": 2},
    "packed": {"sequence_packing": True, "micro_batch_tokens": 30},
    "dynamic": {"micro_batch_tokens": 40},
}

NO_EXPERTS = "the model has no stacked experts"
STACKED_EXPERTS = int(transformers.__version__.split(".")[0]) >= 5  # before, each was a module of its own


REFUSED_CONFIGURATIONS = [  # by themselves, whatever the model and the ranks
    (
        MESHES["CP2"][1] | LAYOUTS["packed"] | {"share_prefixes": True},
        "context_parallel_size > 1 cannot be combined with share_prefixes",
    ),
    (
        {"kernels": KernelsConfig(attention="flex"), "context_parallel_size": 2},
        "kernels.attention='flex' cannot be used: it runs on cuda, not on a CPU; context parallelism",
    ),
    ({"kernels": KernelsConfig(attention="varlen")}, "it computes in bfloat16, not in float32; it reads packed rows"),
    ({"kernels": KernelsConfig(norm="liger")}, "kernels.norm='liger' cannot be used: it runs on cuda, not on a CPU"),
    ({"kernels": KernelsConfig(loss="liger")}, "kernels.loss='liger' cannot be used: it runs on cuda, not on a CPU"),
    ({"kernels": KernelsConfig(float8="rowwise")}, "kernels.float8='rowwise' cannot be used: it runs on cuda"),
    (
        {"pipeline_parallel_size": 2, "micro_batch_tokens": 64},
        "pipeline_parallel_size > 1 cannot be combined with micro_batch_tokens of padded rows",
    ),
    (
        {"pipeline_parallel_size": 2, "context_parallel_size": 2},
        "pipeline_parallel_size > 1 cannot be combined with context_parallel_size > 1",
    ),
    ({"sequence_parallel": True}, "sequence_parallel=True needs tensor_parallel_size > 1"),
    ({"micro_batch_tokens": 0}, "micro_batch_tokens=0 must be >= 1"),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be >= 1"),
]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of the backend, and what it must come to."""

    model: str
    mesh: str
    layout: str
    problem: Problem
    config: dict = dataclasses.field(hash=False)
    ranks: int = 1
    calls: int = 1
    bar: float = BAR
    most_held: float = 1.0
    refusal: str | None = None
    slow: bool = False

    @property
    def name(self):
        return f"{self.model}, {self.mesh}, {self.layout}"


def table():
    """Models by meshes by layouts."""
    return [
        cell(model, mesh, layout)
        for mesh in MESHES
        for model in MODELS
        for layout in LAYOUTS
        if mesh != "EP2" or model == "Qwen3-MoE"
    ]


LORA, DORA = LoraConfig(rank=4, alpha=8), LoraConfig(rank=4, alpha=8, use_dora=True)


def apart():
    """What the table has no column for, one cell each."""
    pairs, cold = Problem("Qwen3", "pairs"), Problem("Qwen3", temperature=0.7)
    return [
        cell("Qwen3", "FSDP2", "padded", note="pairs that stay together", problem=pairs),
        cell("Qwen3", "FSDP2", "packed", note="pairs that stay together", problem=pairs),
        cell("Qwen3", "FSDP2", "padded", note="a rank without rows", problem=Problem("Qwen3", "one row")),
        cell("Qwen3", "FSDP2", "packed", note="a rank without rows", problem=Problem("Qwen3", "one row")),
        cell("Qwen3", "TP2", "packed", note="temperature 0.7", problem=cold),
        cell("Qwen3", "1", "padded", note="three calls a step", calls=3),
        cell("Qwen3", "FSDP2", "packed", note="three calls a step", calls=3),
        cell("Qwen3", "TP2+SP", "padded", note="three calls a step", calls=3),
        cell("Qwen3", "FSDP2", "padded", note="reduced at the last microbatch", reduce_gradients="last_microbatch"),
        cell(
            "Qwen3",
            "FSDP2",
            "packed",
            note="reduced at the last microbatch, three calls",
            reduce_gradients="last_microbatch",
            calls=3,
        ),
        cell("Qwen3", "HSDP 2x2", "padded", note="reduced at the last microbatch", reduce_gradients="last_microbatch"),
        cell("Qwen3", "FSDP2", "padded", note="all activations recomputed", activation_checkpointing="full"),
        cell("Qwen3", "TP2+SP", "packed", note="all activations recomputed", activation_checkpointing="full"),
        cell("Qwen3", "CP2", "padded", note="all activations recomputed", activation_checkpointing="full"),
        cell("Qwen3", "FSDP2", "padded", note="some activations recomputed", activation_checkpointing="selective"),
        cell("Phi-3", "TP2", "packed", note="some activations recomputed", activation_checkpointing="selective"),
        cell("Qwen3", "1", "padded", note="offloaded", cpu_offload=True),
        cell("Gemma-3", "FSDP2", "packed", note="offloaded", cpu_offload=True),
        cell("Llama", "1", "padded", note="compiled", compile=True),
        cell("Llama", "FSDP2", "padded", note="compiled", compile=True, problem=Problem("Llama", "one row")),
        cell("Llama", "FSDP2", "packed", note="compiled", compile=True, slow=True),
        cell("Llama", "CP2", "padded", note="compiled", compile=True, slow=True),
        cell("Llama", "CP2", "packed", note="compiled", compile=True),
        cell("Mistral, window of 6", "FSDP2×CP2", "packed", note="compiled", compile=True, slow=True),
        cell("Qwen3", "CP2×TP2+SP", "packed", note="compiled", compile=True, slow=True),
        cell("Qwen3", "CP2", "packed", note="all activations recomputed", activation_checkpointing="full"),
        cell("Llama", "TP2", "padded", note="compiled", compile=True, problem=Problem("Llama", "one row")),
        cell("Qwen3", "TP2+SP", "padded", note="compiled", compile=True, problem=Problem("Qwen3", "one row")),
        cell(
            "Qwen3",
            "FSDP2×TP2+SP",
            "padded",
            note="compiled",
            compile=True,
            slow=True,
            problem=Problem("Qwen3", "one row"),
        ),
        cell("Gemma-3", "TP2", "padded", note="compiled", compile=True, slow=True),
        cell("Qwen3-MoE", "FSDP2", "padded", note="compiled", compile=True, slow=True),
        cell("Qwen3-MoE", "EP2", "padded", note="compiled", compile=True, slow=True),
        cell("Llama", "1", "padded", note="bfloat16", precision="bfloat16", bar=BFLOAT16_BAR),
        cell("Qwen3", "FSDP2", "packed", note="bfloat16", precision="bfloat16", bar=BFLOAT16_BAR),
        cell("Qwen3", "FSDP2×TP2", "padded", note="bfloat16", precision="bfloat16", bar=BFLOAT16_BAR),
        cell("Mistral, window of 6", "FSDP2", "padded"),
        cell("Mistral, window of 6", "TP2", "packed"),
        cell("Mistral, window of 6", "CP2", "packed"),
        cell("Mistral, window of 6", "CP2", "padded"),
        cell("Mistral, window of 6", "CP2×TP2+SP", "packed"),
        cell("Gemma-3", "CP2×TP2+SP", "packed"),
        cell("Gemma-3", "CP2×TP2+SP", "dynamic"),
        cell("Gemma-2, capped scores", "FSDP2", "packed"),
        cell("Gemma-2, capped scores", "TP2+SP", "packed"),
        cell("GPT-OSS, sinks", "FSDP2", "packed"),
        cell("GPT-OSS, sinks", "TP2", "packed"),
        cell("Gemma-2, capped scores", "1", "padded", note="attention: sdpa", kernels=KernelsConfig(attention="sdpa")),
        cell("GPT-OSS, sinks", "FSDP2", "dynamic", note="attention: sdpa", kernels=KernelsConfig(attention="sdpa")),
        cell("Qwen3", "TP2+SP", "packed", note="loss chunks of 3 tokens", kernels=KernelsConfig(loss_chunk_size=3)),
        cell("Qwen3", "FSDP2×TP2+SP", "packed"),
        cell("Qwen3", "FSDP2×CP2", "dynamic"),
        cell("Qwen3", "CP2×TP2", "padded"),
        cell("Gemma-3", "FSDP2×CP2", "packed"),
        cell("Qwen3", "CP2×TP2+SP", "packed"),
        cell("Qwen3-MoE", "EP2×CP2", "packed"),
        cell("Qwen3-MoE", "FSDP2×EP2", "packed"),
        cell("Qwen3-MoE", "EP2×TP2", "padded"),
        cell("Llama", "PP2", "padded"),
        cell("Qwen3", "PP2", "packed"),
        cell("Qwen3", "PP2", "padded", note="gpipe", pipeline_schedule="gpipe"),
        cell("Gemma-3", "PP2", "packed", note="all activations recomputed", activation_checkpointing="full"),
        cell("Qwen3-MoE", "PP2", "padded", note="three calls a step", calls=3),
        cell("Qwen3", "PP2", "padded", note="one microbatch", problem=Problem("Qwen3", "one row")),
        cell("Mistral, window of 6", "PP2×FSDP2", "packed"),
        cell("Gemma-3", "PP2×FSDP2", "padded", note="reduced once", reduce_gradients="last_microbatch"),
        cell("Qwen3", "PP2×TP2+SP", "packed"),
        cell("Phi-3", "PP2×TP2+SP", "padded"),
        cell("Qwen3", "FSDP2", "packed", note="LoRA", problem=Problem("Qwen3", adapters=LORA), lora_cfg=LORA),
        cell("Llama", "TP2+SP", "padded", note="LoRA", problem=Problem("Llama", adapters=LORA), lora_cfg=LORA),
        cell("Qwen3", "FSDP2", "padded", note="DoRA", problem=Problem("Qwen3", adapters=DORA), lora_cfg=DORA),
        cell("Gemma-3", "CP2", "packed", note="DoRA", problem=Problem("Gemma-3", adapters=DORA), lora_cfg=DORA),
        cell("Llama", "EP2", "padded", refusal=NO_EXPERTS),
        cell("Llama, 1 head", "TP2", "padded", refusal="heads"),
        cell("Llama", "HSDP 2x2", "padded", note="three groups", data_parallel_replicate_size=3, refusal="3"),
        cell("Llama", "TP2", "padded", note="four", tensor_parallel_size=4, refusal="4"),
    ]


def cell(model, mesh, layout, **options):
    """A cell of `mesh` and `layout`; other names than those of `Cell` are fields of the configuration."""
    note = options.pop("note", None)
    ranks, config, most_held = {**MESHES, **OTHER_MESHES}[mesh]
    own = {name: options.pop(name) for name in ("calls", "bar", "refusal", "slow") if name in options}
    if "EP2" in mesh and not STACKED_EXPERTS:
        own["refusal"] = NO_EXPERTS
    problem = options.pop("problem", None) or Problem(model)
    return Cell(
        model=model,
        mesh=mesh,
        layout=f"{layout}, {note}" if note else layout,
        problem=problem,
        config={**config, **LAYOUTS[layout], **options},
        ranks=ranks,
        most_held=most_held,
        **own,
    )


def whole():
    """All of them."""
    return [*table(), *apart()]


def usual():
    """All on one rank and all refusals; on several, each model on each mesh once, with layouts that take turns.

    A layout is made of a batch before a mesh is asked, and a mesh by a plan that knows no layout: what is wrong with a
    model's layout shows on one rank, with a plan under any layout, and what is wrong where two of the three meet (the
    padding of sequence parallelism, the rows that a context is cut from) in each pair of them, all of which are here.
    Compiled cells of many shapes, half a minute each, are left out.
    """
    chosen = [each for each in table() if each.refusal is not None or each.ranks == 1 or each.mesh == "EP2"]
    for mesh, model in itertools.product(MESHES, MODELS):
        exact = [each for each in table() if (each.mesh, each.model, each.refusal) == (mesh, model, None)]
        if exact and exact[0] not in chosen:
            chosen.append(exact[(MODELS.index(model) + list(MESHES).index(mesh)) % len(exact)])
    return [*chosen, *(each for each in apart() if not each.slow)]


def quick():
    """On one rank each model packed and one in each layout; on several, each mesh once, models and layouts by turns.

    All refusals; and of the cells of their own, those that have a model, a mesh or an option that none before them has.
    """
    alone = [each for each in table() if each.ranks == 1 and (each.layout == "packed" or each.model == MODELS[0])]
    chosen = [*alone, *(each for each in table() if each.refusal is not None)]
    for number, mesh in enumerate(each for each in MESHES if MESHES[each][0] > 1):
        exact = [each for each in table() if (each.mesh, each.refusal) == (mesh, None)]
        models = list(dict.fromkeys(each.model for each in exact))
        of_one = [each for each in exact if each.model == models[number % len(models)]]
        chosen.append(of_one[number // 2 % len(of_one)])
    exact = [each for each in table() if each.ranks > 1 and each.refusal is None]
    absent = [model for model in MODELS if not any(each.model == model and each in exact for each in chosen)]
    chosen += [next(each for each in exact if each.model == model) for model in absent]
    seen = {name for each in chosen for name in (each.model, each.mesh)}
    for each in apart():
        names = {each.model, each.mesh, each.layout.partition(", ")[2]} - {""}
        if each.refusal is not None or (not each.slow and not names <= seen):
            chosen.append(each)
            seen |= names
    return chosen


SMALL = {  # for each release of transformers but the newest: what such a release could break
    ("Llama", "1", "packed"),
    ("Gemma-3", "1", "packed"),
    ("Gemma-3", "FSDP2", "padded"),
    ("Phi-3", "TP2", "packed"),
    ("Qwen2", "CP2", "dynamic"),
    ("Qwen3", "TP2+SP", "packed"),
    ("Qwen3-MoE", "TP2", "packed"),
    ("Qwen3-MoE", "EP2", "padded"),
}


def small():
    """A selection of two ranks at most."""
    return [each for each in table() if (each.model, each.mesh, each.layout) in SMALL]
