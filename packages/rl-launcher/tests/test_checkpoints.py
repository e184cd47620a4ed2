"""Claims about checkpoints: whole or absent, kept by rule, one format; logs go on without a double step."""

import json
import math
import os
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl_backends.checkpoints.folders import write_text
from rl_launcher.checkpoints import CheckpointError, export, find_latest, list_checkpoints
from rl_launcher.checkpoints.disk import DiskSpaceError, check_space, claimed
from rl_launcher.checkpoints.recipe_changes import changed_keys, check_changes
from rl_launcher.checkpoints.save import due, to_keep, truncate_logs
from rl_launcher.errors import Refusal, RunStoppedError
from rl_launcher.recipe_files import load_recipe
from rl_launcher.run import resume, run
from rl_launcher.schema import CheckpointingConfig, Recipe
from rl_observe import RunDirectory, read_events


@dataclass(frozen=True)
class Kept:
    total: int
    metric: float | None


METRICS = st.none() | st.floats(-1, 1)
CONFIGS = st.builds(
    CheckpointingConfig,
    ft_keep_latest_k=st.integers(1, 3),
    keep_top_k=st.integers(0, 3),
    higher_is_better=st.booleans(),
)


@given(st.lists(METRICS, max_size=8), CONFIGS)
def test_the_newest_and_the_best_are_kept_and_nothing_else(metrics, config):
    checkpoints = [Kept(total=total, metric=metric) for total, metric in enumerate(metrics)]
    kept = to_keep(checkpoints, config)
    newest = checkpoints[-config.ft_keep_latest_k :]
    assert kept == sorted(kept, key=lambda each: each.total)
    assert set(newest) <= set(kept)
    others = [each for each in kept if each not in newest]
    assert len(others) <= config.keep_top_k
    sign = 1 if config.higher_is_better else -1
    gone = [each for each in checkpoints if each not in kept and each.metric is not None]
    assert all(sign * old.metric >= sign * lost.metric for old in others for lost in gone)


def test_a_checkpoint_is_due_by_steps_by_seconds_and_before_the_deadline():
    def ask(config, **changed):
        given = {"before": 4, "after": 6, "since_save_s": 5.0, "elapsed_s": 100.0, "step_s": 2.0}
        decided = due(CheckpointingConfig(**config), **{**given, **changed})
        return decided.save, decided.end

    assert ask({}) == (False, False)
    assert ask({"save_period": 5}) == (True, False)
    assert ask({"save_period": 4}) == (False, False)
    assert ask({"save_period": 6}) == (True, False)
    assert ask({"save_period_s": 5.0}) == (True, False)
    assert ask({"save_period_s": 5.1}) == (False, False)
    deadline = {"checkpoint_must_save_by": str(timedelta(seconds=102))}
    assert ask(deadline) == (True, True)
    assert ask(deadline, step_s=1.0) == (False, False)


CHANGES = {
    "cluster.max_restarts": (0, 2),
    "logger.wandb.project": ("a", "b"),
    "checkpointing.save_period": (0, 5),
    "evaluation.every": (4, 8),
    "policy.dtensor_cfg.tensor_parallel_size": (1, 2),
    "policy.megatron_cfg.pipeline_model_parallel_size": (1, 2),
}


def test_what_changes_the_curve_may_not_change_when_a_run_goes_on():
    check_changes(CHANGES)
    with pytest.raises(Refusal, match=r"grpo\.optimizer\.lr \(0\.1 -> 0\.2\), seed \(0 -> 1\) cannot change"):
        check_changes({**CHANGES, "grpo.optimizer.lr": (0.1, 0.2), "seed": (0, 1)})
    assert changed_keys({"a": {"b": 1}, "c": None}, {"a": {"b": 1}, "c": {"d": 2}}) == {"c": (None, {"d": 2})}


def test_too_little_disk_is_refused_with_what_is_needed_and_what_is_free(tmp_path):
    config = CheckpointingConfig(save_period=10, ft_keep_latest_k=2, keep_top_k=1)
    sizes = {"checkpoint_bytes": 12_000_000_000, "model_bytes": 4_000_000_000}
    check_space(tmp_path, **sizes, config=CheckpointingConfig(), free_bytes=16_000_000_000)
    check_space(tmp_path, **sizes, config=config, free_bytes=52_000_000_000)
    with pytest.raises(DiskSpaceError, match=r"has 51\.9 GB free, and the run needs at least 52 GB: .*_latest_k=2"):
        check_space(tmp_path, **sizes, config=config, free_bytes=51_900_000_000)


def test_a_run_is_carried_by_one_process_at_a_time(recipe, tmp_path, monkeypatch, stop_after):
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(RunStoppedError):
            run_recipe(recipe)
    directory = RunDirectory.open(tmp_path / "run")
    with claimed(directory), pytest.raises(Refusal, match=f"is in use by process {os.getpid()} of "):
        resume(directory.path)
    assert not (directory.path / ".claimed").exists()
    assert resume(directory.path)["steps"] == 14


def run_recipe(recipe, *overrides):
    return run(load_recipe(recipe, schema=Recipe, overrides=overrides))


def test_checkpoints_are_kept_as_the_recipe_says_and_a_finished_run_keeps_them(recipe, tmp_path):
    kept = ["checkpointing={save_period: 2, ft_keep_latest_k: 2, keep_top_k: 1}", "evaluation.every=2"]
    run_recipe(recipe, *kept)
    found = list_checkpoints(RunDirectory.open(tmp_path / "run"))
    assert [each.total for each in found[-2:]] == [12, 14]
    assert [(each.stage, each.step, each.version) for each in found[-2:]] == [("grpo", 6, 12), ("grpo", 8, 14)]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    best = max(line["held_out_greedy"] for line in lines if "held_out_greedy" in line and line["step"])
    assert max(each.metric for each in found) == best
    assert len(found) in {2, 3}
    assert all(path.name.startswith("step_") for path in (tmp_path / "run" / "checkpoints").iterdir())
    with pytest.raises(Refusal, match="it has finished"):
        resume(tmp_path / "run")


