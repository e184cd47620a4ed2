"""What a dry run gives: the peak memory of each phase of a step on one rank, and what ranks send one another."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rl_backends.optimizers import OptimizerConfig
from rl_parallel_plans.forecast.report import PhasePeak

GIB = 2**30
MIB = 2**20
WORKING_MEMORY = "working memory"
KINDS = {
    "parameters": "parameters",
    "reference": "reference",
    "gradients": "gradients",
    "unsharded gradients": "gradients",
    "optimizer state": "optimizer state",
    "unsharded parameters": "gathered parameters",
    "activations": "activations",
    "recomputed activations": "activations",
}
"""What the count calls things, in the words of a table; everything else is working memory."""
COLUMNS = tuple(dict.fromkeys((*KINDS.values(), WORKING_MEMORY)))


def by_column(phase: PhasePeak) -> dict[str, int]:
    """The categories of a phase in the words of the table."""
    found = dict.fromkeys(COLUMNS, 0)
    for category, size in phase.by_category.items():
        found[KINDS.get(category, WORKING_MEMORY)] += size
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """What one phase sends over some axes of the mesh."""

    phase: str
    """In which it runs."""
    kind: str
    """all_gather, reduce_scatter, all_reduce, all_to_all or broadcast."""
    axes: str
    """Names of the axes over which it runs, joined by x."""
    ranks: int
    """How many they are."""
    count: int
    """How often it runs."""
    num_bytes: int
    """Of the whole tensors, all of them together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """Peak memory of a step of the backend on one rank, predicted by running it on fake tensors."""

    model: str
    """Class of the model."""
    num_parameters: int
    """Of the whole model, ties counted once."""
    mesh: Mapping[str, int]
    """Ranks on each axis."""
    num_rows: int
    """Of the whole batch, on all ranks together."""
    num_tokens: int
    """Of the whole batch, padding left out."""
    num_microbatches: int
    """That each rank works on."""
    phases: tuple[PhasePeak, ...]
    """between steps, logp, reference logp, forward_backward, optim_step, on rank 0, whose shards are the largest. A
    phase's peak counts what was alive when it began."""
    host_bytes: int
    """Held in host memory beside, where parameters or the reference are offloaded from a GPU; else 0."""
    collectives: tuple[Collective, ...]
    """What ranks send one another, by phase."""
    assumptions: tuple[str, ...]
    """What the figures rest on, and what they leave out."""

    @property
    def peak(self) -> PhasePeak:
        """The worst moment of the step."""
        return max(self.phases, key=lambda phase: phase.num_bytes)

    def phase(self, name: str) -> PhasePeak:
        """The phase of this name.

        Raises:
            KeyError: there is none.
        """
        found = {phase.name: phase for phase in self.phases}
        if name not in found:
            raise KeyError(f"no phase {name!r}: the step has {', '.join(found)}")
        return found[name]

    def text(self) -> str:
        """For people."""
        rows = [["on one rank", "peak", *COLUMNS]]
        rows += [[p.name, format_bytes(p.num_bytes), *map(format_bytes, by_column(p).values())] for p in self.phases]
        used = [0, 1, *(i for i in range(2, len(rows[0])) if any(row[i] != "-" for row in rows[1:]))]
        smallest = self.peak.num_bytes / 50
        return "\n".join(
            [
                *aligned([[row[i] for i in used] for row in rows]),
                "",
                f"peak: {format_bytes(self.peak.num_bytes)} in {self.peak.name}; most of it:",
                *(
                    f"  {format_bytes(size):>9}  {category}{f', made in {owner}' if owner else ''}"
                    for category, owner, size in self.peak.largest
                    if size >= smallest
                ),
                *([f"host memory beside: {format_bytes(self.host_bytes)}"] if self.host_bytes else []),
                *(f"note: {assumption}" for assumption in self.assumptions),
            ]
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, the peak by category among them."""
        return {**asdict(self), "peak_bytes": self.peak.num_bytes, "peak_phase": self.peak.name}


def format_bytes(num_bytes: int) -> str:
    """A size in a unit that suits it; `-` for none."""
    if not num_bytes:
        return "-"
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes} B"


def aligned(rows: list[list[str]]) -> list[str]:
    """Cells as lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in rows
    ]


# ---- What is asked.

DIFFERENT_TOKENS = 32
"""So many that a mixture's experts all get some; fewer where the vocabulary is smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """The step whose memory is asked for."""

    lengths: tuple[int, ...]
    """Tokens of each row of the whole batch."""
    optimizer: OptimizerConfig | None
    """None takes no step, and has no state."""
    temperature: float = 1.0
    """Of the log-probabilities."""
    reference: bool = False
    """Keep a frozen copy of the policy."""
    offload_reference: bool = False
    """Keep that copy in host memory."""
    different_tokens: int = DIFFERENT_TOKENS
    """Ids of the rows are from 0 to one less."""
