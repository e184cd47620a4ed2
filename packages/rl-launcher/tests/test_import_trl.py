"""Claims about the translation of TRL's configurations: YAML and commands, each key accounted for, recipes load."""

import json
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
        ("python examples/scripts/grpo_agent.py", "grpo"),
        ("python examples/scripts/deeper/folder/rloo_with_tools.py", "grpo"),
        ("trl cpo --loss_type simpo", "dpo"),
        ("trl online_dpo --reward_model_path c/d", "dpo"),
        ("trl gkd --teacher_model_name_or_path c/d", "distill"),
        ("trl distillation --teacher_model_name_or_path c/d", "distill"),
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
        ("trl nash_md --model_name_or_path a/b", "a.sh", "a recipe has no such stage"),
        ("trl gkd --model_name_or_path a/b", "a.sh", "teacher_model_name_or_path is missing"),
        ("trl gold --model_name_or_path a/b", "a.sh", "distils between tokenizers"),
        ("trl cpo --model_name_or_path a/b", "a.sh", "cpo with loss_type=sigmoid"),
        ("trl sft --model_name_or_path a/SomeDiffusion-2B", "a.sh", "a diffusion model"),
        ("class MySFTTrainer: ...\nMySFTTrainer(model='a/b')", "a.py", "for mysft, and a recipe has no such stage"),
        ("def broken(", "a.py", "is no valid Python"),
        ("{}", "a.ipynb", "is no notebook"),
        ("python examples/scripts/dpo_vlm.py --model_name_or_path a/b", "a.sh", "trains on images"),
        ("trl sft --dataset_name a/b", "a.sh", "names no model"),
        ("trl sft --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct", "a.sh", "supports text only"),
    ],
)
def test_what_no_recipe_corresponds_to_is_refused_by_name(tmp_path, text, name, said):
    with pytest.raises(TRLError, match=said):
        translate(written(tmp_path, text, name))


PROGRAM = '''
"""Start it by: python examples/scripts/games/dice.py --turns 6 --rate 3e-6"""
import argparse
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

MODEL, FOLDER = "a/b-1B", "out"

parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, default=1e-6)
parser.add_argument("--turns", type=int, default=3)
parser.add_argument("--server", action="store_true")
parser.add_argument("--url", default=None)
args = parser.parse_args()
rows = load_dataset("c/d", "main", split="train[:10%]").map(lambda row: row)
options = dict(num_generations=4, max_completion_length=128)
if args.server:
    options = dict(num_generations=2)

def right(completions, **_):
    return [0.0] * len(completions)

trainer = GRPOTrainer(
    model=MODEL,
    args=GRPOConfig(
        output_dir=f"{FOLDER}-dice",
        learning_rate=args.rate,
        max_tool_calling_iterations=args.turns,
        per_device_train_batch_size=8,
        vllm_mode="server" if args.server else "colocate",
        use_vllm=args.url is None,
        run_name=MODEL.split("/")[-1],
        **options,
    ),
    train_dataset=rows,
    reward_funcs=[right],
    environment_factory=Dice,
    peft_config=LoraConfig(target_modules=["q_proj"]),
)
'''


def test_an_example_script_is_read_from_its_code_and_its_environment_is_to_be_filled_in(tmp_path):
    translation = translate(written(tmp_path, PROGRAM, "dice.py"))
    assert translation.problems == ()
    recipe = load_recipe(translation.recipe, schema=Recipe).value
    stage = recipe.grpo
    assert (stage.num_generations_per_prompt, stage.max_turns, stage.optimizer.lr) == (4, 7, 3e-6)  # of the command
    assert (recipe.policy.model_name, recipe.run_dir.rpartition("/")[2]) == ("a/b-1B", "out-dice")
    assert (recipe.policy.generation.backend, recipe.policy.generation.max_new_tokens) == ("vllm", 128)
    lora = recipe.policy.dtensor_cfg.lora_cfg
    assert (lora.rank, lora.alpha, lora.target_modules) == (8, 8, ("q_proj",))
    assert (recipe.data.source, recipe.data.name, recipe.data.split) == ("c/d", "main", "train[:10%]")
    told = {note.key: note.reason for note in translation.of("fill_in")}
    assert "environment_factory=Dice, rewarded by right" in told["env.environment"]
    assert "makes rows of its own" in told["data.source"]
    (unknown,) = translation.of("untranslated")
    assert (unknown.key, unknown.reason) == ("run_name", "its value is code, which is not run")


def test_a_notebook_is_read_as_its_cells_of_code(tmp_path):
    lines = ["!pip install trl\n", *(f"{line}\n" for line in PROGRAM.splitlines())]
    cells = [{"cell_type": "markdown", "source": "# Dice"}, {"cell_type": "code", "source": lines}]
    translation = translate(written(tmp_path, json.dumps({"cells": cells}), "dice.ipynb"))
    assert (translation.problems, translation.recipe["policy"]["model_name"]) == ((), "a/b-1B")


def test_ppo_and_distillation_take_their_own_keys(tmp_path):
    ppo = "trl ppo --model_name_or_path v/critic --sft_model_path a/b --reward_model_path c/d --num_ppo_epochs 2 "
    ppo += "--num_mini_batches 3 --per_device_train_batch_size 6 --total_episodes 60 --kl_coef 0.1 --dataset_name e/f"
    stage = load_recipe(translate(written(tmp_path, ppo, "a.sh")).recipe, schema=Recipe).value.ppo
    assert (stage.num_prompts, stage.steps_per_generation, stage.num_epochs, stage.max_num_steps) == (6, 6, 2, 60)
    assert (stage.objective.kl.weight, stage.objective.kl.place, stage.optimizer.lr) == (0.1, "reward", 3e-6)
    gkd = "trl gkd --model_name_or_path a/b --teacher_model_name_or_path c/d --dataset_name e/f"
    translation = translate(written(tmp_path, gkd, "b.sh"))
    recipe = load_recipe(translation.recipe, schema=Recipe).value
    assert (recipe.distill.beta, recipe.distill.teacher.model_name) == (0.5, "c/d")
    assert (recipe.policy.generation.temperature, recipe.policy.generation.max_new_tokens) == (0.9, 128)
    assert [(note.key, note.value) for note in translation.of("untranslated")] == [("lmbda", 0.5)]


def test_losses_of_a_pair_have_our_names(tmp_path):
    for theirs, ours in {"exo_pair": "exo", "sppo_hard": "sppo", "apo_zero": "apo_zero"}.items():
        text = f"trl dpo --model_name_or_path a/b --dataset_name c/d --loss_type {theirs}"
        translation = translate(written(tmp_path, text, "a.sh"))
        assert load_recipe(translation.recipe, schema=Recipe).value.dpo.loss == ours
    text = "trl dpo --model_name_or_path a/b --dataset_name c/d --loss_type sigmoid sft --loss_weights 0.8 0.2"
    stage = load_recipe(translate(written(tmp_path, text, "a.sh")).recipe, schema=Recipe).value.dpo
    assert (stage.loss, stage.nll_weight) == ("sigmoid", 0.25)
