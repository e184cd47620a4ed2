"""Run cells on forked ranks, a launch for each layout over ranks, and gather what they came to.

A rank that fails takes its launch with it: its cell has failed with the logs, and what comes after it is started anew.
"""

import json
import tempfile
from pathlib import Path

import forked

from megatron_parity import problems, program


def run(cells, *, folder, launches=3, say=lambda _: None):
    """Outcomes by the cells' names, a list over ranks each: as `run_cell` returns them, or `{"died": why}`."""
    program.import_all()
    problems.problems.answers([cell.problem for cell in cells if cell.refusal is None], folder)
    outcomes = {}
    for mesh in dict.fromkeys(cell.mesh for cell in cells):
        todo = [cell for cell in cells if cell.mesh == mesh]
        for _ in range(launches):
            if todo:
                outcomes |= _launch(todo, folder=folder)
                todo = [cell for cell in todo if cell.name not in outcomes]
        for cell in todo:
            outcomes[cell.name] = [{"died": f"not run: ranks failed in {launches} cells before"}]
        say(f"{mesh}: {len(outcomes)} of {len(cells)} cells")
    return outcomes


def _launch(cells, *, folder):
    """Outcomes up to the cell in which a rank failed, that one included."""
    place, ranks = Path(tempfile.mkdtemp(dir=folder)), cells[0].ranks
    results = [place / f"outcomes{rank}.jsonl" for rank in range(ranks)]
    why = None
    try:
        forked.run(
            lambda rank: program.run_cells(cells, folder, results[rank]),
            ranks=ranks,
            folder=place,
            deadline_s=120 + 20 * len(cells),
        )
    except forked.RanksFailedError as error:
        why = str(error)
    return _gathered([cell.name for cell in cells], results, why=why)


def _gathered(names, results, *, why):
    """Lines of each rank by cell; the first that a rank has not ended is the one that failed."""
    texts = [path.read_text().splitlines(keepends=True) if path.exists() else [] for path in results]
    ended = [{(line := json.loads(text))["cell"]: line for text in rank if text.endswith("\n")} for rank in texts]
    gathered = {}
    for name in names:
        if all(name in rank for rank in ended):
            gathered[name] = [rank[name] for rank in ended]
        else:
            return {**gathered, name: [{"died": why}]}
    if why is not None:  # after the last cell, which must not hide it
        gathered[names[-1]] = [{"died": why}]
    return gathered
