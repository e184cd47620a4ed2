"""`python -m parity [--write FILE] [--only WORDS] [--missing]`: run the cells, print the table; 1 if one is wrong.

What `--write` finds in FILE of cells that were not run stays there, so that a part can be measured by itself.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from parity import cases, judge, launch
from parity.document import document, figures_of


def main():
    parser = argparse.ArgumentParser(prog="python -m parity")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table there, as Markdown")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="cells whose names have all these words")
    parser.add_argument("--missing", action="store_true", help="cells that FILE of --write has no figures of")
    parser.add_argument("--usual", action="store_true", help="what the tests run: on several ranks one layout of three")
    parser.add_argument("--small", action="store_true", help="the selection for older releases of transformers")
    parser.add_argument("--generate-code", action="store_true", help="compile with inductor, and do not only trace")
    parser.add_argument("--launches", type=int, default=20, help="how often to start anew after a rank has died")
    arguments = parser.parse_args()
    cells = cases.small() if arguments.small else cases.usual() if arguments.usual else cases.whole()
    cells = [cell for cell in cells if all(word in f"{cell.name}," for word in arguments.only)]
    before, title, others = "", "", ""
    if arguments.write is not None and arguments.write.exists():
        # The Megatron backend has a table of its own.
        before, title, others = arguments.write.read_text().partition("\n# The Megatron backend\n")
    if arguments.missing:
        known = figures_of(before)
        cells = [cell for cell in cells if cell.name not in known]
        print(*(cell.name for cell in cells), f"{len(cells)} cells", sep="\n", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = launch.run(
            cells,
            folder=Path(folder),
            launches=arguments.launches,
            trace_only=not arguments.generate_code,
            say=lambda text: print(text, file=sys.stderr),
        )
    text = document(outcomes, before=before)
    if arguments.write is not None:
        arguments.write.write_text(text + title + others)
    print(text)
    wrong = [complaint for cell in cells for complaint in judge.complaints(cell, outcomes[cell.name])]
    print(*wrong, sep="\n", file=sys.stderr)
    seconds = {name: sum(each.get("cpu_s", 0.0) for each in ranks) for name, ranks in outcomes.items()}
    for name in sorted(seconds, key=seconds.__getitem__, reverse=True)[:8]:
        print(f"{seconds[name]:.1f} CPU seconds: {name}", file=sys.stderr)
    print(f"{sum(seconds.values()):.0f} CPU seconds", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
