"""The cells of the table: models by layouts over ranks by layouts of the batch, and cells of their own.

A cell is exact (every quantity within its bar) or refused in the words that stand here.
"""

import dataclasses
import itertools

from megatron_parity.problems import Problem

BAR = 1e-5
BFLOAT16_BAR = 5e-2

MODELS = ("Llama", "Llama, rope of Llama 3", "Mistral", "Qwen2", "Qwen3", "Qwen3-MoE")
TIES = ("untied", "tied")
TP, PP, EP = (f"{name}_model_parallel_size" for name in ("tensor", "pipeline", "expert"))
CP, VP = "context_parallel_size", "virtual_pipeline_model_parallel_size"
SP = {"sequence_parallel": True}
DISTRIBUTED = {"use_distributed_optimizer": True}
MESHES = {  # ranks, configuration, the share of the parameters that a rank may hold at most
    "1": (1, {}, 1.0),
    "TP2": (2, {TP: 2}, 0.5),
    "TP2+SP": (2, {TP: 2, **SP}, 0.5),
    "PP2": (2, {PP: 2}, 0.5),
    "CP2": (2, {CP: 2}, 1.0),
    "EP2": (2, {EP: 2}, 0.65),
    "DP2": (2, {}, 1.0),
    "DP2, distributed optimizer": (2, DISTRIBUTED, 1.0),
    "TP2×PP2": (4, {TP: 2, PP: 2}, 0.25),
}
OTHER_MESHES = {  # for cells of their own
    "TP2+SP×PP2": (4, {TP: 2, PP: 2, **SP}, 0.25),
    "CP2×TP2+SP": (4, {CP: 2, TP: 2, **SP}, 0.5),
    "CP2×PP2": (4, {CP: 2, PP: 2}, 0.5),
    "DP2×PP2, distributed optimizer": (4, {PP: 2, **DISTRIBUTED}, 0.5),
    "DP2×TP2, distributed optimizer": (4, {TP: 2, **DISTRIBUTED}, 0.5),
    "EP2×PP2": (4, {EP: 2, PP: 2}, 0.35),
    "EP2×CP2": (4, {EP: 2, CP: 2}, 0.65),
    "EP2×TP2+SP": (4, {EP: 2, TP: 2, **SP}, 0.45),
    "DP2×EP2, distributed optimizer": (4, {EP: 2, **DISTRIBUTED}, 0.65),
    "EP2 within TP2+SP": (2, {EP: 2, TP: 2, **SP}, 0.6),
    "EP2, distributed optimizer": (2, {EP: 2, **DISTRIBUTED}, 0.65),
    "PP4": (4, {PP: 4}, 0.35),
    "PP2×2 chunks": (2, {PP: 2, VP: 2}, 0.55),
    "PP2×3 chunks": (2, {PP: 2, VP: 3}, 0.55),
    "EP2×PP2×2 chunks": (4, {EP: 2, PP: 2, VP: 2}, 0.4),
    "TP2+SP×PP2×2 chunks": (4, {TP: 2, PP: 2, VP: 2, **SP}, 0.3),
    "DP2×PP2×2 chunks, distributed optimizer": (4, {PP: 2, VP: 2, **DISTRIBUTED}, 0.55),
}
LAYOUTS = {
    "padded": {"micro_batch_size": 2},
    "packed": {"sequence_packing": True, "micro_batch_size": 3},
}
FUSED = {"bias_activation_fusion": True, "bias_dropout_fusion": True}
OVERLAP, GATHER = {"overlap_grad_reduce": True}, {"overlap_param_gather": True}
FULL, SELECTIVE = ({"recompute_granularity": each} for each in ("full", "selective"))


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

    @property
    def name(self):
        return f"{self.model}, {'tied' if self.problem.tied else 'untied'}, {self.mesh}, {self.layout}"


UNCUT_EXPERTS = {  # tensor parallelism does not cut experts
    "TP2": "needs sequence_parallel=True",
    "TP2×PP2": "needs sequence_parallel=True",
    "TP2+SP": "needs expert_model_parallel_size > 1",
}


def table():
    """Models by meshes by layouts."""
    return [
        cell(
            model,
            mesh,
            layout,
            tied=tied == "tied",
            refusal=UNCUT_EXPERTS.get(mesh) if model == "Qwen3-MoE" else None,
        )
        for mesh in MESHES
        for model in MODELS
        for tied in TIES
        for layout in LAYOUTS
        if mesh != "EP2" or model == "Qwen3-MoE"
    ]


