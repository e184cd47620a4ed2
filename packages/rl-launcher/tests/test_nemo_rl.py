"""Claims about the translation of NeMo-RL's recipes: every key is accounted for, and what comes out is a recipe."""

import textwrap

import pytest

from rl_launcher.import_nemo_rl import NemoRLError, translate
from rl_launcher.import_nemo_rl.read import interpolate, read
from rl_launcher.recipe_files import load_recipe
from rl_launcher.schema import Recipe

BASE = """
    grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 4, max_num_steps: 100, val_period: 5, seed: 7,
           use_leave_one_out_baseline: true, normalize_rewards: false, max_num_epochs: 1, warp_drive: 3,
           adv_estimator: {name: grpo, normalize_rewards: "${grpo.normalize_rewards}", minus_baseline: true}}
    loss_fn: {reference_policy_kl_penalty: 0.01, reference_policy_kl_type: k3, kl_input_clamp_value: 20.0,
              ratio_clip_min: 0.2, ratio_clip_max: 0.28, use_importance_sampling_correction: true,
              truncated_importance_sampling_type: icepop, truncated_importance_sampling_ratio: 5.0,
              truncated_importance_sampling_ratio_min: 0.5}
    policy:
      model_name: Qwen/Qwen2.5-1.5B
      tokenizer: {name: "${policy.model_name}"}
      precision: bfloat16
      train_global_batch_size: 16
      train_micro_batch_size: 2
      max_total_sequence_length: 512
      dtensor_cfg: {enabled: true, _v2: true, tensor_parallel_size: 2, sequence_parallel: true,
                    custom_parallel_plan: my_package.plans.plan, env_vars: {NCCL_DEBUG: INFO}}
      megatron_cfg: {enabled: false, moe_permute_fusion: true}
      sequence_packing: {enabled: true, train_mb_tokens: "${mul:${policy.max_total_sequence_length}, 2}", algorithm: x}
      max_grad_norm: 1.0
      optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5e-6, betas: [0.9, 0.98], foreach: false}}
      scheduler:
        - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 20}}
        - {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 10000}}
        - {milestones: [20]}
      generation:
        backend: vllm
        max_new_tokens: "${policy.max_total_sequence_length}"
        temperature: 0.9
        top_p: 0.95
        val_temperature: ${.temperature}
        vllm_cfg: {async_engine: false, tensor_parallel_size: 1, gpu_memory_utilization: 0.6, kv_cache_dtype: fp8}
        colocated: {enabled: true}
    data: {train: {dataset_name: OpenMathInstruct-2, split_validation_size: 0.05}, shuffle: true}
    env: {math: {num_workers: 8}}
    checkpointing: {enabled: true, checkpoint_dir: results/grpo, save_period: 10, metric_name: "val:accuracy",
                    keep_top_k: 3}
    logger: {wandb_enabled: true, wandb: {project: mine, name: a}, log_dir: logs}
    cluster: {gpus_per_node: 8, num_nodes: 2, segment_size: null}
"""


def written(tmp_path, text=BASE, name="theirs.yaml"):
    file = tmp_path / name
    file.write_text(textwrap.dedent(text))
    return file


def notes(translation, kind):
    return {note.key: note.reason for note in translation.of(kind)}


