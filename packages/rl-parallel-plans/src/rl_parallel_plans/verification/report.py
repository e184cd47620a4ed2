"""What a verification found: checks with a verdict, as text, as JSON, as an exit code. Knows no tensors."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["ok", "note", "WRONG", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question that was put to the sharded model."""

    name: str
    """What was looked at."""
    verdict: Verdict
    """`ok`; `note` where something costs and is not wrong, or nothing was there to compare; `WRONG`; or `skipped` where
    the check cannot be made of this model."""
    error: float | None = None
    """Largest relative error, where the check has one."""
    detail: str = ""
    """What was found, in one line."""
    culprits: tuple[str, ...] = ()
    """What is wrong where: a parameter or module, its numbers, and what that means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The checks of one model at one layout."""

    model: str
    """Class of the model and what was verified of it."""
    layout: str
    """Ranks and options."""
    source: str
    """Which rule made the plan."""
    checks: tuple[Check, ...]
    """In the order in which they ran."""
    refused: str | None = None
    """Why there was nothing to run: no plan, or one with problems, or a model that is unusable."""
    unusable: bool = False
    """Whether the model itself cannot be built or run here, sharded or not; `refused` then says why, and nothing about
    a plan."""
    seconds: float = 0.0
    """Time that it took."""
    versions: str = ""
    """Releases of torch and transformers."""

    @property
    def ok(self) -> bool:
        """Whether the plan is exact: it was not refused and no check is WRONG."""
        return self.refused is None and all(check.verdict != "WRONG" for check in self.checks)

    @property
    def exit_code(self) -> int:
        """0 it holds, 1 it does not, 2 refused."""
        return 2 if self.refused is not None else int(not self.ok)

    @property
    def error(self) -> float:
        """The largest relative error of all checks; 0 without any."""
        return max((check.error for check in self.checks if check.error is not None), default=0.0)

    def text(self) -> str:
        """The report for people: a line a check, and under each wrong one its culprits."""
        lines = [f"{self.model}, {self.layout}", f"plan: {self.source}"] if self.source else [self.model]
        if self.refused is not None:
            return "\n".join([*lines, "", f"{'SKIPPED' if self.unusable else 'REFUSED'}: {self.refused}"])
        lines += ["", *_table(self.checks), ""]
        wrong = [check.name for check in self.checks if check.verdict == "WRONG"]
        verdict = f"WRONG: {len(wrong)} of {len(self.checks)} checks ({', '.join(wrong)})" if wrong else "exact"
        return "\n".join([*lines, f"{verdict}; {self.versions}, {self.seconds:.1f} s"])

    def json(self) -> str:
        """Everything as one line of JSON."""
        document: dict[str, Any] = asdict(self)
        return json.dumps({"ok": self.ok, **document}, default=str)


def _table(checks: Sequence[Check]) -> list[str]:
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        error = "" if check.error is None else f"{check.error:.1e}"
        lines.append(f"{check.name:<{width}}  {check.verdict:<7}  {error:>7}  {check.detail}".rstrip())
        lines += [f"{'':<{width}}    - {culprit}" for culprit in check.culprits]
    return lines
