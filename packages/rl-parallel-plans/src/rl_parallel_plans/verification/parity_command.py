"""`python -m rl_parallel_plans parity`: verify every architecture at every layout, and write the table."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help="types of model, folders or Hub names (default: all)"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table there, as Markdown")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    """0 where every cell is exact or refused with a reason, 1 where one is not."""
    from rl_parallel_plans.verification.parity import ARCHITECTURES, document, measured, missed

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    rows = measured(arguments.models or ARCHITECTURES, say=say)
    text = document(rows)
    if arguments.write is not None:
        arguments.write.write_text(text)
    else:
        print(text)
    wrong = list(missed(rows))
    for each in wrong:
        print(f"not exact: {each}", file=sys.stderr)
    if arguments.json:
        print(json.dumps({"ok": not wrong, "rows": [asdict(row) for row in rows]}))
    return int(bool(wrong))
