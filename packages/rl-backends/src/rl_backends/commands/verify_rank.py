"""One rank of a comparison: the backend takes the steps, and writes the parts that it holds. Started by `run_ranks`.

    python -m rl_backends.commands.verify_rank TASK      (JSON)

Files: <rank>.safetensors with `logp` and, for each box, `<kind>|<name>|<offsets>`; <rank>.json with what went wrong.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

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
from rl_backends.dtensor.config import DTensorConfig
from rl_backends.errors import MissingDependencyError
from rl_backends.kernels import KernelsConfig
from rl_backends.optimizers import OptimizerConfig
from rl_parallel_plans import named_shards

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


# ---- Starting all ranks, under one deadline; all are ended when one fails.

PROGRAM = "rl_backends.commands.verify_rank"
POLL_S = 0.1


def run_ranks(task: Mapping[str, Any], *, deadline_s: float) -> None:
    """Run the task on `task["ranks"]` processes over gloo; what they found lies in `task["folder"]`."""
    folder, ranks = Path(task["folder"]), int(task["ranks"])
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(_ended(_start(task, rank, folder))) for rank in range(ranks)]
        _wait(processes, folder, deadline_s=deadline_s)
    for rank in range(ranks):
        note = folder / f"{rank}.json"
        if note.is_file():
            raise CommandError(json.loads(note.read_text(encoding="utf-8"))["refused"])


def _start(task: Mapping[str, Any], rank: int, folder: Path) -> "subprocess.Popen[bytes]":
    found = [os.environ.get("PYTHONPATH", ""), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, found)), "OMP_NUM_THREADS": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # ranks are CPU ranks, and Megatron takes a GPU where it sees one
    with (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(  # noqa: S603 - this interpreter, this package
            [sys.executable, "-m", PROGRAM, json.dumps({**task, "rank": rank})],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


@contextlib.contextmanager
def _ended(process: "subprocess.Popen[bytes]") -> Any:
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait(processes: "Sequence[subprocess.Popen[bytes]]", folder: Path, *, deadline_s: float) -> None:
    until = time.monotonic() + deadline_s
    codes = [process.poll() for process in processes]
    while None in codes and not any(codes):
        if time.monotonic() > until:
            raise TimeoutError(f"the ranks were not done after {deadline_s:g} s, and were ended; raise --deadline-s")
        time.sleep(POLL_S)
        codes = [process.poll() for process in processes]
    for rank, process in enumerate(processes):
        if process.poll():
            said = (folder / f"{rank}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise RuntimeError(f"rank {rank} ended with status {process.poll()}: {said[-1] if said else 'no word'}")


if __name__ == "__main__":
    main()
