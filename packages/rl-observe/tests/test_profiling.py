"""The profiler records the steps that it was asked for, once, in a file that trace viewers read."""

import gzip
import json

import pytest
import torch

from rl_observe import Profiler
from rl_observe.config import ProfilerConfig


def recorded(path):
    with gzip.open(path, "rt") as file:
        return [event.get("name") for event in json.load(file)["traceEvents"]]


def test_the_steps_asked_for_are_recorded_and_no_others(tmp_path):
    work = {1: torch.sin, 2: torch.cos, 3: torch.tan, 4: torch.exp}
    with Profiler(ProfilerConfig(first_step=2, num_steps=2), tmp_path / "profile", rank=3) as profiler:
        profiler.reached("grpo", 0)
        for step, function in work.items():
            function(torch.ones(4))
            profiler.reached("grpo", step)
    (path,) = (tmp_path / "profile").iterdir()
    assert path == profiler.written
    assert path.name.startswith("grpo-steps-2-to-3-rank-3-")
    names = recorded(path)
    assert "aten::cos" in names
    assert "aten::tan" in names
    assert "aten::sin" not in names
    assert "aten::exp" not in names


def test_only_the_stage_that_is_named_is_counted(tmp_path):
    config = ProfilerConfig(first_step=1, num_steps=1, stage="grpo")
    with Profiler(config, tmp_path) as profiler:
        profiler.reached("sft", 0)
        profiler.reached("sft", 1)
        assert profiler.written is None
        profiler.reached("grpo", 0)
        torch.sin(torch.ones(2))
        profiler.reached("grpo", 1)
        assert profiler.written is not None


def test_a_run_that_ends_within_its_steps_leaves_what_was_recorded(tmp_path):
    with Profiler(ProfilerConfig(first_step=1, num_steps=50), tmp_path) as profiler:
        profiler.reached("grpo", 0)
        torch.sin(torch.ones(2))
        profiler.reached("grpo", 1)
    assert profiler.written is not None
    assert "grpo-steps-1-to-1-" in profiler.written.name
    assert "aten::sin" in recorded(profiler.written)


def test_without_a_config_nothing_is_recorded_or_written(tmp_path):
    with Profiler(None, tmp_path / "profile") as profiler:
        profiler.reached("grpo", 0)
        profiler.reached("grpo", 1)
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize("name", ["first_step", "num_steps"])
def test_nonsense_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name}=0 must be >= 1"):
        ProfilerConfig(**{name: 0})
