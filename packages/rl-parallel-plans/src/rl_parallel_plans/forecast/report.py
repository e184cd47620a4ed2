"""A prediction: what is alive at the worst moment of each phase of a step, as text, as JSON and as a table."""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rl_parallel_plans.forecast.fit import GIB, MemoryFit
from rl_parallel_plans.forecast.tracker import Ledger

LARGEST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeak:
    """The worst moment of one phase of a step."""

    name: str
    """The phase: "between steps", "forward", "lm_head forward", "after the lm_head", "backward", "optimizer step"."""
    num_bytes: int
    """Bytes alive on one rank at that moment."""
    by_category: Mapping[str, int]
    """What they are, largest first: parameters, gradients, optimizer state, activations, temporaries, ..."""
    largest: tuple[tuple[str, str, int], ...]
    """The largest shares: category, module that ran when they were made ("" outside of all modules), bytes."""


def phase_peaks(ledger: Ledger, *, without: Collection[str] = ()) -> tuple[PhasePeak, ...]:
    """Each phase that was counted, in the order in which they began; categories of `without` lie elsewhere."""
    return tuple(
        PhasePeak(
            name=name,
            num_bytes=peak.total,
            by_category=peak.by_category,
            largest=tuple((*owner, size) for owner, size in list(peak.by_owner.items())[:LARGEST]),
        )
        for name, peak in ledger.peaks(without=without).items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPeaks:
    """The memory of one training step on one rank, phase by phase."""

    phases: tuple[PhasePeak, ...]
    """In the order in which they begin. A phase's peak counts what was alive when it began."""
    assumptions: tuple[str, ...]
    """What the numbers rest on, and what they leave out."""

    @property
    def peak(self) -> PhasePeak:
        """The worst moment of the step."""
        return max(self.phases, key=lambda phase: phase.num_bytes)

    def phase(self, name: str) -> PhasePeak:
        """The phase of this name; KeyError where there is none."""
        found = {phase.name: phase for phase in self.phases}
        if name not in found:
            raise KeyError(f"no phase {name!r}: the step has {', '.join(found)}")
        return found[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport(StepPeaks):
    """What the memory of a step is predicted to be. Made by `memory`."""

    model_name: str
    """Class of the model."""
    num_parameters: int
    """Of the whole model, ties counted once."""
    plan_source: str
    """Which rule made the plan."""
    options: Mapping[str, Any]
    """What was asked for."""
    fit: MemoryFit | None = None
    """Whether it fits the GPU that was asked about, and else what to change; None where none was."""

    def text(self) -> str:
        """The report for people."""
        width = max(len(phase.name) for phase in self.phases)
        smallest = self.peak.num_bytes / 200
        lines = [
            *([f"{self.fit.text()}", ""] if self.fit is not None else []),
            f"memory of a training step of {self.model_name} ({self.num_parameters:,} parameters), GiB on one rank",
            f"plan: {self.plan_source}",
            f"asked: {', '.join(f'{name}={value}' for name, value in self.options.items() if value is not None)}",
            "",
            *(f"{p.name:<{width}} {_gib(p.num_bytes):>8}  {_shares(p.by_category)}" for p in self.phases),
            "",
            f"peak: {_gib(self.peak.num_bytes)} GiB, in the phase {self.peak.name!r}; the largest shares of it:",
            *(
                f"  {_gib(size):>8}  {category}" + (f", made in {owner}" if owner else "")
                for category, owner, size in self.peak.largest
                if size >= smallest
            ),
            "",
            *(f"note: {assumption}" for assumption in self.assumptions),
        ]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as in `json`."""
        return asdict(self)

    def json(self) -> str:
        """One line of JSON with every figure."""
        return json.dumps(self.as_dict())


def report_from_dict(values: Mapping[str, Any]) -> MemoryReport:
    """The inverse of `as_dict`, also through JSON."""
    phases = tuple(PhasePeak(**{**phase, "largest": tuple(map(tuple, phase["largest"]))}) for phase in values["phases"])
    fit = None if values.get("fit") is None else MemoryFit(**values["fit"])
    return MemoryReport(**{**values, "phases": phases, "assumptions": tuple(values["assumptions"]), "fit": fit})


def memory_table(reports: Mapping[str, MemoryReport]) -> str:
    """Several predictions side by side, one a row, GiB on one rank; the last column compares peaks with the first.

    Where a GPU was asked about, a further column says what fits it.
    """
    first = next(iter(reports.values()))
    names = [phase.name for phase in first.phases]
    asked = [report.fit.gpu for report in reports.values() if report.fit is not None]
    rows = [["", *names, "peak", "against the first", *asked[:1]]]
    for title, report in reports.items():
        sizes = [_gib(report.phase(name).num_bytes) for name in names]
        difference = (report.peak.num_bytes - first.peak.num_bytes) / GIB
        fits = [] if report.fit is None else ["fits" if report.fit.fits else "does not fit"]
        rows.append([title, *sizes, _gib(report.peak.num_bytes), f"{difference:+.2f}", *fits])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in rows
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}" if num_bytes >= GIB / 100 else f"{num_bytes / GIB:.6f}"


def _shares(by_category: Mapping[str, int]) -> str:
    total = sum(by_category.values())
    shown = {category: size for category, size in by_category.items() if size >= total / 200}
    rest = total - sum(shown.values())
    other = {"other": rest} if rest >= total / 200 else {}
    return ", ".join(f"{category} {_gib(size)}" for category, size in (shown | other).items())
