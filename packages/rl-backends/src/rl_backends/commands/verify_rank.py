"""One rank of a comparison: the backend takes the steps, and writes the parts that it holds. Started by verify_start.

    python -m rl_backends.commands.verify_rank TASK      (JSON)

Files: <rank>.safetensors with `logp` and, for each box, `<kind>|<name>|<offsets>`; <rank>.json with what went wrong.
"""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from rl_backends.commands.verify_plain import (
    BETAS,
    EPS,
    LR,
    MAX_GRAD_NORM,
    STEPS,
    WEIGHT_DECAY,
    loss_of,
    make_rows,
)
from rl_backends.dtensor.backend import DTensorBackend
from rl_backends.dtensor.config import DTensorConfig
from rl_backends.optimizers import OptimizerConfig
from rl_parallel_plans import named_shards, to_local_if_dtensor

__all__ = ["main"]

OPTIMIZER = OptimizerConfig(
    lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, schedule="constant", max_grad_norm=MAX_GRAD_NORM
)


def main() -> None:
    """Do the task on the command line; what is refused is written down, and other failures are raised."""
    task = json.loads(sys.argv[1])
    folder, rank = Path(task["folder"]), task["rank"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=task["ranks"])
    try:
        save_file(_result(task, folder), folder / f"{rank}.safetensors")
    except ValueError as refusal:  # of ours, and of what ours builds on: PlanError too
        (folder / f"{rank}.json").write_text(json.dumps({"refused": str(refusal)}), encoding="utf-8")
    dist.barrier()  # a rank that leaves early tears connections that others still read
    dist.destroy_process_group()


def _result(task: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    backend = DTensorBackend.from_pretrained(str(folder / "model"), DTensorConfig(**task["config"]))
    embeddings: Any = backend.model.get_input_embeddings()  # type: ignore[operator]
    rows = make_rows(rows=task["rows"], seed=task["seed"], vocabulary=embeddings.weight.shape[0])
    loss = functools.partial(loss_of, num_tokens=int(rows.trainable.sum()))
    backend.start_training(OPTIMIZER, num_steps=STEPS)
    found = {"logp": backend.logp(rows)}
    for step in range(STEPS):
        backend.forward_backward(rows, loss)
        if step == 0:
            found |= _boxes(backend.model, "gradients")
        norm = backend.optim_step()
        if step == 0:
            found["grad_norm"] = torch.tensor([norm])
    found |= _boxes(backend.model, "weights")
    backend.save_pretrained(folder / "saved")
    return found


def _boxes(model: nn.Module, kind: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for shard in named_shards(model):
        tensor = shard.tensor.detach() if kind == "weights" else shard.tensor.grad
        if tensor is None or not tensor.is_floating_point():
            continue
        local = to_local_if_dtensor(tensor)
        for box in shard.boxes(tensor):
            offsets = ",".join(map(str, box.offsets))
            found[f"{kind}|{shard.name}|{offsets}"] = box.of_local(local).clone(memory_format=torch.contiguous_format)
    return found


if __name__ == "__main__":
    main()
