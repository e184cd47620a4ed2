"""`rl-generation bench`: tokens a second of several engines, side by side over one model and the same prompts.

Each round asks every engine for answers to the same new prompts, in an order that turns, after a round that does not
count. Figures are medians over rounds, ratios are to the first engine. Then the logp of each engine is compared with a
plain forward in float32. Exit codes: 0 every engine agrees with the model, 1 one does not, or failed; 2 refused.
"""

import argparse
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from statistics import median
from typing import TYPE_CHECKING, Any

from rl_generation.commands import CommandError, say, show, show_json
from rl_generation.commands.flags import (
    add_engine_arguments,
    add_sampling_arguments,
    sampling_of,
    specs_of,
    start_engine,
)
from rl_generation.engine import Engine
from rl_generation.loading import check_available
from rl_generation.model_flags import installed_version
from rl_generation.requests import Sampling

if TYPE_CHECKING:
    from rl_generation.verify import LogpAgreement

COUNTS = {
    "prompts": (64, "of each round"),
    "prompt_tokens": (32, "tokens of each prompt"),
    "rounds": (3, "that count"),
}
"""Flag → default, meaning."""


@dataclass(slots=True, kw_only=True)
class Measured:
    """What one engine did."""

    name: str
    engine: Engine
    tokens_per_s: list[float] = field(default_factory=list)
    """Of each round."""

    agreement: "LogpAgreement | None" = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_engine_arguments(parser)
    group = parser.add_argument_group("measurement")
    for name, (default, meaning) in COUNTS.items():
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=int, default=default, metavar="N", help=f"{meaning} (default %(default)s)")
    group.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare the logp of each engine with a float32 model on the CPU, which needs its memory (default: do)",
    )
    group.add_argument("--json", action="store_true", help="end with one line of JSON that holds every figure")
    add_sampling_arguments(parser, max_new_tokens=64, ignore_eos=True, seed=0)


def run(arguments: argparse.Namespace) -> int:
    """Measure, and return the exit code."""
    from rl_generation.verify import FAULT

    for name in COUNTS:
        if getattr(arguments, name) < 1:
            raise CommandError(f"--{name.replace('_', '-')} must be at least 1; got {getattr(arguments, name)}")
    specs = specs_of(arguments)
    sampling = sampling_of(arguments)
    for spec in specs:
        check_available(spec)
    with ExitStack() as stack:
        engines = []
        for spec in specs:
            engine, _ = start_engine(spec)
            stack.callback(engine.close)
            engines.append(Measured(name=spec.engine, engine=engine))
        _measure(engines, sampling, arguments)
        if arguments.verify:
            # In float32, on the CPU, where the engines take no memory.
            from rl_generation.checkpoints import load_model
            from rl_generation.verify import verify_logp

            spec = specs[0]
            which: dict[str, Any] = {"revision": spec.revision, "trust_remote_code": spec.trust_remote_code}
            model = load_model(spec.model, dtype="float32", device="cpu", **which)
            for each in engines:
                each.agreement = verify_logp(each.engine, model)
        _show_table(engines)
    holds = all(each.agreement is None or each.agreement.token_mult_prob_error <= FAULT for each in engines)
    if arguments.json:
        first = median(engines[0].tokens_per_s)
        show_json(
            {
                "model": arguments.model,
                **{name: getattr(arguments, name) for name in COUNTS},
                "max_new_tokens": arguments.max_new_tokens,
                "engines": {each.name: _figures(each, first) for each in engines},
                "versions": {
                    "vllm": installed_version(),
                    "torch": version("torch"),
                    "transformers": version("transformers"),
                },
                "holds": holds,
            }
        )
    return 0 if holds else 1


def _measure(engines: Sequence[Measured], sampling: Sampling, arguments: argparse.Namespace) -> None:
    draw = random.Random(0)
    vocabulary = min(each.engine.limits.vocab_size for each in engines)
    for number in range(-1, arguments.rounds):
        # New prompts each round, for an engine may keep the prefixes of earlier ones.
        prompts = [
            [draw.randrange(vocabulary) for _ in range(arguments.prompt_tokens)] for _ in range(arguments.prompts)
        ]
        turn = max(number, 0) % len(engines)
        for each in [*engines[turn:], *engines[:turn]]:
            start = time.perf_counter()
            rollouts = each.engine.generate(prompts, sampling)
            speed = sum(len(rollout.tokens) for rollout in rollouts) / (time.perf_counter() - start)
            if number >= 0:
                each.tokens_per_s.append(speed)
                say(f"round {number + 1} of {arguments.rounds}: {each.name} {speed:,.0f} tokens/s")


def _show_table(engines: Sequence[Measured]) -> None:
    first = median(engines[0].tokens_per_s)
    titles = ("tokens/s", "ratio", "slowest", "fastest", "error", "max |d|")
    show(f"{'engine':<14}" + "".join(f"{title:>11}" for title in titles))
    for each in engines:
        speed = median(each.tokens_per_s)
        row = f"{each.name:<14}{speed:>11,.0f}{speed / first:>11.2f}{min(each.tokens_per_s):>11,.0f}"
        row += f"{max(each.tokens_per_s):>11,.0f}"
        if each.agreement is not None:
            row += f"{each.agreement.token_mult_prob_error:>11.6f}{each.agreement.max_abs_difference:>11.1e}"
        show(row)


def _figures(each: Measured, first: float) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "tokens_per_s": median(each.tokens_per_s),
        "ratio": median(each.tokens_per_s) / first,
        "rounds_tokens_per_s": each.tokens_per_s,
    }
    if each.agreement is not None:
        names = ("token_mult_prob_error", "max_abs_difference", "mean_abs_difference", "outside_support")
        figures |= {name: getattr(each.agreement, name) for name in names}
        figures["compared_tokens"] = each.agreement.tokens
    return figures
