"""The diagnosis on one screen, or as one line of JSON. It does not look at the machine."""

import json as json_
import sys
from collections.abc import Sequence

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from rl_launcher.doctor.diagnosis import Diagnosis, diagnose
from rl_launcher.doctor.features import Verdict
from rl_launcher.doctor.finding import Finding
from rl_launcher.doctor.matrix import Match

__all__ = ["doctor", "render"]

# vLLM takes 20 s to import on two busy cores, and Ray as long to start.
TIMEOUT_S = 120.0
STYLES = {"works": "green", "limited": "yellow", "absent": "dim", "broken": "bold red"}
SHOWN = ("python", "torch", "transformers", "vllm", "ray", "megatron-core", "rl-launcher")


def doctor(*, json: bool = False, timeout_s: float = TIMEOUT_S) -> int:
    """Look at this machine and print what is found.

    Args:
        json: print one line of JSON with every figure, instead of a screen.
        timeout_s: seconds that each thing that is tried may take.

    Returns:
        0 where the quickstart is ready and nothing that is installed is broken; 1 otherwise.
    """
    console = Console(highlight=False, emoji=False)
    if json:
        diagnosis = diagnose(timeout_s=timeout_s)
        sys.stdout.write(json_.dumps(diagnosis.as_data()) + "\n")
        return diagnosis.exit_code
    with console.status("trying what is installed, each in a process of its own …"):
        diagnosis = diagnose(timeout_s=timeout_s)
    console.print(render(diagnosis))
    return diagnosis.exit_code


def render(diagnosis: Diagnosis) -> Group:
    """Return the screen."""
    versions = [f"{name} {diagnosis.versions.get(name, '–')}" for name in SHOWN]
    return Group(
        Text(" · ".join(versions)),
        _tested(diagnosis.matches),
        Text(),
        _findings(diagnosis.findings),
        Text(),
        _verdicts(diagnosis.verdicts),
        _conclusion(diagnosis),
    )


def _tested(matches: Sequence[Match]) -> Text:
    """Say where the combination of versions is a tested one."""
    if not matches:
        return Text("none of our packages is installed as a distribution, so no tested versions to compare with", "dim")
    lines = Text()
    tested = [each.package for each in matches if each.cells]
    if tested:
        lines.append(f"these versions are tested with: {', '.join(tested)}", "green")
    for each in matches:
        if not each.cells:
            lines.append("\n" if lines else "")
            lines.append(f"not tested with {each.package}: {'; '.join(each.differing)}", "yellow")
    return lines


def _findings(findings: Sequence[Finding]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for finding in findings:
        cell = Text(finding.says)
        if finding.hint:
            cell.append(f"\n{finding.hint}", "italic")
        table.add_row(Text(finding.state, STYLES[finding.state]), finding.name, cell, Text(finding.did, "dim"))
    return table


def _verdicts(verdicts: Sequence[Verdict]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for verdict in verdicts:
        says = Text("ready", "green") if verdict.ready else Text("; ".join(verdict.reasons))
        table.add_row(f"{verdict.feature}:", says)
    return table


def _conclusion(diagnosis: Diagnosis) -> Text:
    if diagnosis.exit_code == 0:
        return Text("\nStart with: rl-launcher run quickstart", "bold")
    broken = ", ".join(finding.name for finding in diagnosis.broken)
    return Text(f"\nInstalled and not working: {broken}" if broken else "\nThe quickstart is not ready", "bold red")
