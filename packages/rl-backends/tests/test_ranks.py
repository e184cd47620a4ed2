"""Claims about ranks: however a batch and a model are cut, the steps are those of one plain process."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = {
    "data parallel, more rows than ranks": {"rows": 7, "config": {"micro_batch_size": 2}},
    "data parallel, one rank without rows": {"rows": 1},
    "data parallel, pairs": {"rows": 6, "kind": "Pairs", "loss": "pair_loss", "config": {"micro_batch_size": 2}},
    "tensor parallel": {"rows": 5, "config": {"tensor_parallel_size": 2, "micro_batch_size": 3}},
    "tensor parallel, tied": {"rows": 4, "family": "Qwen2", "config": {"tensor_parallel_size": 2}},
}


def run_ranks(tmp_path, case, ranks=2):
    task = {"family": "Qwen3", "kind": "Examples", "loss": "token_loss", "config": {}, **case}
    commands = [{**task, "rank": rank, "ranks": ranks, "folder": str(tmp_path)} for rank in range(ranks)]
    script = str(Path(__file__).with_name("ranks.py"))
    processes = [subprocess.Popen([sys.executable, script, json.dumps(command)]) for command in commands]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()
    return task, [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_two_ranks_take_the_steps_of_one_plain_process(world, tmp_path, case):
    task, results = run_ranks(tmp_path, case)
    model = world.make_model(task["family"])
    examples = world.make_examples(rows=task["rows"], kind=getattr(world, task["kind"]))
    loss = functools.partial(getattr(world, task["loss"]), num_tokens=examples.trainable.sum())
    gradients, weights = world.plain_steps(model, examples, loss, steps=3, lr=1e-2, max_grad_norm=1.0)
    norm = torch.nn.utils.get_total_norm(list(gradients.values())).item()
    with torch.no_grad():
        logp = world.plain_logp(model, examples)
    total = loss(logp, examples)[1]["loss"].item()
    for result in results:
        torch.testing.assert_close(result["logp"], logp, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(result["gradients"], gradients, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(result["weights"], weights, rtol=1e-4, atol=1e-5)
        assert result["norm"] == pytest.approx(norm, rel=1e-5)
        assert result["sums"]["loss"].item() == pytest.approx(total, rel=1e-5)


def test_a_model_trained_on_two_ranks_is_saved_whole(world, tmp_path):
    import transformers

    _, results = run_ranks(tmp_path, CASES["tensor parallel"])
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(dict(saved.named_parameters()), results[0]["weights"], rtol=0, atol=0)
