"""The parties of a refit across processes: the ranks of a trainer, and the engines.

A launcher makes one `Parties`, sends it to every process, and each makes its own `Refit` from it. When a process was
replaced, it makes another one under a new name.
"""

from dataclasses import asdict, dataclass
from typing import final

from rl_refit.config import RefitConfig
from rl_refit.contracts import WeightSink, WeightSource
from rl_refit.engine import EngineSink
from rl_refit.refit import Refit
from rl_refit.rendezvous import Rendezvous
from rl_refit.transports.stream import SlotStream

__all__ = ["Parties"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Parties:
    """Ranks and engines that refit together, and how. The same in every process; can be pickled."""

    address: str
    """`tcp://host:port`, free on the host of engine 0, which serves it."""
    name: str
    """Of these parties and of no earlier ones."""
    num_sources: int
    """Ranks of the trainer."""
    engine_ranks: tuple[int, ...]
    """For each engine that takes part, its ranks of the sink: the workers of an `EngineSink`, otherwise 1."""
    one_node: bool
    """Nothing leaves the node, and nothing listens beyond loopback."""
    config: RefitConfig
    """Deadlines, verification and bucket size."""

    def source_refit(self, source: WeightSource, *, rank: int, host: str | None) -> Refit:
        """The refit of one rank of the trainer; it connects when it is called first.

        Args:
            source: the weights of the rank.
            rank: of the trainer.
            host: address of its node that the others reach.
        """
        return Refit(
            source,
            transport=self._transport(host),
            rendezvous=self._rendezvous(source_rank=rank),
            **asdict(self.config),
        )

    def sink_refit(self, sink: WeightSink | EngineSink, *, engine: int, host: str | None) -> Refit:
        """The refit of an engine, by its place in `engine_ranks`; the first one hosts the store."""
        return Refit(
            sink=sink,
            transport=self._transport(host),
            rendezvous=self._rendezvous(sink_rank=sum(self.engine_ranks[:engine])),
            **asdict(self.config),
        )

    def explain(self) -> str:
        """One line for people."""
        ranks = f"{self.num_sources} rank{'' if self.num_sources == 1 else 's'}"
        engines = f"{len(self.engine_ranks)} engine{'' if len(self.engine_ranks) == 1 else 's'}"
        if (workers := sum(self.engine_ranks)) > len(self.engine_ranks):
            engines += f" of {workers} workers together"
        over = "" if self.one_node else ", and by messages between hosts"
        return f"from {ranks} to {engines}, through memory that the processes of a host share{over}"

    def _rendezvous(self, *, source_rank: int | None = None, sink_rank: int | None = None) -> Rendezvous:
        return Rendezvous(
            self.address,
            num_sources=self.num_sources,
            num_sinks=sum(self.engine_ranks),
            source_rank=source_rank,
            sink_rank=sink_rank,
            name=self.name,
        )

    def _transport(self, host: str | None) -> SlotStream:
        return SlotStream(host=None if self.one_node else host)