def apart():
    """What the table has no column for, one cell each."""
    pairs, one, cold = (
        Problem("Qwen3", "pairs"),
        Problem("Qwen3", "one row"),
        Problem("Qwen3", temperature=0.7),
    )
    few = Problem("Llama, 4 layers", "one row")
    return [
        cell("Qwen3", "DP2", "padded", note="pairs that stay together", problem=pairs),
        cell("Qwen3", "PP2", "packed", note="pairs that stay together", problem=pairs),
        cell("Qwen3", "DP2", "padded", note="a rank without rows", problem=one),
        cell("Qwen3", "PP2", "packed", note="one microbatch", problem=one),
        cell("Qwen3", "TP2", "packed", note="temperature 0.7", problem=cold),
        cell("Qwen3", "PP2", "padded", note="temperature 0.7", problem=cold),
        cell("Qwen3", "1", "padded", note="three calls a step", calls=3),
        cell("Qwen3", "PP2", "packed", note="three calls a step", calls=3, tied=True),
        cell("Qwen3", "TP2+SP", "padded", note="three calls a step", calls=3),
        cell("Qwen3", "DP2, distributed optimizer", "packed", note="three calls a step", calls=3),
        cell("Qwen3", "1", "padded", note="one pass", micro_batch_size=64),
        cell("Qwen3", "PP2", "padded", note="one row a pass", micro_batch_size=1, tied=True),
        cell("Qwen3", "TP2", "padded", note="at most 220 tokens a pass", micro_batch_size=64, micro_batch_tokens=220),
        cell("Qwen3", "1", "padded", note="layers recomputed", **FULL),
        cell("Qwen3", "TP2+SP", "packed", note="layers recomputed", **FULL),
        cell("Qwen3", "PP2", "padded", note="layers recomputed", **FULL),
        cell("Qwen3", "CP2", "padded", note="attention recomputed", **SELECTIVE),
        cell("Qwen3-MoE", "EP2", "packed", note="layers recomputed", **FULL),
        cell("Llama", "1", "padded", note="bfloat16", precision="bfloat16", bar=BFLOAT16_BAR),
        cell("Qwen3", "TP2+SP", "packed", note="bfloat16", precision="bfloat16", bar=BFLOAT16_BAR),
        cell("Qwen2", "PP2", "padded", note="bfloat16", precision="bfloat16", bar=BFLOAT16_BAR, tied=True),
        cell("Qwen3", "DP2, distributed optimizer", "padded", note="bfloat16", precision="bfloat16", bar=BFLOAT16_BAR),
        cell("Llama, yarn", "TP2", "padded"),
        cell("Llama, yarn", "CP2", "padded"),
        cell("Mistral, window of 6", "1", "padded"),
        cell("Mistral, window of 6", "TP2+SP", "packed"),
        cell("Mistral, window of 6", "CP2", "padded"),
        cell("Qwen3-MoE, router as it is", "EP2", "padded"),
        cell("Qwen3-MoE", "EP2, distributed optimizer", "packed"),
        cell("Qwen3-MoE", "EP2 within TP2+SP", "padded", tied=True),
        cell("Llama, 4 layers", "PP4", "padded", tied=True),
        cell("Qwen2", "TP2+SP×PP2", "padded", tied=True),
        cell("Qwen3", "TP2+SP×PP2", "packed"),
        cell("Qwen3", "CP2×TP2+SP", "padded"),
        cell("Llama, rope of Llama 3", "CP2×PP2", "padded", tied=True),
        cell("Qwen3", "DP2×PP2, distributed optimizer", "packed", tied=True),
        cell("Qwen2", "DP2×TP2, distributed optimizer", "padded"),
        cell("Qwen3-MoE", "EP2×PP2", "padded", tied=True),
        cell("Qwen3-MoE", "EP2×CP2", "padded"),
        cell("Qwen3-MoE", "EP2×TP2+SP", "packed"),
        cell("Qwen3-MoE", "DP2×EP2, distributed optimizer", "padded"),
        cell("Mixtral", "1", "packed"),
        cell("Mixtral", "EP2", "padded", tied=True),
        cell("Mixtral", "EP2×PP2", "padded"),
        cell("Mixtral", "EP2×TP2+SP", "packed"),
        cell(
            "Llama, 4 layers",
            "PP2",
            "padded",
            note="3 layers first",
            most_held=0.75,
            num_layers_in_first_pipeline_stage=3,
        ),
        cell(
            "Llama, 4 layers",
            "PP2",
            "packed",
            note="1 layer last",
            most_held=0.8,
            num_layers_in_last_pipeline_stage=1,
            tied=True,
        ),
        cell(
            "Llama, 4 layers", "PP2", "padded", note="Et|t*3L", most_held=0.75, pipeline_model_parallel_layout="Et|t*3L"
        ),
        cell("Llama, 4 layers", "PP2×2 chunks", "padded"),
        cell("Llama, 4 layers", "PP2×2 chunks", "packed", note="one row a pass", micro_batch_size=1, tied=True),
        cell("Llama, 4 layers", "PP2×2 chunks", "padded", note="one microbatch", problem=few),
        cell("Llama, 4 layers", "PP2×2 chunks", "padded", note="three calls a step", calls=3, tied=True),
        cell("Llama, 4 layers", "PP2×2 chunks", "padded", note="layers recomputed", **FULL),
        cell("Llama, 4 layers", "PP2×2 chunks", "padded", note="bfloat16", precision="bfloat16", bar=BFLOAT16_BAR),
        cell(
            "Llama, 6 layers",
            "PP2×2 chunks",
            "padded",
            note="2 layers first",
            most_held=0.7,
            num_layers_in_first_pipeline_stage=2,
        ),
        cell(
            "Llama, 6 layers",
            "PP2×2 chunks",
            "packed",
            note="Ett|t|t|ttL",
            most_held=0.6,
            pipeline_model_parallel_layout="Ett|t|t|ttL",
        ),
        cell("Llama, 6 layers", "PP2×3 chunks", "packed", note="one row a pass", micro_batch_size=1),
        cell("Llama, 4 layers", "TP2+SP×PP2×2 chunks", "packed", tied=True),
        cell("Qwen3-MoE, 4 layers", "EP2×PP2×2 chunks", "padded", tied=True),
        cell(
            "Llama, 4 layers",
            "DP2×PP2×2 chunks, distributed optimizer",
            "padded",
            note="overlapped gather",
            **OVERLAP,
            **GATHER,
        ),
        cell("Llama, 4 layers", "DP2×PP2×2 chunks, distributed optimizer", "packed", tied=True),
        cell("Qwen3", "1", "padded", note="fused SwiGLU and residual", **FUSED),
        cell("Qwen3", "TP2+SP", "packed", note="fused SwiGLU and residual", **FUSED),
        cell("Qwen3", "DP2", "padded", note="overlapped reduction", **OVERLAP),
        cell("Qwen3-MoE", "EP2, distributed optimizer", "padded", note="overlapped reduction", **OVERLAP),
        cell("Qwen3", "DP2×PP2, distributed optimizer", "padded", note="overlapped reduction", **OVERLAP, tied=True),
        cell("Qwen3", "DP2, distributed optimizer", "packed", note="overlapped gather", **OVERLAP, **GATHER),
        cell("Qwen2", "DP2×TP2, distributed optimizer", "packed", note="overlapped gather", **OVERLAP, **GATHER),
        cell("Llama", "DP2×PP2, distributed optimizer", "packed", note="overlapped gather", **OVERLAP, **GATHER),
        cell("Llama, 1 head", "TP2", "padded", refusal="heads"),
        cell("Llama", "EP2", "padded", refusal="expert"),
        cell("Gemma-3", "1", "padded", refusal="gemma3_text"),
        cell("Llama", "TP2", "padded", note="three stages", pipeline_model_parallel_size=3, refusal="3"),
        cell("Llama", "TP2", "padded", note="four", tensor_model_parallel_size=4, refusal="4"),
    ]


