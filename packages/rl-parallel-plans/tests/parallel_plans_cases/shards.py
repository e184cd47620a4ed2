"""What one rank does in the tests of shards: its boxes beside the unsharded model's tensors."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from parallel_plans_cases.export import sharded
from parallel_plans_cases.models import tiny
from rl_parallel_plans.checkpoints import RowOrder, local_boxes, named_shards


def boxes(architecture, *, tied=False):
    """Names whose boxes do not hold what the whole has there, and the elements of each that this rank has."""
    model = sharded(architecture, tied=tied)
    truth = tiny(architecture, tied=tied).state_dict()
    held, wrong, shapes = {}, [], []
    for shard in named_shards(model):
        whole, count = truth[shard.name], torch.zeros(truth[shard.name].shape, dtype=torch.int64)
        for box in shard.boxes():
            if not torch.equal(box.of_local(shard.local), box.of_whole(whole)):
                wrong.append(shard.name)
            box.of_whole(count).add_(1)
        once = count.numel() == 0 or int(count.max()) <= 1
        if shard.shape != tuple(whole.shape) or int(count.sum()) != shard.local.numel() or not once:
            shapes.append(shard.name)
        held[shard.name] = count.flatten().tolist()
    return {"wrong": wrong, "shapes": shapes, "held": held}


def boxes_of_dealt_rows():
    """Offsets, sizes and local offsets of each box of this rank, whose numbers are looked at too."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = torch.arange(12.0).view(6, 2)
    order = RowOrder(dim=0, rows=torch.tensor([[0, 1, 4], [2, 3, 5]]))
    dealt = distribute_tensor(order.dealt(whole), mesh, [Shard(1)])
    found = local_boxes(dealt, row_order=order)
    assert all(torch.equal(box.of_local(order.local(dealt.to_local())), box.of_whole(whole)) for box in found)
    return [[box.offsets, box.sizes, box.local_offsets] for box in found]