def test_a_run_that_must_save_by_a_moment_ends_to_be_resumed_and_goes_on(recipe, tmp_path, curve):
    run_recipe(recipe, f"run_dir={tmp_path}/whole")
    with pytest.raises(RunStoppedError, match="must_save_by") as stopped:
        run_recipe(recipe, "checkpointing.checkpoint_must_save_by=00:00:00")
    assert stopped.value.exit_code == 75
    assert len(curve(tmp_path / "run")) == 1
    summary = resume(
        tmp_path / "run", ["checkpointing.checkpoint_must_save_by=null", "logger.num_samples_with_tokens=1"]
    )
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    assert summary["conditions"] == {"must_save_by": 1, "resumed": 1}
    told = [each["message"] for each in read_events(RunDirectory.open(tmp_path / "run"))]
    assert "checkpointing.checkpoint_must_save_by is now None" in told[1]
    again = load_recipe(tmp_path / "run" / "recipe.yaml", schema=Recipe).value
    assert again.checkpointing.checkpoint_must_save_by is None


def test_a_run_is_not_resumed_as_another_run(recipe, tmp_path, monkeypatch, stop_after):
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(RunStoppedError):
            run_recipe(recipe)
    before = (tmp_path / "run" / "recipe.yaml").read_text()
    with pytest.raises(Refusal, match=r"grpo\.optimizer\.lr \(0\.01 -> 0\.02\) cannot change"):
        resume(tmp_path / "run", ["grpo.optimizer.lr=0.02"])
    assert (tmp_path / "run" / "recipe.yaml").read_text() == before


def test_a_damaged_checkpoint_is_named_and_never_passed_over(recipe, tmp_path):
    run_recipe(recipe, "grpo=null", "checkpointing={save_period: 2, ft_keep_latest_k: 3}")
    directory = RunDirectory.open(tmp_path / "run")
    newest = find_latest(directory)
    marker = newest.folder / "complete.json"
    good = marker.read_text()
    marker.write_text(good.replace('"step": 6', '"step": 5'))
    with pytest.raises(CheckpointError, match=r"step_00000006/complete\.json is damaged: .* or delete that folder"):
        find_latest(directory)
    marker.unlink()
    with pytest.raises(CheckpointError, match="step_00000006 is incomplete"):
        find_latest(directory)
    write_text(marker, good)
    assert find_latest(directory) == newest


def scalars(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_what_was_logged_after_the_checkpoint_is_cut_off_and_kept_beside_it(recipe, tmp_path, curve):
    run_recipe(recipe)
    directory = RunDirectory.open(tmp_path / "run")
    lines = directory.metrics.read_bytes().splitlines(keepends=True)
    keep = sum(map(len, lines[:8]))
    directory.metrics.write_bytes(b"".join(lines) + b'{"stage": "gr')  # as a kill leaves it
    before = curve_of(lines[:8])
    said = truncate_logs(directory, logs={"metrics.jsonl": keep, "samples.jsonl": 0, "spans.jsonl": 10**9})
    assert directory.metrics.read_bytes() == b"".join(lines[:8])
    assert (tmp_path / "run" / "metrics.jsonl.discarded").read_bytes() == b"".join(lines[8:]) + b'{"stage": "gr\n'
    assert said[0] == f"{len(lines) - 8 + 1} lines of metrics.jsonl after it are in metrics.jsonl.discarded"
    assert "samples.jsonl" in said[1]
    drawn = scalars(directory.tensorboard)
    assert [step for step, _ in drawn["sft/loss"]] == [1, 2, 3, 4, 5, 6]
    assert drawn["sft/loss"] == [(step, pytest.approx(loss)) for step, loss in before]
    assert max(step for tag, found in drawn.items() if tag.startswith("grpo/") for step, _ in found) <= 2


def curve_of(lines):
    rows = map(json.loads, lines)
    return [(row["step"], row["loss"]) for row in rows if row["stage"] == "sft" and math.isfinite(row["loss"])]


def test_a_model_is_exported_from_a_run_and_from_any_of_its_checkpoints(recipe, tmp_path):
    run_recipe(recipe, "checkpointing={save_period: 2, ft_keep_latest_k: 9}")
    last = export(tmp_path / "run", tmp_path / "last")
    newest = export(tmp_path / "run" / "checkpoints" / "step_00000014", tmp_path / "newest")
    early = export(tmp_path / "run", tmp_path / "early", step=6)
    weights = [
        transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (last, newest, early)
    ]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)
    assert any(not torch.equal(weights[0][name], weights[2][name]) for name in weights[0])
    assert transformers.AutoTokenizer.from_pretrained(newest).chat_template
    with pytest.raises(Refusal, match="exists already, and nothing is overwritten"):
        export(tmp_path / "run", last)
    with pytest.raises(Refusal, match=r"step_00000005 does not exist; checkpoints of this run: step_00000002, "):
        export(tmp_path / "run", tmp_path / "none", step=5)
    (tmp_path / "run" / "checkpoints" / "step_00000006" / "policy" / "checkpoint.json").write_text("{}")
    with pytest.raises(Refusal, match=r"checkpoint\.json: 2 bytes, and \d+ were written: truncated"):
        export(tmp_path / "run", tmp_path / "none", step=6)
    assert not (tmp_path / "none").exists()
