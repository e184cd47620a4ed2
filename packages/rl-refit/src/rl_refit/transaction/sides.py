"""What a process has of a refit, and whether it goes together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl_refit.contracts import WeightSink, WeightSource
from rl_refit.rendezvous import Rendezvous
from rl_refit.transports.base import Transport

__all__ = ["Sides", "check_engine", "check_sides", "device_of"]


@dataclass(frozen=True, slots=True)
class Sides:
    """What this process has of a refit."""

    source: WeightSource | None
    sink: WeightSink | None


def check_sides(sides: Sides, transport: Transport | None, rendezvous: Rendezvous | None) -> None:
    """Pass if what a caller gave goes together.

    Raises:
        TypeError: Something is of another kind than it should be.
        ValueError: Something is missing, or too much.
    """
    for name, given in (("source", sides.source), ("sink", sides.sink), ("transport", transport)):
        kind = {"source": WeightSource, "sink": WeightSink, "transport": Transport}[name]
        if isinstance(given, type):
            raise TypeError(f"{name} is the class {given.__name__}; write {given.__name__}(…)")
        if given is not None and (missing := _missing(given, kind)):
            # Of what has none of them, such as a module, the list would say less than its class.
            named = f" ({', '.join(missing)})" if len(missing) < len(_wanted(kind)) else ""
            raise TypeError(
                f"{name} is a {type(given).__name__}, which has not the methods of {kind.__name__}{named}; a module "
                f"goes into ModuleSource or ModuleSink, a mapping of tensors into StateDictSource"
            )
    if rendezvous is not None and not isinstance(rendezvous, Rendezvous):
        raise TypeError(f"rendezvous is a {type(rendezvous).__name__}; write Rendezvous(address, num_sources=…, …)")
    if rendezvous is None:
        if transport is not None or sides.source is None or sides.sink is None:
            raise ValueError(
                "without a rendezvous a Refit works in one process: give it a source and a sink, and no transport; "
                "over several processes give all parties a rendezvous"
            )
        return
    for side, given, rank in (
        ("source", sides.source, rendezvous.source_rank),
        ("sink", sides.sink, rendezvous.sink_rank),
    ):
        if (given is None) != (rank is None):
            raise ValueError(f"the rendezvous says {side}_rank={rank}, and the {side} given is {given!r}")


def check_engine(source: WeightSource | None, transport: Transport | None, rendezvous: Rendezvous | None) -> None:
    """Pass if what a caller gave goes together with an engine whose workers are ranks of the sink.

    Raises:
        TypeError: Something is of another kind than it should be.
        ValueError: Something is missing, or too much.
    """
    from rl_refit.transports.stream import SlotStream

    if source is not None and _missing(source, WeightSource):
        raise TypeError(f"source is a {type(source).__name__}; a module goes into ModuleSource")
    if transport is not None and not isinstance(transport, SlotStream):
        raise ValueError(f"the workers of an engine take a SlotStream; got {type(transport).__name__}")
    if rendezvous is None and source is None:
        raise ValueError("an engine needs a source of this process, or a rendezvous with one of another")
    if rendezvous is not None and rendezvous.sink_rank is None:
        raise ValueError("the sink_rank of the rendezvous is that of the engine's first worker; got None")
    if rendezvous is not None and (source is None) != (rendezvous.source_rank is None):
        raise ValueError(f"the rendezvous says source_rank={rendezvous.source_rank}, and the source given is {source}")


def _missing(given: object, kind: type) -> list[str]:
    """Return the names that a side lacks.

    `isinstance` would not do: from Python 3.12 on it does not see what an object hands on by `__getattr__`, as one
    wrapped around a source or sink does.
    """
    return [name for name in _wanted(kind) if not hasattr(given, name)]


def _wanted(kind: type) -> list[str]:
    """Return the methods and attributes that a protocol declares."""
    return [name for name in (*kind.__annotations__, *vars(kind)) if not name.startswith("_")]


def device_of(sides: Sides) -> torch.device:
    """Where this process's tensors are."""
    for side in (sides.sink, sides.source):
        if side is not None:
            return torch.device(side.device)
    return torch.device("cpu")
