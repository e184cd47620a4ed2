"""The ranks of a comparison: in each the backend takes the steps, and writes the parts that it holds.

Files: <rank>.safetensors with `logp` and, for each box, `<kind>|<name>|<offsets>`; <rank>.json with what was refused.
"""

import functools
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, start_processes

from rl_backends.commands.console import CommandError
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
from rl_backends.errors import MissingDependencyError
from rl_backends.optimizers import OptimizerConfig
from rl_parallel_plans import named_shards

Part = tuple[str, tuple[int, ...], Tensor]

OPTIMIZER = OptimizerConfig(
    lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, schedule="constant", max_grad_norm=MAX_GRAD_NORM
)


def run_ranks(task: Mapping[str, Any], *, deadline_s: float) -> None:
    """Run the task on `task["ranks"]` processes over gloo; what they found lies in `task["folder"]`.

    All of them are ended when one fails, and at the deadline.
    """
    folder, ranks = Path(task["folder"]), int(task["ranks"])
    # Ranks are CPU ranks, and Megatron takes a GPU where it sees one.
    with patch.dict(os.environ, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"):
        started = start_processes(  # type: ignore[no-untyped-call]
            _run_rank, args=(task,), nprocs=ranks, join=False, start_method="spawn"
        )
    until = time.monotonic() + deadline_s
    try:
        while not started.join(timeout=max(0.0, until - time.monotonic())):
            if time.monotonic() > until:
                raise TimeoutError(
                    f"the ranks were not done after {deadline_s:g} s, and were ended; raise --deadline-s"
                )
    except ProcessException as failure:
        raise RuntimeError(f"rank {failure.error_index}: {str(failure).strip().splitlines()[-1]}") from failure
    finally:
        for process in started.processes:
            process.kill()
            process.join()
    for rank in range(ranks):
        note = folder / f"{rank}.json"
        if note.is_file():
            raise CommandError(json.loads(note.read_text(encoding="utf-8"))["refused"])


def _run_rank(rank: int, task: Mapping[str, Any]) -> None:
    """Do the task as one rank; what is refused is written down, and other failures are raised."""
    for output in (1, 2):  # what libraries say is no result, and what goes wrong is raised
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    folder = Path(task["folder"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=task["ranks"])
    try:
        save_file(_result(task, folder), folder / f"{rank}.safetensors")
    except (ValueError, MissingDependencyError) as refusal:  # of ours, and of what ours builds on: PlanError too
        (folder / f"{rank}.json").write_text(json.dumps({"refused": str(refusal)}), encoding="utf-8")
    dist.barrier()  # a rank that leaves early tears connections that others still read
    dist.destroy_process_group()


def _result(task: Mapping[str, Any], folder: Path) -> dict[str, Tensor]:
    backend = _load(folder / "model", task)
    rows = make_rows(**task["rows"])
    loss = functools.partial(loss_of, num_tokens=int(rows.trainable.sum()))
    backend.start_training(OPTIMIZER, num_steps=STEPS)
    found = {"logp": backend.logp(rows)}
    backend.forward_backward(rows, loss)
    found |= _boxes("gradients", gradients(backend))
    backend.start_training(OPTIMIZER, num_steps=STEPS)  # from no gradient
    for step in range(STEPS):
        backend.forward_backward(rows, loss)
        norm = backend.optim_step()
        if step == 0:
            found["grad_norm"] = torch.tensor([norm])
    parts = ((shard, box) for shard in backend.shards() for box in shard.boxes())
    found |= _boxes("weights", ((s.name, tuple(box.offsets), box.of_local(s.local.detach())) for s, box in parts))
    backend.save_pretrained(folder / "saved")
    backend.close()
    return found


def _load(model: Path, task: Mapping[str, Any]) -> Any:
    """The backend over a folder. What Megatron was given is saved again beside it before it trains."""
    if task["backend"] == "megatron":
        from rl_backends.megatron.backend import MegatronBackend

        megatron = MegatronBackend.from_pretrained(str(model), task["config"])
        megatron.save_pretrained(model.parent / "untrained")
        return megatron
    return DTensorBackend.from_pretrained(str(model), task["config"])


def gradients(backend: Any) -> Iterator[Part]:
    """Name, offsets and numbers of every part of a gradient that this rank holds.

    Megatron's ranks sum them up for it: the backend must forget them before it goes on.
    """
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