def test_grpo_is_translated_and_loads_as_a_recipe(tmp_path):
    translation = translate(written(tmp_path))
    assert translation.problems == ()
    ours = tmp_path / "ours.yaml"
    ours.write_text(translation.yaml)
    recipe = load_recipe(ours, schema=Recipe).value
    assert (recipe.run_dir, recipe.seed) == ("results/grpo", 7)
    stage = recipe.grpo
    # 32 rollouts in batches of 16 are 2 optimizer steps, and theirs counts batches of rollouts.
    assert (stage.steps_per_generation, stage.max_num_steps, stage.max_num_epochs) == (2, 200, 1)
    assert stage.optimizer.warmup_start_ratio == 0.1
    assert (recipe.evaluation.every, recipe.checkpointing.save_period) == (10, 20)
    objective = stage.objective
    assert (objective.advantage.baseline, objective.advantage.scale) == ("leave_one_out", "none")
    assert (objective.ratio.clip_high, objective.ratio.proximal) == (0.28, "recomputed")
    correction = objective.correction
    assert (correction.weight, correction.low, correction.high, correction.outside) == ("token", 0.5, 5.0, "mask")
    assert (objective.kl.weight, objective.selection.groups_without_signal) == (0.01, "keep")
    optimizer = stage.optimizer
    assert (optimizer.lr, optimizer.betas, optimizer.warmup_steps, optimizer.schedule) == (
        5e-6,
        (0.9, 0.98),
        20,
        "constant",
    )
    backend = recipe.policy.dtensor_cfg
    assert (backend.device, backend.precision, backend.tensor_parallel_size) == ("cuda", "bfloat16", 2)
    assert (backend.sequence_packing, backend.micro_batch_tokens) == (True, 1024)
    assert backend.custom_parallel_plan == "my_package.plans:plan"
    generation = recipe.policy.generation
    assert (generation.backend, generation.max_new_tokens, generation.temperature) == ("vllm", 512, 0.9)
    assert generation.top_p == 0.95
    assert generation.vllm_cfg.vllm_kwargs == {"kv_cache_dtype": "fp8"}
    assert (recipe.data.source, recipe.data.held_out_share) == ("nvidia/OpenMathInstruct-2", 0.05)
    assert recipe.env.reward == "rl_algorithms.environments.math:math_match"
    assert (recipe.cluster.runtime, recipe.cluster.num_nodes, recipe.cluster.gpus_per_node) == ("ray", 2, 8)
    assert recipe.cluster.env_vars == {"NCCL_DEBUG": "INFO"}
    assert (recipe.logger.wandb_enabled, recipe.logger.wandb.project) == (True, "mine")


def test_what_differs_is_told_with_its_reason_and_stands_in_the_file(tmp_path):
    translation = translate(written(tmp_path))
    untranslated = notes(translation, "untranslated")
    assert "no such thing" in untranslated["grpo.warp_drive"]
    assert not any(key.startswith("loss_fn.kl_") for key in untranslated)
    kl = translation.recipe["grpo"]["objective"]["kl"]
    assert (kl["log_ratio_limit"], kl["limit"]) == (20.0, 10.0)  # the second is a default of theirs
    without = BASE.replace("kl_input_clamp_value: 20.0", "kl_input_clamp_value: null, kl_output_clamp_value: null")
    assert "limit" not in str(translate(written(tmp_path, without)).recipe["grpo"]["objective"]["kl"])
    assert "grpo.warp_drive=3" in translation.yaml
    assert "grpo.warp_drive=3" in translation.report()


def test_every_key_of_theirs_is_translated_or_noted(tmp_path):
    file = written(tmp_path)
    translation = translate(file)
    noted = set(notes(translation, "untranslated")) | set(notes(translation, "dropped"))
    assert {"policy.megatron_cfg.moe_permute_fusion", "policy.sequence_packing.algorithm", "logger.log_dir"} <= noted
    # A key that nobody knows is never lost, wherever it is.
    text = textwrap.dedent(BASE)
    for section in ("grpo", "loss_fn", "policy", "data", "env", "checkpointing", "logger", "cluster"):
        file.write_text(
            text.replace(f"\n{section}: {{", f"\n{section}: {{nobody: 5, ").replace(
                f"\n{section}:\n", f"\n{section}:\n  nobody: 5\n"
            )
        )
        again = translate(file)
        # Environments are one note, which names them.
        environments = [str(note.value) for note in again.of("untranslated") if note.key == "env"]
        told = {f"env.{name}" for names in environments for name in names.split(", ")}
        assert f"{section}.nobody" in {*told, *notes(again, "untranslated")}, section


