"""Claims about the translation of TRL's configurations: YAML and commands, each key accounted for, recipes load."""

import textwrap

import pytest

from rl_launcher.import_trl import TRLError, translate
from rl_launcher.recipe_files import load_recipe
from rl_launcher.schema import Recipe

YAML = """
    model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
    dataset_name: trl-lib/DeepMath-103K
    output_dir: out
    per_device_train_batch_size: 4
    gradient_accumulation_steps: 8
    num_generations: 8
    max_completion_length: 512
    learning_rate: 2e-6
    lr_scheduler_type: cosine
    max_steps: 100
    warmup_ratio: 0.1
    beta: 0.04
    epsilon: 0.2
    epsilon_high: 0.28
    loss_type: dr_grpo
    scale_rewards: none
    temperature: 0.9
    top_p: 0.95
    use_vllm: true
    vllm_gpu_memory_utilization: 0.4
    reward_funcs: [accuracy_reward]
    report_to: [wandb]
    run_name: first
    logging_steps: 10
    warp_drive: 3
"""
SCRIPT = """
    # Full training:
    accelerate launch --num_processes 4 examples/scripts/dpo.py \\
        --dataset_name trl-lib/ultrafeedback_binarized \\
        --model_name_or_path Qwen/Qwen2-0.5B-Instruct \\
        --learning_rate 5.0e-7 \\
        --num_train_epochs 1 \\
        --per_device_train_batch_size 2 \\
        --gradient_accumulation_steps 8 \\
        --eval_strategy steps \\
        --eval_steps 50 \\
        --use_peft \\
        --lora_r 32 \\
        --no_remove_unused_columns
"""


def written(tmp_path, text, name):
    file = tmp_path / name
    file.write_text(textwrap.dedent(text))
    return file


def test_a_yaml_of_grpo_is_translated_and_loads_as_a_recipe(tmp_path):
    translation = translate(written(tmp_path, YAML, "grpo.yaml"), algorithm="grpo")
    assert translation.problems == ()
    recipe = load_recipe(translation.recipe, schema=Recipe).value
    stage = recipe.grpo
    # 4 responses in 8 microbatches are one optimizer step on 4 groups of 8.
    assert (stage.num_prompts, stage.num_generations_per_prompt, stage.steps_per_generation) == (4, 8, 1)
    assert (stage.max_num_steps, stage.optimizer.lr, stage.optimizer.warmup_steps) == (100, 2e-6, 10)
    objective = stage.objective
    assert (objective.aggregation, objective.max_length) == ("seq-mean-token-sum-norm", 512)
    assert (objective.ratio.clip_high, objective.ratio.proximal, objective.kl.weight) == (0.28, "recomputed", 0.04)
    assert (objective.advantage.scale, recipe.policy.generation.top_p) == ("none", 0.95)
    assert recipe.policy.generation.vllm_cfg.gpu_memory_utilization == 0.4
    assert (recipe.data.source, recipe.data.split) == ("trl-lib/DeepMath-103K", "train")
    assert "warp_drive=3: no rule of the translation knows this key" in translation.report()
    assert "theirs are accuracy_reward" in translation.yaml
    assert {note.key for note in translation.of("dropped")} >= {"logging_steps", "use_vllm"}


def test_a_command_in_a_script_is_found_with_its_processes(tmp_path):
    translation = translate(written(tmp_path, SCRIPT, "run.sh"))
    assert translation.problems == ()
    recipe = load_recipe(translation.recipe, schema=Recipe).value
    assert (recipe.dpo.pairs, recipe.dpo.batch_size, recipe.dpo.beta) == ("data", 64, 0.1)
    assert (recipe.dpo.max_num_epochs, recipe.dpo.optimizer.lr) == (1, 5e-7)
    assert (recipe.cluster.gpus_per_node, recipe.evaluation.every, recipe.data.held_out_split) == (4, 50, "test")
    assert recipe.policy.dtensor_cfg.lora_cfg.rank == 32
    assert translation.yaml.startswith("# Translated from run.sh of TRL by `rl-launcher import-trl`.")


def test_what_changes_a_run_is_never_said_to_have_no_effect(tmp_path):
    keys = "optim: adafactor\ngeneration_kwargs: {repetition_penalty: 1.1}\nsync_ref_model: true\neos_token: <end>\n"
    trackers = "report_to: [trackio, mlflow, swanlab]\nrun_name: first\n"
    text = textwrap.dedent(YAML).replace("report_to: [wandb]\nrun_name: first\n", trackers) + keys
    translation = translate(written(tmp_path, text, "grpo.yaml"), algorithm="grpo")
    assert translation.problems == ()
    told = {note.key: note.value for note in translation.of("untranslated")}
    assert {"optim", "generation_kwargs", "sync_ref_model", "eos_token"} <= {key.partition(".")[0] for key in told}
    assert told["report_to"] == "swanlab"
    logger = translation.recipe["logger"]
    assert (logger["trackio"], logger["mlflow"]["run_name"]) == ({"project": "trl", "name": "first"}, "first")
    assert translation.recipe["grpo"]["objective"]["selection"] == {"groups_without_signal": "keep"}


@pytest.mark.parametrize(
    ("command", "stage"),
    [
        ("trl sft", "sft"),
        ("trl kto", "kto"),
        ("trl reward", "reward_model"),
        ("python trl/scripts/grpo.py", "grpo"),
        ("python examples/scripts/sft_gpt_oss.py", "sft"),
    ],
)
def test_each_of_their_commands_becomes_its_stage(tmp_path, command, stage):
    text = f"{command} --model_name_or_path a/b --dataset_name c/d --learning_rate 1e-5 --max_steps 7"
    translation = translate(written(tmp_path, text, "run.sh"))
    assert translation.problems == ()
    (only,) = load_recipe(translation.recipe, schema=Recipe).value.stages.items()
    assert (only[0], only[1].max_num_steps, only[1].optimizer.lr) == (stage, 7, 1e-5)


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("a: 1", "a.yaml", "does not say which trainer"),
        ("nothing here", "a.sh", "holds no command"),
        ("trl gkd --model_name_or_path a/b", "a.sh", "a recipe has no such stage"),
        ("python examples/scripts/dpo_vlm.py --model_name_or_path a/b", "a.sh", "trains on images"),
        ("trl sft --dataset_name a/b", "a.sh", "names no model"),
        ("trl sft --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct", "a.sh", "supports text only"),
    ],
)
def test_what_no_recipe_corresponds_to_is_refused_by_name(tmp_path, text, name, said):
    with pytest.raises(TRLError, match=said):
        translate(written(tmp_path, text, name))
