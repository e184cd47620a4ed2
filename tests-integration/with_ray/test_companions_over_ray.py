"""A chain of SFT, reward model and PPO over several Ray ranks learns what one process learns, and resumes exactly."""

import json
from importlib.util import find_spec

import pytest

if find_spec("ray") is None:
    pytest.skip("Ray is not installed: nox -s integration-vllm runs these tests", allow_module_level=True)

from compare_with_ray import TWO_RANKS, run_in_process_and_over_ray

from rl_launcher.errors import RunStoppedError
from rl_launcher.recipe_files import load_recipe
from rl_launcher.run import resume, run
from rl_launcher.run.record import Recorder
from rl_launcher.schema import Recipe
from rl_observe import RecordedSteps, RunDirectory

RECIPE = """
run_dir: {folder}/one
cpu_threads: 1
policy: {{model_name: {folder}/model, generation: {{max_new_tokens: 6}}}}
data: {{source: {folder}/prompts.jsonl}}
evaluation: {{every: 2, samples: 0}}
logger: {{recorded_steps: {{last: 16}}}}
sft: {{max_num_steps: 2, batch_size: 8, optimizer: {{lr: 1.0e-3}}}}
reward_model:
  data: {{source: {folder}/rows.jsonl}}
  max_num_steps: 4
  batch_size: 6
  optimizer: {{lr: 1.0e-3}}
ppo:
  max_num_steps: 4
  steps_per_generation: 2
  num_prompts: 6
  num_generations_per_prompt: 2
  objective: {{kl: {{weight: 0.02}}}}
  critic: {{optimizer: {{lr: 1.0e-3}}}}
  optimizer: {{lr: 1.0e-4}}
"""
COMPARED = ("loss", "value_loss", "reward", "pair_accuracy", "held_out_pair_accuracy", "held_out_greedy", "grad_norm")


@pytest.fixture
def pairs(tmp_path):
    """Pairs of which the sorted digits are better; the prompts of PPO lie beside them."""
    prompts = [{"prompt": f"{number}>", "answer": "".join(sorted(str(number)))} for number in range(2000, 2040)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    return [
        {"prompt": f"{number}>", "chosen": "".join(sorted(str(number))), "rejected": str(number)[::-1] + "9"}
        for number in range(1000, 1040)
    ]


@pytest.mark.slow
def test_two_ranks_train_reward_model_critic_and_policy_as_one_process_does(ray_cluster, tmp_path, pairs):
    logs = run_in_process_and_over_ray(tmp_path, RECIPE, pairs, steps=6, reward_model_steps=4)
    alone, together = ([{key: line[key] for key in COMPARED if key in line} for line in lines] for lines in logs)
    assert any("value_loss" in line for line in together)
    for ours, theirs in zip(together, alone, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    assert (tmp_path / "two" / "reward_model" / "model.safetensors").is_file()
    # What the ranks' losses computed of each token comes back, and is what one process records.
    for stage, columns in (
        ("sft", ("logp", "loss")),
        ("reward_model", ("figure/score",)),
        ("ppo", ("logp", "loss", "value", "advantage", "logp_old")),
    ):
        one, two = (RecordedSteps(RunDirectory.open(tmp_path / name), stage) for name in ("one", "two"))
        assert [*one] == [*two] != []
        for step in one:
            for name in ("tokens", "flags", *columns):
                ours, theirs = (each[step].columns[name].astype(float) for each in (two, one))
                assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4, nan_ok=True), (stage, step, name)


@pytest.mark.slow
def test_a_chain_that_is_stopped_over_ray_resumes_bit_for_bit(ray_cluster, tmp_path, pairs, monkeypatch):
    run_in_process_and_over_ray(tmp_path, RECIPE, pairs, steps=6, reward_model_steps=4)
    record, taken = Recorder.step, []

    def step(recorder, stage, *arguments, **named):
        record(recorder, stage, *arguments, **named)
        taken.append(stage)
        if len(taken) in {4, 7}:  # within the reward model, and after the first batch of PPO
            raise KeyboardInterrupt

    with monkeypatch.context() as stopped:
        stopped.setattr(Recorder, "step", step)
        asked = load_recipe(
            tmp_path / "recipe.yaml", schema=Recipe, overrides=[*TWO_RANKS, f"run_dir={tmp_path}/again"]
        )
        with pytest.raises(RunStoppedError):
            run(asked)
        with pytest.raises(RunStoppedError):
            resume(tmp_path / "again")
    resume(tmp_path / "again")
    for name in ("model", "reward_model"):
        files = [tmp_path / each / name / "model.safetensors" for each in ("two", "again")]
        assert files[0].read_bytes() == files[1].read_bytes()