@pytest.mark.parametrize("section", ["dtensor_cfg", "megatron_cfg", "generation.vllm_cfg", "generation.vllm_cfg.deep"])
def test_of_a_key_that_nobody_knows_it_is_never_said_that_it_changes_nothing(tmp_path, section):
    above = "defaults: theirs.yaml\npolicy:\n  megatron_cfg: {enabled: true}\n"
    inner = "{made_up: 3}"
    for name in reversed(section.split(".")):
        inner = f"{{{name}: {inner}}}"
    written(tmp_path)
    if section == "dtensor_cfg":
        above = above.replace("true", "false")
    file = written(tmp_path, "defaults: middle.yaml\npolicy: " + inner + "\n", "child.yaml")
    written(tmp_path, above, "middle.yaml")
    assert "no rule" in notes(translate(file), "untranslated")[f"policy.{section}.made_up"]


@pytest.mark.parametrize(("length", "proposed"), [("512", 512), ("null", 256)])
def test_a_length_of_answers_that_theirs_does_not_say_is_proposed_and_to_be_filled_in(tmp_path, length, proposed):
    text = BASE.replace('        max_new_tokens: "${policy.max_total_sequence_length}"\n', "")
    text = text.replace("max_total_sequence_length: 512", f"max_total_sequence_length: {length}")
    translation = translate(written(tmp_path, text.replace('"${mul:${policy.max_total_sequence_length}, 2}"', "1024")))
    assert "policy.generation.max_new_tokens" in notes(translation, "fill_in")
    assert translation.problems == ()
    assert translation.recipe["policy"]["generation"]["max_new_tokens"] == proposed


def test_files_inherit_and_a_section_can_replace_what_it_inherits(tmp_path):
    written(tmp_path)
    child = """
        defaults: theirs.yaml
        grpo: {max_num_steps: 10}
        env: {_override_: true, code: {num_workers: 2}}
        policy: {generation: {colocated: {enabled: false, resources: {num_nodes: 1}}}}
    """
    translation = translate(written(tmp_path, child, "child.yaml"))
    assert translation.problems == ()
    assert translation.recipe["grpo"]["max_num_steps"] == 20
    assert "math" not in read(tmp_path / "child.yaml")["env"]
    assert notes(translation, "fill_in")["env.reward"] == "the function that scores a response"
    assert translation.recipe["policy"]["generation"]["colocated"] == {"enabled": False, "resources": {"num_nodes": 1}}


ASYNCHRONOUS = """
    defaults: theirs.yaml
    grpo: {async_grpo: {enabled: true, max_trajectory_age_steps: 1, in_flight_weight_updates: true}}
    policy: {generation: {vllm_cfg: {async_engine: true}, colocated: {enabled: false, resources: {num_nodes: 1}}}}
"""


def test_asynchronous_grpo_counts_its_staleness_in_optimizer_steps(tmp_path):
    written(tmp_path)
    translation = translate(written(tmp_path, ASYNCHRONOUS, "asynchronous.yaml"))
    assert translation.problems == ()
    # A synchronous run of 2 steps a batch is 1 behind; one batch of age is 2 more.
    assert translation.recipe["grpo"]["async_grpo"] == {"max_staleness": 3, "weights": "in_flight"}


MEGATRON = """
    defaults: theirs.yaml
    policy:
      dtensor_cfg: {enabled: false}
      megatron_cfg:
        enabled: true
        tensor_model_parallel_size: 4
        pipeline_model_parallel_size: 2
        activation_checkpointing: true
        env_vars: null
        optimizer: {optimizer: adam, lr: 1e-6, min_lr: 1e-7, adam_beta2: 0.98, use_distributed_optimizer: true}
        scheduler: {lr_decay_style: cosine, lr_warmup_iters: 10, lr_warmup_init: 1e-8, lr_decay_iters: 1000}
"""


def test_megatron_is_translated_with_its_optimizer(tmp_path):
    written(tmp_path)
    translation = translate(written(tmp_path, MEGATRON, "megatron.yaml"))
    assert translation.problems == ()
    assert translation.recipe["policy"]["dtensor_cfg"] == {"enabled": False}
    backend = translation.recipe["policy"]["megatron_cfg"]
    assert (backend["tensor_model_parallel_size"], backend["recompute_granularity"]) == (4, "full")
    assert backend["use_distributed_optimizer"] is True
    optimizer = translation.recipe["grpo"]["optimizer"]
    assert (optimizer["lr"], optimizer["betas"], optimizer["warmup_steps"]) == (1e-6, [0.9, 0.98], 10)
    assert (optimizer["schedule"], round(optimizer["final_lr_ratio"], 6)) == ("cosine", 0.1)
    assert optimizer["warmup_start_ratio"] == pytest.approx(0.01)
    assert notes(translation, "dropped")["policy.optimizer"] == "of the other backend"


