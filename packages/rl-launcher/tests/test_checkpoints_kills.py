"""Claims about kill -9: whenever it comes, also while something is saved, the run goes on as if it had not come."""

import json
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file

from rl_launcher.checkpoints import unfinished_of
from rl_launcher.recipe_files import load_recipe
from rl_launcher.run import resume, run
from rl_launcher.schema import Recipe
from rl_observe import RunDirectory, read_events

# Runs a recipe, and is killed before the n-th call of a function.
PROGRAM = """
    import functools, os, signal, sys
    import importlib
    from rl_launcher.recipe_files import load_recipe
    from rl_launcher.schema import Recipe
    from rl_launcher.run import run
    from rl_backends import DTensorBackend

    atomic, save, run_file = map(importlib.import_module, (
        "rl_backends.checkpoints.folders", "rl_launcher.checkpoints.save", "rl_launcher.run.run"))

    places = {
        "a step": (DTensorBackend, "optim_step"),
        "after a step is logged": (save.CheckpointManager, "after_step"),
        "the progress of a checkpoint": (save, "save_file"),
        "the marker of a checkpoint": (save, "mark_complete"),
        "the name of a checkpoint": (atomic, "sync_tree"),
        "the pruning of checkpoints": (save, "_remove"),
        "the model": (run_file.Run, "_save_model"),
        "the summary": (run_file, "write_text"),
    }
    owner, name = places[sys.argv[1]]
    function, calls = getattr(owner, name), [int(sys.argv[2])]

    @functools.wraps(function)
    def killed(*arguments, **named):
        calls[0] -= 1
        if not calls[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)

    setattr(owner, name, killed)
    run(load_recipe(sys.argv[3], schema=Recipe, overrides=sys.argv[4:]))
"""
CHECKPOINTS = "checkpointing={save_period: 2}"
MOMENTS = {
    "a step": (9, 8),
    "after a step is logged": (8, 8),
    "the progress of a checkpoint": (4, 6),
    "the marker of a checkpoint": (1, None),
    "the name of a checkpoint": (5, 8),
    "the pruning of checkpoints": (3, 8),
    "the model": (1, 14),
    "the summary": (2, 14),
}


@pytest.fixture(scope="module")
def whole(write_recipe, tmp_path_factory):
    """The directory and the summary of the same run, left alone."""
    recipe = write_recipe(tmp_path_factory.mktemp("whole"))
    return recipe.parent / "run", run(load_recipe(recipe, schema=Recipe))


@pytest.mark.parametrize(
    ("place", "count", "resumed_from"),
    [
        pytest.param(place, *at, marks=[] if place == "the marker of a checkpoint" else pytest.mark.slow)
        for place, at in MOMENTS.items()
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(whole, recipe, tmp_path, curve, place, count, resumed_from):
    whole_run, expected = whole
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), place, str(count), str(recipe), CHECKPOINTS]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    directory = RunDirectory.open(tmp_path / "run")
    torn = [path.name for path in unfinished_of(directory)]
    summary = resume(directory.path)
    said = read_events(directory)[0]["message"]
    if resumed_from is None:
        assert said.startswith("starts from its beginning, since no checkpoint was whole")
    else:
        assert f"from step_{resumed_from:08d}" in said
    assert all(f"{name} is torn, and was not read" in said for name in torn)
    assert bool(torn) == (
        place in {"the progress of a checkpoint", "the marker of a checkpoint", "the name of a checkpoint"}
    )
    assert curve(directory.path) == curve(whole_run)
    for name in ("steps", "tokens", "held_out_sampled_before", "held_out_sampled_after", "held_out_greedy_after"):
        assert summary[name] == expected[name]
    weights = [load_file(path / "model" / "model.safetensors") for path in (whole_run, directory.path)]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)
    assert not unfinished_of(directory)
    assert json.loads(directory.summary.read_text())["interrupted"] is False
