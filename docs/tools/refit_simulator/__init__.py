"""How long a refit will take on thousands of GPUs, and what physics would allow, before any of them is rented.

    simulation = simulate("kimi-k2", train_gpus=256, train_layout="ep=32,pp=8", engine_gpus=128, engine_layout="ep=128")
    print(simulation.explain())

Routes come from the planner, on real manifests; bandwidths from data sheets; what software costs from published refits.
It moves nothing, and does not know what a network does when it is shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from refit_simulator.costs import CALIBRATED, Costs
from refit_simulator.hardware import HARDWARE, Hardware
from refit_simulator.models import MODELS, SimulatedModel
from refit_simulator.parallelism import Parallelism
from refit_simulator.predict import Options, Simulation, predict
from refit_simulator.schemes import SCHEMES
from refit_simulator.workload import Wire, Workload

__all__ = [
    "CALIBRATED",
    "HARDWARE",
    "MODELS",
    "SCHEMES",
    "Costs",
    "Hardware",
    "Options",
    "Parallelism",
    "SimulatedModel",
    "Simulation",
    "Workload",
    "predict",
    "simulate",
]


_Preset = TypeVar("_Preset")


def simulate(
    model: str | SimulatedModel,
    *,
    train_gpus: int,
    engine_gpus: int,
    train_layout: str,
    engine_layout: str,
    hardware: str | Hardware = "h100",
    scheme: str = "slices",
    colocated: bool = False,
    wire: Wire = "bfloat16",
    stacked_experts: bool = False,
    options: Options | None = None,
    costs: Costs = CALIBRATED,
) -> Simulation:
    """Predict a refit.

    Args:
        model: A name of `MODELS`, or the numbers of one of your own.
        train_gpus: GPUs of the trainer.
        engine_gpus: GPUs of the engine, over all of its replicas.
        train_layout: Sizes of its axes: "fsdp=256", "ep=64,pp=8", "tp=4,fsdp=2", or "replicated".
        engine_layout: The same of the engine: "tp=8", "ep=128".
        hardware: A name of `HARDWARE`, or figures of your own.
        scheme: A name of `SCHEMES`.
        colocated: Whether both sides share GPUs.
        wire: "bfloat16", or "float8" where the trainer quantises before it sends.
        stacked_experts: Whether each layer's experts travel as one tensor.
        options: Buckets, digests, deltas.
        costs: What software costs.

    Raises:
        ValueError: Names the value that is wrong, and what is allowed.
    """
    machine = _named("hardware", hardware, HARDWARE) if isinstance(hardware, str) else hardware
    workload = Workload(
        model=_named("model", model, MODELS) if isinstance(model, str) else model,
        train=Parallelism.parse(train_layout, gpus=train_gpus),
        engine=Parallelism.parse(engine_layout, gpus=engine_gpus),
        gpus_per_node=machine.gpus_per_node,
        colocated=colocated,
        wire=wire,
        stacked_experts=stacked_experts,
    )
    return predict(workload, _named("scheme", scheme, SCHEMES), machine, costs=costs, options=options or Options())


def _named(what: str, name: str, presets: Mapping[str, _Preset]) -> _Preset:
    if name not in presets:
        raise ValueError(f"no {what} {name!r}; the presets are {', '.join(presets)}")
    return presets[name]
