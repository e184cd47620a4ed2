"""`rl-algorithms`, also `python -m rl_algorithms`: what an algorithm's loss is, before anything trains.

    rl-algorithms explain                              the algorithms by name
    rl-algorithms explain dapo kl.weight=0.01 --json   the formula, and what is normalised by what

Exit codes: 0 it holds, 1 it does not, 2 refused or misused; the reasons are printed.
"""

import argparse
import dataclasses
import difflib
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_algorithms import dpo, kto, orpo, ppo, presets, reward_model, sft
from rl_algorithms.distillation import config as distillation
from rl_algorithms.objective import Objective

__all__ = ["main"]

PROGRAM = "rl-algorithms"
INTERRUPTED = 130
ANY_NUMBER_OF_STEPS = 5040  # a multiple of whatever number of steps is taken on one batch of rollouts

LOSSES: dict[str, tuple[Callable[..., Any], Callable[[Any], str]]] = {
    "grpo": (Objective, Objective.explain),
    **{name: (getattr(presets, name), Objective.explain) for name in presets.preset_names() if name != "ppo"},
    "ppo": (ppo.PPOConfig, ppo.explain),
    "sft": (sft.SFTConfig, sft.explain),
    "dpo": (dpo.DPOConfig, dpo.explain),
    "kto": (kto.KTOConfig, kto.explain),
    "orpo": (orpo.ORPOConfig, orpo.explain),
    "reward_model": (reward_model.RewardModelConfig, reward_model.explain),
    "distill": (distillation.DistillConfig, distillation.explain),
}
"""By name, what makes the configuration and what explains it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    try:
        _explain(arguments.algorithm, arguments.settings, as_json=arguments.json)
        sys.stdout.flush()
    except ValueError as refusal:
        print(f"{PROGRAM} explain: {refusal}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROGRAM} explain: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush when the interpreter ends
    return 0


def _explain(algorithm: str | None, settings: Sequence[str], *, as_json: bool) -> None:
    """Print the loss of `algorithm`, or the algorithms that there are.

    Raises:
        ValueError: no such algorithm or key, or a value that its configuration refuses.
    """
    if algorithm is None:
        print("\n".join(f"{name:<30}{_summary(make)}" for name, (make, _) in LOSSES.items()))
        if as_json:
            print(json.dumps({"algorithms": list(LOSSES)}))
        return
    if algorithm not in LOSSES:
        raise ValueError(
            f"there is no algorithm {algorithm!r}{_nearest(algorithm, LOSSES)}; there are {', '.join(LOSSES)}"
        )
    make, explain = LOSSES[algorithm]
    config = _configured(make, dict(map(_setting, settings)))
    text = explain(config)
    print(text)
    if as_json:
        print(json.dumps({"algorithm": algorithm, "loss": text.splitlines(), "config": dataclasses.asdict(config)}))


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r} is not key=value, such as kl.weight=0.01")
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError:  # a word
        return key, value
    return key, tuple(parsed) if isinstance(parsed, list) else parsed


def _configured(make: Callable[..., Any], settings: Mapping[str, Any]) -> Any:
    """What `make` returns, with its arguments and the dotted fields of its dataclasses set."""
    arguments = inspect.signature(make).parameters
    given = {name: value for name, value in settings.items() if name in arguments}
    if "max_num_steps" in arguments:  # required, and in no formula
        given.setdefault("max_num_steps", ANY_NUMBER_OF_STEPS)
    for name, each in arguments.items():
        if each.default is each.empty and name not in given:
            raise ValueError(f"{name} has no default; give it, as in {name}=1024")
    config = make(**given)
    fields: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in arguments:
            _nest(config, key.split("."), value, into=fields, key=key)
    return _replaced(config, fields)


def _nest(config: Any, path: Sequence[str], value: Any, *, into: dict[str, Any], key: str) -> None:
    known = [each.name for each in dataclasses.fields(config)]
    if path[0] not in known:
        raise ValueError(f"{key}: there is no {path[0]!r}{_nearest(path[0], known)}; there are {', '.join(known)}")
    if len(path) == 1:
        into[path[0]] = value
        return
    inner = getattr(config, path[0])
    if not dataclasses.is_dataclass(inner):
        raise ValueError(f"{key}: {path[0]} is {inner!r}, and has no fields of its own")
    _nest(inner, path[1:], value, into=into.setdefault(path[0], {}), key=key)


def _replaced(config: Any, fields: Mapping[str, Any]) -> Any:
    """`config` with all its fields replaced at once: one alone might not go together with the others."""
    values = {}
    for name, value in fields.items():
        inner = getattr(config, name)
        values[name] = _replaced(inner, value) if dataclasses.is_dataclass(inner) else value
    return dataclasses.replace(config, **values) if values else config


def _nearest(name: str, known: Any) -> str:
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def _summary(make: Callable[..., Any]) -> str:
    return (inspect.getdoc(make) or "").partition("\n")[0]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Algorithms of post-training, explained before they run.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    summary = "print the formula of a loss, and what is normalised by what"
    explain = commands.add_parser("explain", help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    explain.add_argument("algorithm", nargs="?", help="such as dapo, gspo, dpo, sft; without one all are listed")
    explain.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="a field, such as kl.weight=0.01")
    explain.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
