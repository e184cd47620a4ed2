"""Claims about the translation of verl's scripts: the shell is read, every override is accounted for, recipes load."""

import textwrap

import pytest

from rl_launcher.import_verl import VerlError, read, translate
from rl_launcher.recipe_files import load_recipe
from rl_launcher.schema import Recipe

GRPO = """
    set -x
    prompt_length=1024
    response_length=$((1024 * 2))
    train=${TRAIN:-"${BASE:-/data}/gsm8k/train.parquet"}
    test_files="['/data/gsm8k/test.parquet', '/data/aime.parquet']"
    EXTRA=(
        actor_rollout_ref.actor.clip_ratio_high=0.28   # asymmetric
        trainer.nnodes=2
    )
    python3 -m verl.trainer.main_ppo \\
        algorithm.adv_estimator=grpo \\
        data.train_files="$train" \\
        data.val_files="$test_files" \\
        data.train_batch_size=512 \\
        data.max_prompt_length=$prompt_length \\
        data.max_response_length=$response_length \\
        data.filter_overlong_prompts=True \\
        data.truncation='error' \\
        actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \\
        actor_rollout_ref.model.lora_rank=32 \\
        actor_rollout_ref.actor.optim.lr=1e-6 \\
        actor_rollout_ref.actor.ppo_mini_batch_size=128 \\
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
        actor_rollout_ref.actor.use_kl_loss=True \\
        actor_rollout_ref.actor.kl_loss_coef=0.002 \\
        actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
        actor_rollout_ref.rollout.n=5 \\
        actor_rollout_ref.rollout.temperature=0.9 \\
        actor_rollout_ref.rollout.top_p=0.95 \\
        actor_rollout_ref.rollout.val_kwargs.do_sample=True \\
        actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \\
        actor_rollout_ref.rollout.val_kwargs.n=4 \\
        actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
        actor_rollout_ref.rollout.pipeline_model_parallel_size=4 \\
        actor_rollout_ref.rollout.warp_drive=3 \\
        trainer.logger='["console","wandb"]' \\
        trainer.project_name='mine' \\
        trainer.test_freq=5 \\
        trainer.save_freq=10 \\
        trainer.total_epochs=15 "${EXTRA[@]}" $@
"""


@pytest.fixture
def script(tmp_path):
    def write(text=GRPO):
        file = tmp_path / "run.sh"
        file.write_text(textwrap.dedent(text))
        return file

    return write


def test_the_shell_is_read_and_not_run(script):
    found = read(script())
    assert found["data"]["max_response_length"] == 2048
    assert found["data"]["train_files"] == "/data/gsm8k/train.parquet"
    assert found["data"]["val_files"] == ["/data/gsm8k/test.parquet", "/data/aime.parquet"]
    assert found["actor_rollout_ref"]["actor"]["clip_ratio_high"] == 0.28
    assert found["trainer"]["logger"] == ["console", "wandb"]
    unset = "DIR=${CKPT:-${HOME}/ckpt}\npython -m verl.trainer.main_ppo trainer.default_local_dir=$DIR a.b=$NOT_SET"
    found = read(script(unset))
    assert (found["trainer"]["default_local_dir"], found["a"]["b"]) == ("${env:HOME}/ckpt", "${env:NOT_SET}")


def test_grpo_is_translated_and_loads_as_a_recipe(script, tmp_path):
    translation = translate(script())
    assert translation.problems == ()
    ours = tmp_path / "ours.yaml"
    ours.write_text(translation.yaml)
    assert translation.yaml.startswith("# Translated from run.sh of verl by `rl-launcher import-verl`.")
    recipe = load_recipe(ours, schema=Recipe).value
    stage = recipe.grpo
    assert (stage.num_prompts, stage.num_generations_per_prompt, stage.steps_per_generation) == (512, 5, 4)
    assert (stage.max_num_epochs, stage.optimizer.lr, stage.optimizer.schedule) == (15, 1e-6, "constant")
    ratio, kl = stage.objective.ratio, stage.objective.kl
    assert (ratio.clip_low, ratio.clip_high, ratio.dual_clip, ratio.proximal) == (0.2, 0.28, 3.0, "recomputed")
    assert (kl.weight, kl.estimator, kl.place) == (0.002, "k3", "loss")
    assert (stage.objective.advantage.baseline, stage.objective.advantage.scale) == ("group_mean", "group_std")
    generation = recipe.policy.generation
    assert (generation.max_new_tokens, generation.temperature, generation.top_p) == (2048, 0.9, 0.95)
    assert (generation.vllm_cfg.tensor_parallel_size, generation.vllm_cfg.max_model_len) == (2, 3072)
    assert generation.vllm_cfg.pipeline_parallel_size == 4
    assert recipe.policy.dtensor_cfg.lora_cfg.rank == 32
    assert (recipe.data.held_out, recipe.data.on_bad_row) == ("/data/gsm8k/test.parquet", "skip")
    evaluation = recipe.evaluation
    assert (evaluation.every, evaluation.samples_per_prompt, evaluation.temperature) == (20, 4, 0.6)
    assert (evaluation.while_training, evaluation.sets["set2"].source) == ("sampled", "/data/aime.parquet")
    assert (recipe.cluster.num_nodes, recipe.cluster.gpus_per_node) == (2, 8)
    assert recipe.logger.wandb.project == "mine"


