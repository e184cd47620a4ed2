"""DPO on given pairs over several Ray ranks learns what one process learns."""

from importlib.util import find_spec

import pytest

if find_spec("ray") is None:
    pytest.skip("Ray is not installed: nox -s integration-vllm runs these tests", allow_module_level=True)

from compare_with_ray import run_in_process_and_over_ray

RECIPE = """
run_dir: {folder}/one
cpu_threads: 1
policy: {{model_name: {folder}/model, generation: {{max_new_tokens: 9}}}}
data: {{source: {folder}/rows.jsonl}}
evaluation: {{every: 2, samples: 0}}
dpo: {{pairs: data, max_num_steps: 4, batch_size: 6, optimizer: {{lr: 1.0e-3}}}}
"""
COMPARED = ("loss", "margin", "grad_norm", "chosen_logratio", "held_out_margin", "held_out_pair_accuracy")


@pytest.mark.slow
def test_two_ranks_learn_from_given_pairs_what_one_process_learns(ray_cluster, tmp_path):
    pairs = [
        {"prompt": f"{number}>", "chosen": "".join(sorted(str(number))), "rejected": str(number)[::-1] + "9"}
        for number in range(1000, 1040)
    ]
    logs = run_in_process_and_over_ray(tmp_path, RECIPE, pairs, steps=4)
    alone, together = ([{key: line[key] for key in COMPARED if key in line} for line in lines] for lines in logs)
    assert [*together[0]] == ["held_out_margin", "held_out_pair_accuracy"]
    assert together[-1]["held_out_margin"] > 0
    for ours, theirs in zip(together, alone, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