def cell(model, mesh, layout, *, tied=False, note=None, **options):
    """A cell of `mesh` and `layout`; other names than those of `Cell` are fields of the configuration."""
    ranks, config, most_held = {**MESHES, **OTHER_MESHES}[mesh]
    own = {name: options.pop(name) for name in ("calls", "bar", "refusal", "most_held") if name in options}
    problem = dataclasses.replace(options.pop("problem", None) or Problem(model), tied=tied)
    return Cell(
        model=model,
        mesh=mesh,
        layout=f"{layout}, {note}" if note else layout,
        problem=problem,
        config={**config, **LAYOUTS[layout], **options},
        ranks=ranks,
        **{"most_held": most_held, **own},
    )


def whole():
    """All of them."""
    return [*table(), *apart()]


def usual():
    """On each mesh each model once, tied or untied and padded or packed by turns, and all cells of their own."""
    chosen = []
    for each in table():
        turn = MODELS.index(each.model) + list(MESHES).index(each.mesh)
        tied, layout = TIES.index("tied" if each.problem.tied else "untied"), list(LAYOUTS).index(each.layout)
        if (tied, layout) == (turn % 2, turn // 2 % 2):
            chosen.append(each)
    return [*chosen, *apart()]


def quick():
    """On each mesh one model, models, ties and layouts taking turns, and all on one rank.

    Of the cells of their own, those that have a model or an option that none before them has, or axes not met yet.
    """
    chosen = [each for each in usual() if each.mesh == next(iter(MESHES)) and each not in apart()]
    for number, mesh in enumerate(list(MESHES)[1:]):
        cells = [each for each in usual() if each.mesh == mesh and each not in apart()]
        if cells:
            chosen.append(cells[number % len(cells)])
    seen = {name for each in chosen for name in _novel(each)}
    for each in apart():
        if each.refusal is not None or not _novel(each) <= seen:
            chosen.append(each)
            seen |= _novel(each)
    return chosen


def _novel(cell):
    """What a cell may have that others have not: its model, its option, and every two axes of its mesh."""
    axes = sorted({**MESHES, **OTHER_MESHES}[cell.mesh][1])
    return {cell.model, cell.layout.partition(", ")[2], *axes, *itertools.combinations(axes, 2)} - {""}
