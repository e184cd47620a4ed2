"""What really runs, counted, beside what a plan says that it will."""

from collections import Counter

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import rl_parallel_plans as plans
from parallel_plans_cases.models import tiny, token_ids

KINDS = {
    "all_gather_into_tensor": "all_gather",
    "allgather_": "all_gather",
    "allreduce_": "all_reduce",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "alltoall_base_": "all_to_all",
}


def collectives(architecture, *, sequence_parallel=False, custom=None):
    """(told, counted) of one forward and of one backward of a whole model."""
    model, mesh = tiny(architecture), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = plans.plan_for(
        model, tp=2, sequence_parallel=sequence_parallel, custom=plans.get_hf_tp_plan if custom == "tp_plan" else None
    )
    plans.apply_tensor_parallel(model, mesh, plan)
    ids = token_ids(2, 8)
    model.get_input_embeddings()(ids)  # lazy set-up of the mesh is not counted
    with CommDebugMode() as forward:
        hidden = model(input_ids=ids).logits
    with CommDebugMode() as backward:
        hidden.to_local().sum().backward()
    told = [_sum(row.forward for row in _times(plan)), _sum(row.backward for row in _times(plan))]
    if any(row.partial_gradient for row in plan.parameters):
        told[1]["all_reduce"] += 1  # of all Partial gradients together
    return [[told[0], _counted(forward)], [told[1], _counted(backward)]]


def _times(plan):
    return [row for row in plan.collectives for _ in range(row.count)]


def _sum(counts):
    total = Counter()
    for each in counts:
        total.update(each)
    return total


def _counted(mode):
    counts = Counter()
    for operation, count in mode.get_comm_counts().items():
        name = str(operation).rpartition(".")[2]
        counts[KINDS.get(name, name)] += count
    return +counts
