"""One rank of a comparison: the backend takes the steps, and writes the parts that it holds. Started by verify_start.

    python -m rl_backends.commands.verify_rank TASK      (JSON)

Files: <rank>.safetensors with `logp` and, for each box, `<kind>|<name>|<offsets>`; <rank>.json with what went wrong.
"""

import functools
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

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
from rl_backends.errors import MissingDependencyError
from rl_backends.kernels import KernelsConfig
from rl_backends.optimizers import OptimizerConfig
from rl_parallel_plans import named_shards

__all__ = ["gradients", "main"]

Part = tuple[str, tuple[int, ...], Tensor]

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
    except (ValueError, MissingDependencyError) as refusal:  # of ours, and of what ours builds on: PlanError too
        (folder / f"{rank}.json").write_text(json.dumps({"refused": str(refusal)}), encoding="utf-8")
    dist.barrier()  # a rank that leaves early tears connections that others still read
    dist.destroy_process_group()


def _result(task: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    backend = _load(folder / "model", task)
    rows = make_rows(**task["rows"])
    loss = functools.partial(loss_of, num_tokens=int(rows.trainable.sum()))
    backend.start_training(OPTIMIZER, num_steps=STEPS)
    found = {"logp": backend.logp(rows)}
    backend.forward_backward(rows, loss)
    found |= _boxes("gradients", gradients(backend))
    backend.start_training(OPTIMIZER, num_steps=STEPS)  # from no gradient
    norms = [_step(backend, rows, loss) for _ in range(STEPS)]
    found["grad_norm"] = torch.tensor(norms[:1])
    found |= _boxes("weights", _weights(backend))
    backend.save_pretrained(folder / "saved")
    backend.close()
    return found


def _step(backend: Any, rows: Any, loss: Any) -> float:
    backend.forward_backward(rows, loss)
    norm: float = backend.optim_step()
    return norm


def _load(model: Path, task: dict[str, Any]) -> Any:
    """The backend over a folder. What Megatron was given is saved again beside it before it trains."""
    if task["backend"] == "megatron":
        from rl_backends.megatron.backend import MegatronBackend
        from rl_backends.megatron.config import MegatronConfig

        megatron = MegatronBackend.from_pretrained(str(model), MegatronConfig(**task["config"]))
        megatron.save_pretrained(model.parent / "untrained")
        return megatron
    kernels = KernelsConfig(**task["config"]["kernels"])
    return DTensorBackend.from_pretrained(str(model), DTensorConfig(**{**task["config"], "kernels": kernels}))


def _weights(backend: Any) -> Iterator[Part]:
    """Name, offsets and numbers of every part of a weight that this rank holds."""
    for shard in backend.shards():
        for box in shard.boxes():
            yield shard.name, tuple(box.offsets), box.of_local(shard.local.detach())


def gradients(backend: Any) -> Iterator[Part]:
    """The same of gradients. Megatron's ranks sum them up for it: the backend must forget them before it goes on."""
    if not isinstance(backend, DTensorBackend):
        from rl_backends.megatron.gradients import summed_gradients

        yield from summed_gradients(backend._distributed, backend._optimizers)  # noqa: SLF001 - ours
        return
    for shard in named_shards(backend.model):
        if (gradient := shard.tensor.grad) is not None:
            local = shard.local_of(gradient)
            for box in shard.boxes(gradient):
                yield shard.name, tuple(box.offsets), box.of_local(local)


def _boxes(kind: str, parts: Iterable[Part]) -> dict[str, Tensor]:
    return {
        f"{kind}|{name}|{','.join(map(str, offsets))}": numbers.clone(memory_format=torch.contiguous_format)
        for name, offsets, numbers in parts
    }


if __name__ == "__main__":
    main()
