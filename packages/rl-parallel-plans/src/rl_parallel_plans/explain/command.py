"""`rl-parallel-plans explain`: the plan of a model, built on the meta device from its configuration alone."""

import argparse
from pathlib import Path

from rl_parallel_plans.errors import PlanError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("model", help="folder, config.json, Hub name, or a type of model such as qwen3")
    parser.add_argument(
        "--tp", type=_ranks, default=1, metavar="N", help="ranks that a layer is split over (default 1)"
    )
    parser.add_argument("--dp", type=_ranks, default=1, metavar="N", help="ranks that FSDP shards over (default 1)")
    parser.add_argument(
        "--pp", type=_ranks, default=1, metavar="N", help="ranks that layers are split over (default 1)"
    )
    parser.add_argument(
        "--stages-per-rank", type=_ranks, default=1, metavar="N", help="of a pipeline: 2 where it is interleaved"
    )
    parser.add_argument("--sequence-parallel", action="store_true", help="cut the residual stream along the sequence")
    parser.add_argument(
        "--output-projections",
        choices=("rowwise", "colwise"),
        default="rowwise",
        help="how o_proj and down_proj are cut; colwise cuts no sum over ranks (default rowwise)",
    )
    parser.add_argument("--plan", metavar="MODULE:NAME", help="a plan of your own: a mapping or a function")
    parser.add_argument("--allow", metavar="KIND", action="append", default=[], help="a kind of problem to accept")
    parser.add_argument("--all", action="store_true", help="also each parameter of a module that stays whole")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print a JSON document instead of text")
    output.add_argument("--html", metavar="FILE", type=Path, help="write one self-contained page instead of text")
    parser.add_argument("--revision", help="branch, tag or commit of a model on the Hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that comes with the model")


def run(arguments: argparse.Namespace) -> int:
    """0 where the plan fits, 1 where it has problems, 2 where there is none; the reasons are printed."""
    from rl_parallel_plans.explain.document import as_json, refusal_as_json
    from rl_parallel_plans.explain.page import as_html
    from rl_parallel_plans.explain.report import StageRow, stage_rows
    from rl_parallel_plans.explain.text import as_text
    from rl_parallel_plans.model_source import build, read_config
    from rl_parallel_plans.plan.parallel_plan import plan_for

    dp, trust = arguments.dp, arguments.trust_remote_code
    try:
        config = read_config(arguments.model, revision=arguments.revision, trust_remote_code=trust)
        model = build(config, trust_remote_code=trust)
        plan = plan_for(
            model,
            tp=arguments.tp,
            sequence_parallel=arguments.sequence_parallel,
            output_projections=arguments.output_projections,
            custom=arguments.plan,
            allow=arguments.allow,
        )
        stages: list[StageRow] = []
        if arguments.pp > 1 or arguments.stages_per_rank > 1:
            stages = stage_rows(model, plan, pp=arguments.pp, stages_per_rank=arguments.stages_per_rank, dp=dp)
    except PlanError as refusal:
        if arguments.json:
            print(refusal_as_json(str(refusal)))
        raise
    if arguments.json:
        print(as_json(plan, dp=dp, stages=stages))
    elif arguments.html is None:
        print(as_text(plan, dp=dp, every_row=arguments.all, stages=stages))
    else:
        try:
            arguments.html.write_text(as_html(plan, dp=dp, stages=stages), encoding="utf-8")
        except OSError as error:
            raise PlanError(f"{arguments.html} cannot be written: {error.strerror}") from error
        print(f"{arguments.html}: {plan.model_name}, tp={plan.tp}, {len(plan.problems)} problem(s)")
    return 1 if any(problem.kind not in plan.allow for problem in plan.problems) else 0


def _ranks(text: str) -> int:
    ranks = int(text)
    if ranks < 1:
        raise argparse.ArgumentTypeError(f"{ranks} is no number of ranks: it must be at least 1")
    return ranks
