"""Claims about failures on two ranks: nobody hangs, all know, no part of a gradient stays, the next one is right."""

import functools
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parent / "programs" / "failures.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory, start_program):
    folder = tmp_path_factory.mktemp("failures")
    processes = [start_program(PROGRAM, {"rank": rank, "folder": str(folder)}) for rank in range(2)]
    try:
        assert [process.wait(timeout=600) for process in processes] == [0, 0]
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


MESHES = ("FSDP2", "FSDP2, reduced last", "HSDP", "TP2", "CP2")
DETACHED = "ValueError: no gradient flows from what the loss returned: it was detached, or made of constants; for rows"
SHAPED = "TypeError: the sum 'rewards' that the loss returned is of shape [2]; reduce it to a single number in the loss"
RAISED = {
    "loss of rank 1": ("RankError: rank 1 failed: ZeroDivisionError: no rewards", "ZeroDivisionError: no rewards"),
    "backward of all": ("FloatingPointError: in backward", "FloatingPointError: in backward"),
    "deep in backward of all": ("FloatingPointError: in backward", "FloatingPointError: in backward"),
    "forward of all": ("FloatingPointError: in forward", "FloatingPointError: in forward"),
}
ON_ONE_MESH = {
    "detached on rank 1": (f"RankError: rank 1 failed: {DETACHED}", DETACHED),
    "shaped sum on rank 1": (f"RankError: rank 1 failed: {SHAPED}", SHAPED),
}
CASES = [(mesh, where) for mesh in MESHES for where in RAISED] + [("FSDP2", where) for where in ON_ONE_MESH]


@pytest.mark.parametrize(("mesh", "where"), CASES)
def test_every_rank_raises_and_the_next_gradient_is_that_of_a_fresh_start(results, expected, mesh, where):
    for rank, result in enumerate(results):
        found = result[f"{mesh}, {where}"]
        assert found["raised"].startswith({**RAISED, **ON_ONE_MESH}[where][rank])
        assert found["left"] == []
        torch.testing.assert_close(found["gradients"], expected, rtol=1e-4, atol=1e-6)


def test_a_rank_that_repeats_rows_to_keep_in_step_adds_nothing_not_even_a_nan(results):
    for result in results:
        assert result["repeated rows"]["finite"]
        assert result["repeated rows"]["sums"]["loss"] == results[0]["repeated rows"]["sums"]["loss"]
        assert result["repeated rows"]["sums"]["loss"] < 0
