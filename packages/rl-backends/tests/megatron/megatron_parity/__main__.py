"""`python -m megatron_parity [--write FILE] [--only WORDS] [--cells NAME]`: print the table; 1 if a cell is wrong."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # parity, whose problems and plain answers these are

from megatron_parity import cases, judge, launch
from megatron_parity.document import document, write


def main():
    parser = argparse.ArgumentParser(prog="python -m megatron_parity")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the section into this file, as Markdown")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="cells whose names have all these words")
    parser.add_argument(
        "--cells", choices=["quick", "usual", "whole"], default="whole", help="quick: what the tests run"
    )
    parser.add_argument("--outcomes", type=Path, metavar="FILE", help="write what the cells came to into it, as JSON")
    parser.add_argument("--launches", type=int, default=20, help="how often to start anew after a rank has failed")
    arguments = parser.parse_args()
    cells = [
        cell for cell in getattr(cases, arguments.cells)() if all(word in f"{cell.name}," for word in arguments.only)
    ]
    with tempfile.TemporaryDirectory() as folder:
        outcomes = launch.run(
            cells,
            folder=Path(folder),
            launches=arguments.launches,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
    if arguments.outcomes is not None:
        arguments.outcomes.write_text(json.dumps(outcomes))
    if arguments.write is not None:
        write(outcomes, arguments.write)
    print(document(outcomes))
    wrong = [complaint for cell in cells for complaint in judge.complaints(cell, outcomes[cell.name])]
    print(*wrong, sep="\n", file=sys.stderr)
    seconds = {name: sum(each.get("cpu_s", 0.0) for each in ranks) for name, ranks in outcomes.items()}
    for name in sorted(seconds, key=seconds.__getitem__, reverse=True)[:8]:
        print(f"{seconds[name]:.1f} CPU seconds: {name}", file=sys.stderr)
    print(f"{sum(seconds.values()):.0f} CPU seconds, {len(wrong)} complaints", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