def test_groups_of_equal_rewards_stay_unless_the_script_filters_them(script):
    """As in verl: ours leaves them out by default, which would change what the loss is divided by."""
    assert translate(script()).recipe["grpo"]["objective"]["selection"] == {"groups_without_signal": "keep"}
    filtered = GRPO.replace("adv_estimator=grpo", "adv_estimator=grpo algorithm.filter_groups.enable=True")
    assert translate(script(filtered)).recipe["grpo"]["objective"]["selection"] == {"groups_without_signal": "drop"}


def test_a_command_is_found_behind_variables_comments_and_strings_over_lines(script):
    text = """
        SHARED="
            actor_rollout_ref.model.path=a/b \\
            actor_rollout_ref.rollout.n=4"
        NAME=run${SUFFIX:+"-"}
        PYTHONPATH=verl-source python3 -m verl.trainer.main_ppo $SHARED \\
            algorithm.adv_estimator=rloo \\ # ["rloo", "grpo"]
            trainer.experiment_name=$NAME
    """.replace("\\\\", "\\")
    translation = translate(script(text))
    assert translation.problems == ()
    assert translation.recipe["policy"]["model_name"] == "a/b"
    assert translation.recipe["grpo"]["objective"]["advantage"]["baseline"] == "leave_one_out"
    assert translation.recipe["run_dir"] == "runs/run"
    assert not translation.of("untranslated")


def test_a_model_that_the_script_leaves_empty_is_to_be_filled_in(script):
    translation = translate(script(GRPO.replace("Qwen/Qwen2.5-7B-Instruct", "$MODEL").replace("set -x", "MODEL=")))
    assert "policy.model_name" in {note.key for note in translation.of("fill_in")}


def test_one_response_to_each_prompt_is_learned_from_by_its_reward(script):
    translation = translate(script(GRPO.replace("rollout.n=5", "rollout.n=1")))
    assert translation.problems == ()
    assert translation.recipe["grpo"]["objective"]["advantage"] == {"baseline": "none", "scale": "none"}


def test_megatron_has_sequence_parallelism_and_adapters_as_theirs_does(script):
    text = GRPO.replace("actor_rollout_ref.model.lora_rank=32", "actor_rollout_ref.model.lora.rank=32")
    text = text.replace(
        "trainer.test_freq=5",
        "--config-name=ppo_megatron_trainer "
        + " ".join(
            f"actor_rollout_ref.actor.megatron.{key}=2"
            for key in ("tensor_model_parallel_size", "expert_model_parallel_size")
        ),
    )
    translation = translate(script(text))
    assert translation.problems == ()
    backend = translation.recipe["policy"]["megatron_cfg"]
    assert backend["sequence_parallel"] is True
    assert (backend["lora_cfg"]["rank"], backend["transformer_impl"]) == (32, "local")


def test_a_tracker_that_is_not_here_is_told(script):
    told = translate(script(GRPO.replace('"console","wandb"', '"console","swanlab","mlflow"')))
    assert [note.value for note in told.of("untranslated") if note.key == "trainer.logger"] == ["swanlab"]
    assert told.recipe["logger"]["mlflow_enabled"] is True


def test_every_override_is_translated_or_noted(script):
    translation = translate(script())
    assert "actor_rollout_ref.rollout.warp_drive=3: no rule of the translation knows this key" in translation.report()
    noted = {note.key for note in translation.notes}
    assert {"actor_rollout_ref.rollout.warp_drive", "env.reward", "data.truncation"} <= noted


def test_ppo_has_a_critic_with_its_own_learning_rate(script):
    ppo = GRPO.replace("adv_estimator=grpo", "adv_estimator=gae algorithm.lam=0.95 critic.optim.lr=1e-5")
    recipe = load_recipe(translate(script(ppo.replace("lora_rank=32", "lora_rank=0"))).recipe, schema=Recipe).value
    assert recipe.grpo is None
    assert (recipe.ppo.critic.optimizer.lr, recipe.ppo.value.lam, recipe.ppo.value.clip) == (1e-5, 0.95, 0.5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=a", "names no model at model.partial_pretrain"),
        ("torchrun -m verl.trainer.sft_trainer model.path=a/Some-VL-2B", "supports text only"),
        ("python -m verl.trainer.main_generation model.path=a/b", "samples without training"),
        ("echo hello", "runs none of them; main_ppo and sft_trainer"),
        ("python -m verl.trainer.main_ppo data.train_files=a", "names no model"),
        (GRPO.replace("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct"), "supports text only"),
    ],
)
def test_what_no_recipe_corresponds_to_is_refused_by_name(script, text, said):
    with pytest.raises(VerlError, match=said):
        translate(script(text))