EXPERTS = """
    defaults: theirs.yaml
    policy:
      model_name: Qwen/Qwen3-30B-A3B
      dtensor_cfg: {enabled: false}
      tokenizer: {name: "${policy.model_name}", chat_template: default}
      megatron_cfg:
        enabled: true
        freeze_moe_router: true
        pipeline_model_parallel_size: 4
        num_layers_in_first_pipeline_stage: 7
        num_layers_in_last_pipeline_stage: 5
        peft: {enabled: true, dim: 16, alpha: 64, target_modules: [], dropout: 0.0}
"""


def test_frozen_routers_uneven_stages_and_adapters_of_megatron_are_translated(tmp_path):
    written(tmp_path)
    translation = translate(written(tmp_path, EXPERTS, "experts.yaml"))
    assert translation.problems == ()
    backend = translation.recipe["policy"]["megatron_cfg"]
    assert backend["freeze_moe_router"] is True
    assert (backend["num_layers_in_first_pipeline_stage"], backend["num_layers_in_last_pipeline_stage"]) == (7, 5)
    assert backend["lora_cfg"] == {"rank": 16, "alpha": 64, "base_dtype": "bfloat16"}
    assert backend["transformer_impl"] == "local"
    assert not any("tokenizer" in key for key in notes(translation, "untranslated"))  # its own template is what is used
    fused = EXPERTS.replace("target_modules: []", "target_modules: [linear_qkv]")
    told = notes(translate(written(tmp_path, fused, "fused.yaml")), "untranslated")
    assert "all linear layers" in told["policy.megatron_cfg.peft.target_modules"]
    dense = translate(written(tmp_path, EXPERTS.replace("Qwen3-30B-A3B", "Qwen3-8B"), "dense.yaml"))
    assert "freeze_moe_router" not in dense.recipe["policy"]["megatron_cfg"]
    assert notes(dense, "dropped")["policy.megatron_cfg.freeze_moe_router"] == "the model has no experts"


def test_without_a_template_of_roles_prompts_are_plain(tmp_path):
    text = BASE.replace('tokenizer: {name: "${policy.model_name}"}', "tokenizer: {chat_template: null}")
    assert translate(written(tmp_path, text)).recipe["data"]["prompt_format"] == "plain"


ADAPTERS = """
    defaults: theirs.yaml
    policy:
      dtensor_cfg:
        lora_cfg: {enabled: true, target_modules: [q_proj, v_proj], match_all_linear: false, dim: 128, alpha: 256,
                   exclude_modules: [], dropout: 0.1, dropout_position: post, lora_A_init: xavier, use_triton: true}
"""


def test_adapters_are_translated_and_what_differs_of_them_is_told(tmp_path):
    written(tmp_path)
    translation = translate(written(tmp_path, ADAPTERS, "adapters.yaml"))
    assert translation.problems == ()
    theirs = translation.recipe["policy"]["dtensor_cfg"]["lora_cfg"]
    assert theirs == {"rank": 128, "alpha": 256, "target_modules": ["q_proj", "v_proj"]}
    told = notes(translation, "untranslated")
    section = "policy.dtensor_cfg.lora_cfg"
    assert "two functions of one model" in told[f"{section}.dropout"]
    assert "uniform within" in told[f"{section}.lora_A_init"]
    assert f"{section}.exclude_modules" not in told
    off = translate(written(tmp_path, ADAPTERS.replace("enabled: true", "enabled: false"), "off.yaml"))
    assert "lora_cfg" not in off.recipe["policy"]["dtensor_cfg"]
    assert not any(key.startswith(section) for key in notes(off, "untranslated"))


