"""`rl-parallel-plans classes`: verify every class of transformers, in as many runs as it takes, and write the table."""

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("names", nargs="*", metavar="CLASS", help="these classes alone (default: all)")
    parser.add_argument(
        "--results", type=Path, default=Path("classes.jsonl"), metavar="FILE", help="one line a result, added to"
    )
    parser.add_argument("--seconds", type=float, metavar="S", help="begin no further cell after that time")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="of other releases or another source, show results and measure only those again that are not good",
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table there, as Markdown")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    """0 where nothing is wrong, 1 where a cell is; what is left to measure is said."""
    from rl_parallel_plans.verification import classes
    from rl_parallel_plans.verification.processes import Processes

    wanted = sorted(arguments.names or classes.class_names())
    keep = arguments.keep
    found = {
        cell: result
        for cell, result in classes.read_results(arguments.results).items()
        if keep or classes.is_current(result)
    }
    cells = [(name, column) for name in wanted for column in (classes.PLAN, *classes.COLUMNS)]
    todo = [cell for cell in cells if cell not in found or not classes.is_current(found[cell], keep=keep)]
    todo.sort(key=lambda cell: (cell[1] != classes.PLAN, "Conditional" in cell[0]))  # towers cost the most
    started = time.monotonic()
    with Processes() as processes:
        while todo and (arguments.seconds is None or time.monotonic() - started < arguments.seconds):
            name, column = todo.pop(0)
            result = classes.measured(name, column, processes)
            found[name, column] = result
            with arguments.results.open("a") as file:  # on a line of its own, whatever an interruption left
                file.write("\n" * (file.tell() > 0) + json.dumps(asdict(result)))
            print(f"{name}, {column}: {result.outcome} {result.reason[:120]}".rstrip(), file=sys.stderr, flush=True)
    of_wanted = [result for (name, _), result in found.items() if name in wanted]
    if arguments.write is not None:
        arguments.write.write_text(classes.table(of_wanted))
    wrong = [f"{result.name}, {result.column}: {result.reason}" for result in of_wanted if classes.is_wrong(result)]
    for each in wrong:
        print(f"wrong: {each}", file=sys.stderr)
    counts = {
        column: dict(Counter(result.outcome for result in of_wanted if result.column == column))
        for column in (classes.PLAN, *classes.COLUMNS)
    }
    print("; ".join(f"{column}: {classes.counted(each)}" for column, each in counts.items()) + f"; {len(todo)} left")
    if arguments.json:
        print(json.dumps({"ok": not wrong, "left": len(todo), "counts": counts, "wrong": wrong}))
    return int(bool(wrong))
