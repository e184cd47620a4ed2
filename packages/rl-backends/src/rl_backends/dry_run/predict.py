"""`predict`: the peak memory of a step of the DTensor backend on each rank, before anything is loaded or started.

For a module in hand it runs in this process where that has no process group; else, and for a folder, a config.json or a
hub id, in an interpreter of its own, which is asked in JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from rl_backends.dry_run.report import DryRun
from rl_backends.dry_run.source import config_of_module
from rl_backends.dry_run.step import StepAsked
from rl_backends.dtensor.config import DTensorConfig
from rl_backends.errors import ModelError
from rl_backends.kernels import KernelsConfig
from rl_backends.lora import LoraConfig
from rl_backends.optimizers import MuonConfig, OptimizerConfig

__all__ = ["ask_child", "config_from_dict", "predict", "request_of", "step_asked", "step_from_dict"]

CHILD = "rl_backends.dry_run"
MICROBATCHES = 2
"""That a rank works on where nobody said how many rows there are: the second finds the gradient of the first."""


def predict(
    model: nn.Module | str | Path,
    config: DTensorConfig,
    *,
    world_size: int,
    optimizer: OptimizerConfig | None = None,
    rows: int | None = None,
    length: int = 2048,
    lengths: Sequence[int] | None = None,
    temperature: float = 1.0,
    reference: bool = False,
    offload_reference: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    timeout_s: float = 600.0,
) -> DryRun:
    """Run a step of `DTensorBackend` on fake tensors and ranks, and count what one of them holds.

    Args:
        model: a causal LM, which is not changed; or a folder, a config.json or a hub id, of which no weights are read.
        config: as for the backend.
        world_size: ranks of the run; none of them is started.
        optimizer: None leaves the optimizer out: no state, no step.
        rows: of the whole batch, all of `length` tokens; None takes two microbatches for each rank.
        length: tokens of a row.
        lengths: of each row of the batch, instead of `rows` and `length`.
        temperature: divides the logits.
        reference: keep a frozen copy of the policy too.
        offload_reference: keep that copy in host memory.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: run the model's own Python code. Only for code that you have read.
        timeout_s: after which another process is given up.

    Raises:
        ModelError: the model cannot be built or run so; or this process has a process group, and a module no `config`.
        PlanError, ValueError: what the backend would refuse.
        TimeoutError: the other process took too long.
    """
    asked = step_asked(
        config,
        world_size=world_size,
        optimizer=optimizer,
        rows=rows,
        length=length,
        lengths=lengths,
        temperature=temperature,
        reference=reference,
        offload_reference=offload_reference,
    )
    if isinstance(model, nn.Module) and not dist.is_initialized():
        from rl_backends.dry_run.fake import dry_run_here
        from rl_backends.reference import without_weights

        return dry_run_here(without_weights(model), config, asked, world_size=world_size)[0]
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    request = request_of(model, config, asked, world_size=world_size, **options)
    return DryRun.from_dict(ask_child({"what": "predict", **request}, timeout_s=timeout_s)["dry_run"])


def step_asked(
    config: DTensorConfig,
    *,
    world_size: int,
    optimizer: OptimizerConfig | None,
    rows: int | None,
    length: int,
    lengths: Sequence[int] | None,
    temperature: float,
    reference: bool,
    offload_reference: bool,
) -> StepAsked:
    """The step that `predict` is asked for.

    Raises:
        ValueError: sizes that are none.
    """
    for name, value in (("world_size", world_size), ("rows", rows), ("length", length)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be >= 1")
    if lengths is not None and (not lengths or min(lengths) < 1):
        raise ValueError(f"lengths={list(lengths)} must be those of one row or more, each of 1 token or more")
    if lengths is None:
        lengths = [length] * (rows or _default_rows(config, world_size=world_size, length=length))
    return StepAsked(
        lengths=tuple(lengths),
        optimizer=optimizer,
        temperature=temperature,
        reference=reference,
        offload_reference=offload_reference,
    )


def request_of(
    model: nn.Module | str | Path,
    config: DTensorConfig,
    asked: StepAsked,
    *,
    world_size: int,
    revision: str | None,
    trust_remote_code: bool,
) -> dict[str, Any]:
    """A step in plain values, for `ask_child`.

    Raises:
        ModelError: a module without a configuration.
    """
    in_hand = isinstance(model, nn.Module)
    return {
        "source": None if in_hand else str(model),
        "model_config": config_of_module(model) if isinstance(model, nn.Module) else None,
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "config": asdict(config),
        "asked": asdict(asked),
        "world_size": world_size,
    }


def config_from_dict(values: Mapping[str, Any]) -> DTensorConfig:
    """The inverse of `asdict`, also after a walk through JSON."""
    lora = values["lora_cfg"]
    if lora is not None:
        given: dict[str, Any] = {key: tuple(each) if isinstance(each, list) else each for key, each in lora.items()}
        lora = LoraConfig(**given)
    return DTensorConfig(**{**values, "lora_cfg": lora, "kernels": KernelsConfig(**values["kernels"])})


def step_from_dict(values: Mapping[str, Any]) -> StepAsked:
    """The inverse of `asdict`, also after a walk through JSON."""
    optimizer = values["optimizer"]
    if optimizer is not None:
        tuples = {name: tuple(value) for name, value in optimizer.items() if isinstance(value, list)}
        optimizer = OptimizerConfig(**{**optimizer, **tuples, "muon": MuonConfig(**optimizer["muon"])})
    return StepAsked(**{**values, "lengths": tuple(values["lengths"]), "optimizer": optimizer})


def ask_child(request: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """The answer of an interpreter of its own to a request in plain values.

    Raises:
        ModelError: it refused, in its words.
        TimeoutError: it took longer than `timeout_s`; it is ended.
        RuntimeError: it died.
    """
    found = [os.environ.get("PYTHONPATH", ""), *sys.path]
    try:
        child = subprocess.run(  # noqa: S603 - this interpreter, this package
            [sys.executable, "-m", CHILD],
            input=json.dumps(request),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, found))},
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(
            f"the process that makes a dry run has not answered for {timeout_s:g} s and was ended; ask for fewer rows, "
            f"or raise timeout_s"
        ) from None
    answer = child.stdout.splitlines()[-1] if child.returncode == 0 and child.stdout else None
    if answer is None:
        raise RuntimeError(
            f"the process that makes a dry run ended with status {child.returncode}:\n{child.stderr[-4000:]}"
        )
    values: dict[str, Any] = json.loads(answer)
    if "refused" in values:
        raise ModelError(values["refused"])
    return values


def _default_rows(config: DTensorConfig, *, world_size: int, length: int) -> int:
    sharers = config.tensor_parallel_size * config.context_parallel_size
    rows = config.micro_batch_size
    if config.micro_batch_tokens is not None:
        rows = max(1, min(rows, config.micro_batch_tokens // length))
    return MICROBATCHES * rows * max(1, world_size // sharers)
