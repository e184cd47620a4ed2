"""Claims about failures on two ranks: nobody hangs, all know, no part of a gradient stays, the next one is right."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parent / "programs" / "failures.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("failures")
    tasks = [json.dumps({"rank": rank, "folder": str(folder)}) for rank in range(2)]
    processes = [subprocess.Popen([sys.executable, str(PROGRAM), task]) for task in tasks]
    try:
        assert [process.wait(timeout=240) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def expected(world):
    examples = world.make_examples(rows=7)
    loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())
    gradients, _ = world.plain_steps(world.make_model("Qwen3"), examples, loss, steps=1, lr=1e-2, max_grad_norm=1.0)
    return gradients


MESHES = ("FSDP2", "TP2", "CP2")
RAISED = {
    "loss of rank 1": ("RankError: rank 1 failed: ZeroDivisionError: no rewards", "ZeroDivisionError: no rewards"),
    "backward of all": ("FloatingPointError: in backward", "FloatingPointError: in backward"),
    "forward of all": ("FloatingPointError: in forward", "FloatingPointError: in forward"),
}


@pytest.mark.parametrize("where", RAISED)
@pytest.mark.parametrize("mesh", MESHES)
def test_every_rank_raises_and_the_next_gradient_is_that_of_a_fresh_start(results, expected, mesh, where):
    for rank, result in enumerate(results):
        found = result[f"{mesh}, {where}"]
        assert found["raised"] == RAISED[where][rank]
        assert found["left"] == []
        torch.testing.assert_close(found["gradients"], expected, rtol=1e-4, atol=1e-6)
