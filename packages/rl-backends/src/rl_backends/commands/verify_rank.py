"""One rank of a comparison: the backend takes the steps, and writes the parts that it holds. Started by verify_start.

    python -m rl_backends.commands.verify_rank TASK      (JSON)

Files: <rank>.safetensors with `logp` and, for each box, `<kind>|<name>|<offsets>`; <rank>.json with what went wrong.
What differs between backends is in `verify_<backend>`: `load`, `weights`, `gradients`.
"""

import functools
import json
import sys
from collections.abc import Iterable
from importlib import import_module
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
from rl_backends.errors import MissingDependencyError
from rl_backends.optimizers import OptimizerConfig

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
    except (ValueError, MissingDependencyError) as refusal:  # of ours, and of what ours builds on: PlanError too
        (folder / f"{rank}.json").write_text(json.dumps({"refused": str(refusal)}), encoding="utf-8")
    dist.barrier()  # a rank that leaves early tears connections that others still read
    dist.destroy_process_group()


def _result(task: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    subject = import_module(f"rl_backends.commands.verify_{task['backend']}")
    backend = subject.load(folder / "model", task["config"])
    rows = make_rows(**task["rows"])
    loss = functools.partial(loss_of, num_tokens=int(rows.trainable.sum()))
    backend.start_training(OPTIMIZER, num_steps=STEPS)
    found = {"logp": backend.logp(rows)}
    backend.forward_backward(rows, loss)
    found |= _boxes("gradients", subject.gradients(backend))
    backend.start_training(OPTIMIZER, num_steps=STEPS)  # from no gradient
    norms = [_step(backend, rows, loss) for _ in range(STEPS)]
    found["grad_norm"] = torch.tensor(norms[:1])
    found |= _boxes("weights", subject.weights(backend))
    backend.save_pretrained(folder / "saved")
    backend.close()
    return found


def _step(backend: Any, rows: Any, loss: Any) -> float:
    backend.forward_backward(rows, loss)
    norm: float = backend.optim_step()
    return norm


def _boxes(kind: str, parts: Iterable[tuple[str, tuple[int, ...], Tensor]]) -> dict[str, Tensor]:
    return {
        f"{kind}|{name}|{','.join(map(str, offsets))}": numbers.clone(memory_format=torch.contiguous_format)
        for name, offsets, numbers in parts
    }


if __name__ == "__main__":
    main()