KERNELS = """
    defaults: theirs.yaml
    policy:
      sequence_packing: {enabled: PACKED}
      dtensor_cfg:
        automodel_kwargs: {use_liger_kernel: true, attn_implementation: flash_attention_2}
"""


def test_keys_that_name_kernels_are_translated_or_told(tmp_path):
    written(tmp_path)
    translation = translate(written(tmp_path, KERNELS.replace("PACKED", "true"), "kernels.yaml"))
    assert translation.problems == ()
    liger = {"norm": "liger", "rope": "liger", "mlp": "liger"}
    assert translation.recipe["policy"]["dtensor_cfg"]["kernels"] == {"attention": "flash", **liger}
    padded = translate(written(tmp_path, KERNELS.replace("PACKED", "false"), "padded.yaml"))
    assert padded.recipe["policy"]["dtensor_cfg"]["kernels"] == liger
    key = "policy.dtensor_cfg.automodel_kwargs.attn_implementation"
    assert "read packed rows" in notes(padded, "untranslated")[key]
    te = KERNELS.replace("PACKED", "true").replace("attn_implementation: flash_attention_2", "backend: {attn: te}")
    assert (
        "no kernel here is 'te'"
        in notes(translate(written(tmp_path, te, "te.yaml")), "dropped")[
            "policy.dtensor_cfg.automodel_kwargs.backend.attn"
        ]
    )


SFT = """
    sft: {max_num_steps: 60, val_period: 10, seed: 1, only_unmask_final: true}
    policy: {model_name: a/b, train_global_batch_size: 32, precision: float32,
             optimizer: {name: torch.optim.AdamW, kwargs: {lr: 1e-5}}}
    data: {train: {data_path: rows.jsonl, input_key: q, output_key: a}}
    checkpointing: {enabled: true, save_period: 10, keep_top_k: 3, metric_name: "val:val_loss"}
"""
DPO = """
    dpo: {max_num_steps: 150, reference_policy_kl_penalty: 0.05, preference_average_log_probs: true,
          sft_loss_weight: 0.5}
    policy: {model_name: a/b, train_global_batch_size: 128, optimizer: {name: torch.optim.SGD, kwargs: {lr: 1e-5}}}
    data: {train: {dataset_name: HelpSteer3}}
"""
DISTILLATION = """
    distillation: {num_prompts_per_step: 8, num_generations_per_prompt: 1, max_num_steps: 10, topk_logits_k: 32}
    loss_fn: {kl_type: mixed, mixed_kl_weight: 0.25, zero_outside_topk: false}
    policy: {model_name: a/b, train_global_batch_size: 8, optimizer: {kwargs: {lr: 1e-5}},
             generation: {backend: hf, max_new_tokens: 64}}
    teacher: {model_name: a/big, dtensor_cfg: {tensor_parallel_size: 8}}
    data: {train: {dataset_name: DeepScaler}}
"""


