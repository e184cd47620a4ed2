"""How many injected faults end as they must: cases tried, cases clean, by kind; with real processes.

Every case kills, stops, interrupts or misleads one party of a refit at one point, and looks at all the others: do they
end, with an error that says who or what is to blame; are the engines' weights the old ones or the new ones, bit for
bit, or poisoned; does the next refit work; is anything left in shared memory. The cases are in `tests/chaos/cases.py`.

    python chaos.py            every case
    python chaos.py --quick    some of every kind, as the tests run them
    python chaos.py PATTERN    those whose name matches
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

CHAOS = Path(__file__).parents[1] / "tests" / "chaos"
sys.path.insert(0, str(CHAOS))
from cases import everything, quick
from judge import faults_of

AT_ONCE = 6


def run(cases, *, at_once=AT_ONCE):
    """Yield (case, outcome, what is wrong with it) as cases end."""
    by_name = {case["name"]: case for case in cases}
    command = [sys.executable, str(CHAOS / "supervisor.py"), str(at_once)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as supervisor:
        supervisor.stdin.write(json.dumps(cases))
        supervisor.stdin.close()
        for line in supervisor.stdout:
            name, outcome = json.loads(line)
            yield by_name[name], outcome, faults_of(by_name[name], outcome)


def table(results):
    """Lines for people, and figures: by kind, cases tried and clean, and how long survivors took after the fault."""
    kinds = {}
    for case, outcome, wrong in results:
        row = kinds.setdefault(case["kind"], {"tried": 0, "clean": 0, "slowest_s": 0.0})
        row["tried"] += 1
        row["clean"] += not wrong
        row["slowest_s"] = max(row["slowest_s"], *outcome["seconds"].values(), 0.0)
    total = {
        "tried": sum(row["tried"] for row in kinds.values()),
        "clean": sum(row["clean"] for row in kinds.values()),
        "slowest_s": max((row["slowest_s"] for row in kinds.values()), default=0.0),
    }
    lines = [f"{'kind of fault':40} {'cases tried':>11} {'cases clean':>11} {'slowest end':>11}"]
    lines += [
        f"{kind:40} {row['tried']:11} {row['clean']:11} {row['slowest_s']:9.1f} s"
        for kind, row in {**dict(sorted(kinds.items())), "all": total}.items()
    ]
    return lines, {"total": total, "kinds": kinds}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pattern", nargs="?", default="", help="regular expression of names")
    parser.add_argument("--quick", action="store_true", help="some of every kind")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="cases at the same time")
    arguments = parser.parse_args()
    cases = [
        case for case in (quick() if arguments.quick else everything()) if re.search(arguments.pattern, case["name"])
    ]
    began, results = time.monotonic(), []
    for case, outcome, wrong in run(cases, at_once=arguments.at_once):
        results.append((case, outcome, wrong))
        for fault in wrong:
            print(f"NOT CLEAN  {case['name']}\n    {fault}", flush=True)
        if len(results) % 50 == 0:
            print(f"{len(results)} of {len(cases)} cases", file=sys.stderr, flush=True)
    lines, figures = table(results)
    print("\n".join(lines))
    print(json.dumps(figures | {"seconds": round(time.monotonic() - began, 1)}))
    return figures["total"]["clean"] != len(cases)


if __name__ == "__main__":
    sys.exit(main())