def test_a_reward_of_the_script_is_the_recipes(script):
    own = GRPO.replace("trainer.test_freq=5", "custom_reward_function.path=mine.py custom_reward_function.name=judge")
    assert translate(script(own)).recipe["env"] == {"reward": "mine.py:judge"}


SFT = """
    gpus=$1
    folder=$2
    shift 2
    torchrun --nnodes=1 --nproc_per_node=$gpus -m verl.trainer.fsdp_sft_trainer \\
        data.train_files=$HOME/rows/train.parquet \\
        data.val_files=$HOME/rows/test.parquet \\
        data.prompt_key=extra \\
        data.response_key=extra \\
        data.prompt_dict_keys=['question'] \\
        +data.response_dict_keys=['solution'] \\
        data.train_batch_size=64 \\
        data.micro_batch_size_per_gpu=8 \\
        optim.lr=2e-4 \\
        model.partial_pretrain=a/b \\
        model.lora_rank=8 \\
        model.target_modules=[q_proj,v_proj] \\
        trainer.default_local_dir=$folder \\
        trainer.total_training_steps=50 \\
        ulysses_sequence_parallel_size=2 \\
        use_remove_padding=true $@
"""


def test_a_script_of_the_sft_trainer_is_translated_and_loads_as_a_recipe(script):
    translation = translate(script(SFT))
    assert translation.problems == ()
    recipe = load_recipe(translation.recipe, schema=Recipe).value
    assert [*recipe.stages] == ["sft"]
    assert (recipe.sft.batch_size, recipe.sft.max_num_steps, recipe.sft.max_num_epochs) == (64, 50, 4)
    optimizer = recipe.sft.optimizer
    assert (optimizer.lr, optimizer.schedule, optimizer.warmup_steps, optimizer.betas) == (
        2e-4,
        "cosine",
        5,
        (0.9, 0.95),
    )
    assert recipe.data.columns == {"prompt": "extra.question", "answer": "extra.solution"}
    backend = recipe.policy.dtensor_cfg
    assert (backend.micro_batch_size, backend.context_parallel_size, backend.sequence_packing) == (8, 2, True)
    assert (backend.lora_cfg.rank, backend.lora_cfg.alpha, backend.lora_cfg.target_modules) == (
        8,
        16,
        ("q_proj", "v_proj"),
    )
    assert not translation.of("untranslated")
    told = {note.key: note.value for note in translation.of("fill_in")}
    assert told["trainer.default_local_dir"] == "argument 2"


def test_the_newer_sft_trainer_has_keys_and_defaults_of_its_own(script):
    text = """
        PROGRAM=${PROGRAM:-"-m verl.trainer.sft_trainer"}
        torchrun --nproc-per-node=4 ${PROGRAM} model.path=a/b data.messages_key=turns optim.warmup_style=cosine \\
            engine=megatron engine.tensor_model_parallel_size=2 data.train_batch_size=32 trainer.save_freq=7
    """
    translation = translate(script(text))
    assert translation.problems == ()
    recipe = load_recipe(translation.recipe, schema=Recipe).value
    assert (recipe.sft.optimizer.lr, recipe.sft.optimizer.schedule, recipe.sft.batch_size) == (1e-3, "cosine", 32)
    assert (recipe.data.columns, recipe.cluster.gpus_per_node) == ({"messages": "turns"}, 4)
    assert recipe.policy.megatron_cfg.tensor_model_parallel_size == 2
    assert recipe.checkpointing.save_period == 7


def test_a_variable_that_nobody_sets_has_its_name_as_placeholder_and_gives_way_to_the_variable(script, monkeypatch):
    for name in ("ROWS_OF_NOBODY", "NOT_SET_EITHER"):
        monkeypatch.delenv(name, raising=False)
    text = GRPO.replace("$train", "$ROWS_OF_NOBODY/train.parquet").replace("trainer.total_epochs=15", "trainer.a=b")
    translation = translate(script(text + "        trainer.default_local_dir=$NOT_SET_EITHER"))
    assert translation.problems == ()
    told = {note.key: note.value for note in translation.of("fill_in")}
    assert told["data.train_files"] == "ROWS_OF_NOBODY"
    assert load_recipe(translation.recipe, schema=Recipe).value.data.source == "ROWS_OF_NOBODY/train.parquet"
    monkeypatch.setenv("ROWS_OF_NOBODY", "/rows")
    assert load_recipe(translation.recipe, schema=Recipe).value.data.source == "/rows/train.parquet"