def test_sft_dpo_and_distillation_have_stages_too(tmp_path):
    sft = translate(written(tmp_path, SFT))
    assert sft.problems == ()
    assert sft.recipe["sft"]["batch_size"] == 32
    assert sft.recipe["data"] == {"source": "rows.jsonl", "columns": {"prompt": "q", "answer": "a"}}
    assert sft.recipe["sft"]["train_on"] == "last_turn"
    assert "env" not in sft.recipe
    assert sft.recipe["checkpointing"]["metric_name"] == "held_out_loss"
    assert sft.recipe["checkpointing"]["higher_is_better"] is False
    assert "policy.generation.max_new_tokens" in notes(sft, "fill_in")

    dpo = translate(written(tmp_path, DPO))
    assert dpo.problems == ()
    assert {name: dpo.recipe["dpo"][name] for name in ("beta", "loss", "nll_weight")} == {
        "beta": 0.05,
        "loss": "sigmoid_norm",
        "nll_weight": 0.5,
    }
    assert (dpo.recipe["dpo"]["pairs"], dpo.recipe["data"]["source"]) == ("data", "pairs.jsonl")
    assert notes(dpo, "fill_in")["data.source"] == "what HelpSteer3 is made of is in their code"
    assert "env" not in dpo.recipe
    theirs = "dataset_name: BinaryPreferenceDataset, data_path: theirs.jsonl, chosen_key: better, prompt_key: prompt"
    given = translate(written(tmp_path, DPO.replace("dataset_name: HelpSteer3", theirs), "given.yaml"))
    assert given.problems == ()
    assert given.recipe["data"] == {"source": "theirs.jsonl", "columns": {"chosen": "better"}}
    ranked = theirs.replace("BinaryPreferenceDataset", "PreferenceDataset")
    listed = translate(written(tmp_path, DPO.replace("dataset_name: HelpSteer3", ranked), "ranked.yaml"))
    assert "ranks responses within a row" in notes(listed, "fill_in")["data.source"]
    assert notes(dpo, "untranslated")["policy.optimizer.name"] == "AdamW is used instead"

    distilled = translate(written(tmp_path, DISTILLATION))
    assert distilled.problems == ()
    stage = distilled.recipe["distill"]
    assert (stage["k"], stage["beta"], stage["interpolation"]) == (32, 0.75, "mixed")  # theirs weighs forward KL
    assert stage["tail"] == "renormalize"  # as theirs does unless told otherwise
    assert stage["teacher"] == {"model_name": "a/big"}


def test_recipes_about_images_and_vision_language_models_are_refused(tmp_path):
    images = BASE.replace("dataset_name: OpenMathInstruct-2", "dataset_name: clevr-cogent")
    with pytest.raises(
        NemoRLError, match=r"trains on images or audio \(clevr-cogent\), and a recipe supports text only"
    ):
        translate(written(tmp_path, images))
    with pytest.raises(NemoRLError, match=r"trains Qwen/Qwen2.5-VL-3B-Instruct, a vision-language model"):
        translate(written(tmp_path, BASE.replace("Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-VL-3B-Instruct")))


def test_epochs_prompt_files_validation_sets_and_sampling_are_translated(tmp_path):
    (tmp_path / "examples" / "prompts").mkdir(parents=True)
    (tmp_path / "examples" / "prompts" / "cot.txt").write_text("Solve {{x}}:\n{}")
    (tmp_path / "examples" / "prompts" / "system.txt").write_text("Be brief.")
    data = (
        "data: {default: {prompt_file: examples/prompts/cot.txt, system_prompt_file: examples/prompts/system.txt}, "
        "validation: [{dataset_name: AIME2024, repeat: 16}, {data_path: mine.jsonl, input_key: q}], "
        "train: [{dataset_name: DAPOMath17K}, {dataset_name: DAPOMathAIME2024}], shuffle: true}"
    )
    start = BASE.index("data: {train")
    text = BASE[:start] + data + BASE[BASE.index("\n", start) :]
    text = text.replace("val_temperature: ${.temperature}", "val_temperature: 0.6\n        stop_strings: ['###']")
    translation = translate(written(tmp_path, text))
    assert translation.problems == ()
    recipe = load_recipe(translation.recipe, schema=Recipe).value
    assert (recipe.data.prompt_template, recipe.data.system_prompt) == ("Solve {{x}}:\n{prompt}", "Be brief.")
    assert recipe.data.mix == {"set2": "BytedTsinghua-SIA/AIME-2024"}
    sets = recipe.evaluation.sets
    assert (sets["aime2024"].source, sets["aime2024"].samples_per_prompt) == ("HuggingFaceH4/aime_2024", 16)
    assert (sets["mine"].source, sets["mine"].columns["prompt"]) == ("mine.jsonl", "q")
    assert (recipe.policy.generation.stop, recipe.evaluation.temperature) == (("###",), 0.6)


def test_a_prompt_file_that_is_not_there_is_told(tmp_path):
    text = BASE.replace("split_validation_size: 0.05}", "split_validation_size: 0.05, prompt_file: none.txt}")
    assert (
        "there is no such file above" in notes(translate(written(tmp_path, text)), "untranslated")["data.prompt_file"]
    )


