"""Claims about named conditions: what is noticed, what the run does then, and that it is told."""

import ast
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rl_backends import DTensorBackend
from rl_launcher import ray as distributed
from rl_launcher.build.build import build
from rl_launcher.checkpoints import list_checkpoints
from rl_launcher.checkpoints.disk import DiskSpaceError
from rl_launcher.errors import ConditionError, RestartableError, RunStoppedError
from rl_launcher.ray.engine_pool import EngineDiedError
from rl_launcher.recipe_files import load_recipe
from rl_launcher.run import Run, resume, run
from rl_launcher.run.conditions import CONDITIONS, conditions_table, name_of, reaction_to
from rl_launcher.run.signals import Interruption
from rl_launcher.schema import ClusterConfig, Recipe
from rl_observe import RunDirectory, health, read_events

NAMES = {each.name for each in CONDITIONS}


def test_every_condition_has_a_cause_and_a_reaction_in_the_table():
    table = conditions_table().splitlines()
    assert len(table) == len(CONDITIONS) + 2
    assert all(re.fullmatch(r"\| `\w+` \| .{10,} \| .{10,} \|", row) for row in table[2:])


def test_the_conditions_of_the_log_are_among_those_of_a_run_and_each_stands_once():
    names = [each.name for each in CONDITIONS]
    assert {each.name for each in health.CONDITIONS} <= set(names)
    assert len(set(names)) == len(names)


def test_what_ends_a_run_is_named_and_has_a_reaction():
    assert name_of(ConditionError("must_save_by", "now")) == "must_save_by"
    assert name_of(KeyError("else")) == "failed"
    assert reaction_to("must_save_by") == "the run saves and ends with exit code 75: resume it"
    assert reaction_to("a name of a user's own") == reaction_to("failed")


def load(recipe, *overrides):
    return load_recipe(recipe, schema=Recipe, overrides=overrides)


def test_a_loss_that_is_not_a_number_ends_the_run_saved_as_it_was_before(recipe, tmp_path):
    with pytest.raises(
        RunStoppedError, match="the loss of this step is nan, and its gradient was not applied"
    ) as stopped:
        run(load(recipe, "sft.optimizer.lr=1e38", "sft.optimizer.max_grad_norm=1e30"))
    directory = RunDirectory.open(tmp_path / "run")
    summary = json.loads(directory.summary.read_text())
    assert stopped.value.exit_code == 1
    assert summary["ended_by"] == "nonfinite_loss"
    (saved,) = list_checkpoints(directory)
    assert saved.version == summary["steps"] == 1
    (event,) = read_events(directory)
    assert (event["name"], event["stage"], event["step"]) == ("nonfinite_loss", "sft", 1)


def test_a_condition_that_is_to_stop_the_run_saves_it_and_the_run_can_go_on(recipe, tmp_path):
    (tmp_path / "reward.py").write_text(
        "calls = [0]\n"
        "def score(completions):\n"
        "    calls[0] += 1\n"
        "    best = 1.0 if calls[0] < 5 else 0.001\n"
        "    return [best * (len(set(c)) + 1) for c in completions]\n"
    )
    stopping = "health={on_reward_collapse: stop, reward_collapse_steps: 1}"
    with pytest.raises(
        RunStoppedError, match="stopped: reward_collapse: the mean reward of the last 1 logged"
    ) as stopped:
        run(load(recipe, "sft=null", stopping))
    assert stopped.value.exit_code == 1
    summary = resume(tmp_path / "run", ["health.on_reward_collapse=warn"])
    assert summary["steps"] == 8
    assert summary["conditions"]["reward_collapse"] >= 1


def test_rollouts_that_fail_cost_themselves_and_are_counted(recipe, tmp_path):
    with (tmp_path / "reward.py").open("a") as file:
        file.write(
            "def sometimes(prompts, completions):\n"
            "    return [1 / (prompt != '5+0=') + len(text) / 8 for prompt, text in zip(prompts, completions)]\n"
        )
    summary = run(load(recipe, "sft=null", f"env.reward={tmp_path}/reward.py:sometimes", "env.on_error=zero"))
    assert summary["reward_errors"] > 0
    assert summary["conditions"]["rollouts_failed"] >= 1
    assert summary["conditions"].keys() <= NAMES


