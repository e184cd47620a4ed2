"""SFT on conversations over several Ray ranks measures the held-out loss of one process."""

from importlib.util import find_spec

import pytest

if find_spec("ray") is None:
    pytest.skip("Ray is not installed: nox -s integration-vllm runs these tests", allow_module_level=True)

from compare_with_ray import run_in_process_and_over_ray

RECIPE = """
run_dir: {folder}/one
cpu_threads: 1
policy: {{model_name: {folder}/model, generation: {{max_new_tokens: 4}}}}
data: {{source: {folder}/rows.jsonl}}
evaluation: {{every: 2, samples: 2}}
sft: {{max_num_steps: 4, batch_size: 6, optimizer: {{lr: 1.0e-3}}}}
"""


def test_two_ranks_measure_the_held_out_loss_that_one_process_measures(ray_cluster, tmp_path):
    talks = [
        [{"role": "user", "content": f"{number}+1="}, {"role": "assistant", "content": str(number + 1)}]
        for number in range(60)
    ]
    logs = run_in_process_and_over_ray(tmp_path, RECIPE, [{"messages": talk} for talk in talks], steps=4)
    alone, together = ([line["held_out_loss"] for line in lines if "held_out_loss" in line] for lines in logs)
    assert len(alone) == 3
    assert alone[-1] < alone[0]
    assert together == pytest.approx(alone, rel=1e-4)