PPO = """
    defaults: theirs.yaml
    grpo: null
    ppo: {num_prompts_per_step: 8, num_generations_per_prompt: 2, max_num_steps: 100, max_num_epochs: -1,
          ppo_epochs: 2, val_period: 5, seed: 7,
          adv_estimator: {name: gae, gae_lambda: 0.9, gae_gamma: 1.0, normalize_advantages: true}}
    value_loss_fn: {scale: 0.5, cliprange: 0.3}
    value: {model_name: Qwen/Qwen2.5-1.5B}
"""


def test_ppo_and_reward_models_are_translated(tmp_path):
    written(tmp_path)
    translation = translate(written(tmp_path, PPO, "ppo.yaml"))
    assert translation.problems == ()
    stage = load_recipe(translation.recipe, schema=Recipe).value.ppo
    # 16 rollouts in batches of 16, each gone through twice.
    assert (stage.num_prompts, stage.steps_per_generation, stage.num_epochs, stage.max_num_steps) == (8, 2, 2, 200)
    assert (stage.value.lam, stage.value.clip, stage.max_num_epochs) == (0.9, 0.3, None)
    assert "the critic is the policy's model" in notes(translation, "untranslated")["value"]
    rm = "defaults: theirs.yaml\ngrpo: null\nrm: {max_num_epochs: 1, max_num_steps: -1}\nenv: null\n"
    rewarded = translate(written(tmp_path, rm, "rm.yaml"))
    assert rewarded.problems == ()
    stage = load_recipe(rewarded.recipe, schema=Recipe).value.reward_model
    assert (stage.max_num_epochs, stage.batch_size) == (1, 16)


def test_a_setting_that_is_false_or_zero_and_has_an_effect_is_reported(tmp_path):
    text = BASE.replace(
        'tokenizer: {name: "${policy.model_name}"}', "tokenizer: {chat_template_kwargs: {enable_thinking: false}}"
    )
    kept = translate(written(tmp_path, text)).recipe["data"]["chat_template_kwargs"]
    assert kept == {"enable_thinking": False}
    shaping = "grpo: {reward_shaping: {enabled: true, max_response_length: 9, stop_properly_penalty_coef: 0.0}, "
    told = notes(translate(written(tmp_path, text.replace("grpo: {", shaping, 1))), "untranslated")
    assert "grpo.reward_shaping.stop_properly_penalty_coef" in told


def test_interpolations_are_worked_out_as_omegaconf_does():
    worked_out, failures = interpolate({
        "a": {"b": 4, "c": "${.b}", "d": {"e": "${..b}", "f": "x-${a.b}"}},
        "g": "${mul:${mul:${a.b}, 2}, 0.5}",
        "h": "${max:1, ${a.d.e}}",
        "i": "${oc.env:HOME_OF_DATA}/rows.jsonl",
        "j": "${a.none}",
        "k": "${eval:1+1}",
        "l": "${l}",
    })  # fmt: skip
    assert worked_out["a"] == {"b": 4, "c": 4, "d": {"e": 4, "f": "x-4"}}
    assert (worked_out["g"], worked_out["h"], worked_out["i"]) == (4.0, 4, "${env:HOME_OF_DATA}/rows.jsonl")
    assert failures == {
        "j": "a.none is not in the file",
        "k": "${eval:…} is not known",
        "l": "it refers to itself",
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ppo: {a: 1}\ngrpo: {b: 1}\npolicy: {model_name: a}", "has grpo and ppo of"),
        ("policy: {model_name: a}", "none of grpo, ppo, sft, dpo, rm, distillation"),
        ("sft: {max_num_steps: 1}", "names no model"),
        ("defaults: none.yaml", "there is no file .*none.yaml, inherited through"),
        ("defaults: theirs.yaml", "inherits itself"),
        ("a: [", "is not valid YAML"),
        ("- a", "holds no sections"),
    ],
)
def test_what_is_no_recipe_of_theirs_is_refused(tmp_path, text, words):
    with pytest.raises(NemoRLError, match=words):
        translate(written(tmp_path, text))