def test_a_disk_that_fills_up_ends_the_run_with_its_last_checkpoint_whole(recipe, tmp_path, monkeypatch, curve):
    saved, original = [], DTensorBackend.save_checkpoint

    def full(backend, folder, **named):
        saved.append(folder)
        if len(saved) > 2:
            raise OSError(28, "No space left on device")
        return original(backend, folder, **named)

    with monkeypatch.context() as patch:
        patch.setattr(DTensorBackend, "save_checkpoint", full)
        with pytest.raises(RunStoppedError) as stopped:
            run(load(recipe, "checkpointing.save_period=2"))
    assert "are free in" in str(stopped.value)
    assert "step_00000004, step 4 of sft, is whole. Continue with: rl-launcher resume" in str(stopped.value)
    assert resume(tmp_path / "run")["conditions"] == {"disk_full": 1, "resumed": 1}
    run(load(recipe, f"run_dir={tmp_path}/whole"))
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def names_told():
    """The first argument of every `on_event(...)` over Ray, and the condition of every error that ends a run there."""
    for file in Path(distributed.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "on_event":
                first = node.args[0]
                choices = [first.body, first.orelse] if isinstance(first, ast.IfExp) else [first]
                yield from (ast.literal_eval(choice) for choice in choices)
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "condition":
                yield ast.literal_eval(node.value)


def test_whatever_happens_over_ray_has_a_name_that_is_explained():
    told = set(names_told())
    assert {"engine_restarted", "engine_healed", "engine_died", "refit_repeated"} <= told
    assert told <= NAMES


def test_engines_that_are_used_up_leave_the_policys_weights_to_be_saved():
    assert not EngineDiedError("engine 0 died").weights_lost
    assert RankLostError("rank 1 died").weights_lost


def test_a_disk_without_room_is_refused_before_the_first_step_and_the_log_is_finished(recipe, tmp_path, monkeypatch):
    resolved = load(recipe, "logger.trace=true").value
    directory = RunDirectory.create(resolved.run_dir)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with Interruption() as interruption, pytest.raises(DiskSpaceError):
        Run(resolved, directory, interruption=interruption, build=build).execute()
    assert (directory.path / "trace.json").exists()
    assert not (directory.path / "metrics.jsonl").read_text()


class RankLostError(RestartableError):
    """As the distributed trainer's."""


@pytest.mark.parametrize("save_period", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_run_that_loses_a_rank_goes_on_by_itself_from_its_last_checkpoint(
    recipe, tmp_path, monkeypatch, curve, save_period
):
    expected = run(load(recipe, f"run_dir={tmp_path}/whole"))
    overrides = [f"checkpointing.save_period={save_period}", "cluster={runtime: ray, max_restarts: 2}"]
    resolved, closed, steps = load(recipe, *overrides).value, [], []

    def build_here(recipe):
        assert len(closed) == len(built)
        built.append(recipe)
        parts = build(replace(recipe, cluster=ClusterConfig()))
        return replace(parts, close=lambda: (closed.append(recipe), parts.close()))

    def dies(backend, original=DTensorBackend.optim_step):
        steps.append(backend)
        if len(steps) in {9, 20}:
            raise RankLostError("rank 1 of the trainer died: killed by signal 9")
        return original(backend)

    built = []
    monkeypatch.setattr(DTensorBackend, "optim_step", dies)
    directory = RunDirectory.create(resolved.run_dir)
    directory.recipe.write_text("run_dir: x")
    with Interruption() as interruption:
        summary = Run(resolved, directory, interruption=interruption, build=build_here).execute()
    restarts = 2 if not save_period else 1
    assert summary["conditions"] == {"trainer_died": restarts, "restarted": restarts}
    assert summary["restarts"] == restarts
    assert len(built) == len(closed) == restarts + 1
    assert curve(directory.path) == curve(tmp_path / "whole")
    assert summary["held_out_greedy_after"] == expected["held_out_greedy_after"]
    told = read_events(directory)[0]
    assert told["message"] == "rank 1 of the trainer died: killed by signal 9"
    assert told["reaction"].startswith("restart 1 of cluster.max_restarts=2: the run ")


def test_a_run_without_restarts_left_ends_and_says_how_to_go_on(recipe, tmp_path, monkeypatch):
    def dies(_backend):
        raise RankLostError("rank 1 died")

    monkeypatch.setattr(DTensorBackend, "optim_step", dies)
    with pytest.raises(
        RunStoppedError, match=r"No checkpoint was saved. Start again with: rl-launcher resume"
    ) as stopped:
        run(load(recipe))
    assert stopped.value.exit_code == 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["ended_by"] == "trainer_died"
    assert not (tmp_path / "run" / "checkpoints").exists()
