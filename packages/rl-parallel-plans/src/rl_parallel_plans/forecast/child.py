"""The interpreter in which a configuration's memory is predicted: one JSON request in, one line of JSON out.

Keeps the caller's process free of a process group, of transformers and of everything that DTensor remembers.
"""

import json
import os
import sys
from typing import Any

from rl_parallel_plans.errors import PlanError


def main() -> None:
    """Answer the request on stdin; nothing else reaches stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        answer: dict[str, Any] = {"reports": _reports(json.load(sys.stdin))}
    except PlanError as refusal:
        answer = {"refused": str(refusal)}
    answers.write(f"{json.dumps(answer)}\n")
    answers.flush()


def _reports(request: dict[str, Any]) -> list[dict[str, Any]]:
    from rl_parallel_plans.forecast.memory import forecast
    from rl_parallel_plans.forecast.options import options_from_dict
    from rl_parallel_plans.model_source import build, read_config

    trust = request["trust_remote_code"]
    config = read_config(request["source"], revision=request["revision"], trust_remote_code=trust)
    model = build(config, trust_remote_code=trust)
    options = [options_from_dict(each) for each in request["options"]]
    return [report.as_dict() for report in forecast(model, options, gpu=request["gpu"])]


if __name__ == "__main__":
    main()
