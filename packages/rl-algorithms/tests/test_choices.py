"""What is not one of a few, not a number or not a count is refused by name, by every configuration."""

import subprocess
import sys
from dataclasses import dataclass
from typing import Literal, TypeAlias

import pytest

from rl_algorithms.choices import check_choice, check_choices

EVERY_CONFIG = """
import dataclasses, importlib, math, pkgutil, typing
import rl_algorithms

modules = pkgutil.walk_packages(rl_algorithms.__path__, "rl_algorithms.")
names = [m.name for m in modules if ".adapters." not in m.name and not m.name.endswith(("_worker", "_harness"))]
configs = {c for n in names for c in vars(importlib.import_module(n)).values()
           if isinstance(c, type) and dataclasses.is_dataclass(c) and hasattr(c, "__pydantic_config__")}
num_tried = 0


def members(annotation):
    return [m for m in (*typing.get_args(annotation), annotation) if m is not type(None)]


for config in sorted(configs, key=lambda c: c.__name__):
    required = {f.name: 4 for f in dataclasses.fields(config)
                if f.default is f.default_factory is dataclasses.MISSING}
    by_name = {"Source": {"path": "rows.jsonl"}, "EnvironmentConfig": {"reward": "reward.py:score"}}
    required = by_name.get(config.__name__, required)
    config(**required)
    for name, annotation in typing.get_type_hints(config).items():
        of = members(annotation)
        if typing.get_origin(annotation) in (typing.ClassVar, dict, tuple):
            continue
        if any(typing.get_origin(m) is typing.Literal for m in of):
            wrong = ["nonsense"]
        elif float in of:
            wrong = [math.nan, "1", True]
        elif int in of:
            wrong = [1.5, True]
        elif annotation is bool:
            wrong = ["false"]
        else:
            continue
        for value in wrong:
            num_tried += 1
            try:
                config(**{**required, name: value})
            except ValueError as error:
                if f"{name}={value!r}" not in str(error):
                    print(f"{config.__name__}({name}={value!r}) says {error}")
            else:
                print(f"{config.__name__}({name}={value!r}) is taken")
print("tried", num_tried > 100)
"""


def test_every_configuration_refuses_wrong_kinds_of_values_in_plain_python():
    """In another process: in this one the types of arguments are checked."""
    found = subprocess.run([sys.executable, "-c", EVERY_CONFIG], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "tried True\n"


Level: TypeAlias = Literal["token", "sequence"]


@dataclass
class Fixture:
    place: Literal["loss", "reward"] | None = "loss"
    size: int = 1


def test_the_nearest_choice_is_named():
    check_choice("place", "reward", Literal["loss", "reward"])
    with pytest.raises(ValueError, match=r"place='rewards' is not one of 'loss', 'reward'; did you mean 'reward'\?"):
        check_choice("place", "rewards", Literal["loss", "reward"])
    with pytest.raises(ValueError, match=r"place=3 is not one of 'loss', 'reward'$"):
        check_choice("place", 3, Literal["loss", "reward"])


def test_a_union_of_choices_and_none_is_a_choice_and_other_annotations_are_none():
    check_choices(Fixture(place=None))
    check_choices(Fixture(size="large"))
    check_choice("weight", "none", Literal["none"] | Level)
    check_choice("weight", 0.5, Literal["none"] | float)
    with pytest.raises(ValueError, match="weight=None is not one of 'none', 'token', 'sequence'"):
        check_choice("weight", None, Literal["none"] | Level)
