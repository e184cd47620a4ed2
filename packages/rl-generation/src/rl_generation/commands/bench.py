"""`rl-generation bench`: tokens a second of several engines, side by side over one model and the same prompts.

Each round asks every engine for answers to the same new prompts, in an order that turns, after a round that does not
count. Figures are medians over rounds, ratios are to the first engine. Then the logp of each engine is compared with a
plain forward in float32. Exit codes: 0 every engine agrees with the model, 1 one does not, or failed; 2 refused.
"""

import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from statistics import median
from typing import Any

from rl_generation.commands import CommandError, say, show, show_json
from rl_generation.commands.flags import EngineFlags, Flag, start_engine
from rl_generation.engine import Engine
from rl_generation.loading import EngineSpec, check_available
from rl_generation.model_flags import installed_version
from rl_generation.requests import Sampling

AGREEMENT = ("token_mult_prob_error", "max_abs_difference", "mean_abs_difference", "outside_support")
"""What is told of a comparison with the model; see `LogpAgreement`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Measure the tokens a second of several engines, side by side."""

    engine: EngineFlags

    prompts: int = 64
    """Prompts of each round."""

    prompt_tokens: int = 32
    """Tokens of each prompt."""

    rounds: int = 3
    """Rounds that count, after one that does not."""

    verify: bool = True
    """Compare the logp of each engine with a float32 model on the CPU, which needs its memory."""

    json: Flag = False
    """End with one line of JSON that holds every figure."""

    sampling: Sampling = field(default_factory=lambda: Sampling(max_new_tokens=64, ignore_eos=True, seed=0))

    def run(self) -> int:
        """Measure, and return the exit code."""
        from rl_generation.verify import FAULT

        counts = {"prompts": self.prompts, "prompt_tokens": self.prompt_tokens, "rounds": self.rounds}
        for name, count in counts.items():
            if count < 1:
                raise CommandError(f"--{name.replace('_', '-')} must be at least 1; got {count}")
        specs = self.engine.specs()
        for spec in specs:
            check_available(spec)
        with ExitStack() as stack:
            engines: dict[str, Engine] = {}
            for spec in specs:
                engines[spec.engine], _ = start_engine(spec)
                stack.callback(engines[spec.engine].close)
            speeds = self._measure(engines)
            first = median(speeds[specs[0].engine])
            figures: dict[str, dict[str, Any]] = {
                name: {"tokens_per_s": median(each), "ratio": median(each) / first, "rounds_tokens_per_s": each}
                for name, each in speeds.items()
            }
            if self.verify:
                for name, agreement in _agreements(engines, specs[0]).items():
                    figures[name] |= agreement
        _show_table(figures)
        holds = all(each.get("token_mult_prob_error", 1.0) <= FAULT for each in figures.values())
        if self.json:
            versions = {"vllm": installed_version(), "torch": version("torch"), "transformers": version("transformers")}
            asked = {"model": self.engine.model, **counts, "max_new_tokens": self.sampling.max_new_tokens}
            show_json({**asked, "engines": figures, "versions": versions, "holds": holds})
        return 0 if holds else 1

    def _measure(self, engines: Mapping[str, Engine]) -> dict[str, list[float]]:
        """Tokens a second of each engine in each round."""
        draw, names = random.Random(0), list(engines)
        vocabulary = min(engine.limits.vocab_size for engine in engines.values())
        speeds: dict[str, list[float]] = {name: [] for name in names}
        for number in range(-1, self.rounds):
            # New prompts each round, for an engine may keep the prefixes of earlier ones.
            prompts = [[draw.randrange(vocabulary) for _ in range(self.prompt_tokens)] for _ in range(self.prompts)]
            turn = max(number, 0) % len(names)
            for name in [*names[turn:], *names[:turn]]:
                start = time.perf_counter()
                rollouts = engines[name].generate(prompts, self.sampling)
                speed = sum(len(rollout.tokens) for rollout in rollouts) / (time.perf_counter() - start)
                if number >= 0:
                    speeds[name].append(speed)
                    say(f"round {number + 1} of {self.rounds}: {name} {speed:,.0f} tokens/s")
        return speeds


def _agreements(engines: Mapping[str, Engine], spec: EngineSpec) -> dict[str, dict[str, Any]]:
    """Compare the logp of each engine with the model in float32, on the CPU, where the engines take no memory."""
    from rl_generation.checkpoints import load_model
    from rl_generation.verify import verify_logp

    model = load_model(spec, dtype="float32", device="cpu")
    found = {name: verify_logp(engine, model) for name, engine in engines.items()}
    return {
        name: {each: getattr(agreement, each) for each in AGREEMENT} | {"compared_tokens": agreement.tokens}
        for name, agreement in found.items()
    }


def _show_table(figures: Mapping[str, Mapping[str, Any]]) -> None:
    titles: Sequence[str] = ("tokens/s", "ratio", "slowest", "fastest", "error", "max |d|")
    show(f"{'engine':<14}" + "".join(f"{title:>11}" for title in titles))
    for name, each in figures.items():
        rounds = each["rounds_tokens_per_s"]
        row = (
            f"{name:<14}{each['tokens_per_s']:>11,.0f}{each['ratio']:>11.2f}{min(rounds):>11,.0f}{max(rounds):>11,.0f}"
        )
        if "max_abs_difference" in each:
            row += f"{each['token_mult_prob_error']:>11.6f}{each['max_abs_difference']:>11.1e}"
        show(row)
