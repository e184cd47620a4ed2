"""`python -m rl_parallel_plans verify`: is this plan exact for this model?"""

import argparse
import sys

from rl_parallel_plans.errors import PlanError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "model", help="folder, config.json, Hub name, or a type of model such as qwen3; no weights are read"
    )
    parser.add_argument(
        "--tp", type=_ranks, default=2, metavar="N", help="ranks that a layer is split over (default 2)"
    )
    parser.add_argument("--dp", type=_ranks, default=1, metavar="N", help="ranks that FSDP shards over (default 1)")
    parser.add_argument(
        "--pp", type=_ranks, default=1, metavar="N", help="ranks that layers are split over (default 1)"
    )
    parser.add_argument("--sequence-parallel", action="store_true", help="cut the residual stream along the sequence")
    parser.add_argument("--output-projections", choices=("rowwise", "colwise"), default="rowwise", help="see explain")
    parser.add_argument("--plan", metavar="MODULE:NAME", help="a plan of your own: a mapping or a function")
    parser.add_argument("--apply", metavar="MODULE:NAME", help="a function (model, mesh) that shards by itself")
    parser.add_argument("--force", action="store_true", help="run a plan that is refused, as parallelize_module would")
    parser.add_argument("--no-shrink", action="store_true", help="the configuration is small already")
    parser.add_argument(
        "--compile",
        nargs="?",
        const="inductor",
        metavar="BACKEND",
        help="also compile each layer with torch.compile, by this backend (default inductor; aot_eager is faster)",
    )
    parser.add_argument("--only", metavar="TASK", action="append", default=[], help="one task; may be given again")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON instead of a table")
    parser.add_argument("--revision", help="branch, tag or commit of a model on the Hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that comes with the model")


def run(arguments: argparse.Namespace) -> int:
    """0 the plan is exact, 1 it is not, 2 refused; the reasons are printed."""
    from rl_parallel_plans.verification.api import verify

    try:
        report = verify(
            arguments.model,
            tp=arguments.tp,
            dp=arguments.dp,
            pp=arguments.pp,
            sequence_parallel=arguments.sequence_parallel,
            output_projections=arguments.output_projections,
            custom=arguments.plan,
            apply=arguments.apply,
            check_first=not arguments.force,
            shrink=not arguments.no_shrink,
            compile=arguments.compile,
            only=arguments.only,
            revision=arguments.revision,
            trust_remote_code=arguments.trust_remote_code,
        )
    except PlanError as refusal:
        print(f"verify: {refusal}", file=sys.stderr)
        return 2
    print(report.json() if arguments.json else report.text())
    return report.exit_code


def _ranks(text: str) -> int:
    ranks = int(text)
    if ranks < 1:
        raise argparse.ArgumentTypeError(f"{ranks} is no number of ranks: it must be at least 1")
    return ranks
