"""Their algorithms as our stages, without the optimizer."""

from typing import Any

from rl_launcher.import_nemo_rl.read import Kind, Source


def steps_per_generation(source: Source, section: str) -> int:
    """Return how many optimizer steps they take on one batch of rollouts."""
    prompts = source.peek(f"{section}.num_prompts_per_step", 1)
    rollouts = prompts * source.peek(f"{section}.num_generations_per_prompt", 1)
    batch = source.take("policy.train_global_batch_size") or rollouts
    if rollouts % batch == 0:
        return int(rollouts // batch)
    reason = f"{rollouts} rollouts of {prompts} prompts are not a multiple of it; one step on each batch"
    source.untranslated("policy.train_global_batch_size", reason)
    return 1


def _rounds(source: Source, section: str, steps: int) -> dict[str, Any]:
    """Return the keys that both loops share: number of steps, prompts and rollouts."""
    if (turns := source.take(f"{section}.max_rollout_turns", 1)) > 1:
        reason = "several turns need an environment: name one by env.environment, and give max_turns"
        source.untranslated(f"{section}.max_rollout_turns", f"{reason}, {turns}")
    if (epochs := source.take(f"{section}.max_num_epochs")) is not None:
        reason = f"ours ends after max_num_steps, theirs after {epochs} passes over the data as well"
        source.untranslated(f"{section}.max_num_epochs", reason)
    return {
        "max_num_steps": source.take(f"{section}.max_num_steps") * steps,  # theirs counts batches of rollouts
        "num_prompts": source.take(f"{section}.num_prompts_per_step"),
        "num_generations_per_prompt": source.take(f"{section}.num_generations_per_prompt"),
        "steps_per_generation": steps,
    }


def grpo(source: Source) -> dict[str, Any]:
    """Return our `grpo`."""
    steps = steps_per_generation(source, "grpo")
    objective = {
        "advantage": _advantage(source),
        "ratio": _ratio(source),
        "kl": _kl(source),
        "selection": _selection(source),
        "aggregation": "token-mean" if source.take("loss_fn.token_level_loss", default=True) else "seq-mean-token-mean",
    }
    if correction := _correction(source):
        objective["correction"] = correction
    if overlong := _overlong(source):
        objective["overlong"] = overlong
    ours: dict[str, Any] = {**_rounds(source, "grpo", steps), "objective": objective}
    if source.take("grpo.async_grpo.enabled", default=False):
        ours["async_grpo"] = _asynchronous(source, steps)
    return ours


def _advantage(source: Source) -> dict[str, Any]:
    section = "grpo.adv_estimator"
    leave_out = source.take(
        f"{section}.use_leave_one_out_baseline", source.peek("grpo.use_leave_one_out_baseline", default=True)
    )
    normalize = source.take(f"{section}.normalize_rewards", source.peek("grpo.normalize_rewards", default=True))
    source.take("grpo.use_leave_one_out_baseline")
    source.take("grpo.normalize_rewards")
    baseline = "leave_one_out" if leave_out else "group_mean"
    if source.peek(f"{section}.name", "grpo") != "reinforce_plus_plus":
        source.note("dropped", f"{section}.minus_baseline", "for another estimator")
    match source.take(f"{section}.name", "grpo"):
        case "grpo":
            return {"baseline": baseline, "scale": "group_std" if normalize else "none"}
        case "reinforce_plus_plus":
            centred = source.take(f"{section}.minus_baseline", default=True)
            return {"baseline": "group_mean" if centred else "none", "scale": "none", "whiten": "tokens"}
        case "gdpo":
            reason = "name your rewards in env.rewards, and set grpo.objective.advantage.normalize_each_reward: true"
            source.untranslated(f"{section}.name", reason)
        case name:
            source.untranslated(f"{section}.name", f"{baseline} is used instead of {name}")
    return {"baseline": baseline, "scale": "group_std" if normalize else "none"}


def _ratio(source: Source) -> dict[str, Any]:
    surrogate = "clip"
    if source.take("loss_fn.use_cispo"):
        surrogate = "cispo"
    if source.take("loss_fn.disable_ppo_ratio"):
        surrogate = "reinforce"
    ours = {
        "surrogate": surrogate,
        "level": "sequence" if source.take("loss_fn.sequence_level_importance_ratios") else "token",
        # They recompute the old log-probabilities before the first step of each batch.
        "proximal": "current" if source.take("loss_fn.force_on_policy_ratio") else "recomputed",
        "clip_low": source.take("loss_fn.ratio_clip_min", 0.2),
        "clip_high": source.take("loss_fn.ratio_clip_max", 0.2),
    }
    if (dual := source.take("loss_fn.ratio_clip_c")) is not None:
        ours["dual_clip"] = dual
    return ours


def _kl(source: Source) -> dict[str, Any]:
    weight = source.take("loss_fn.reference_policy_kl_penalty", 0.0)
    ours = {
        "weight": weight,
        "estimator": source.take("loss_fn.reference_policy_kl_type", "k3"),
        "place": "reward" if source.take("loss_fn.use_kl_in_reward") else "loss",
    }
    for name in ("kl_input_clamp_value", "kl_output_clamp_value"):
        kind: Kind = "untranslated" if weight and source.peek(f"loss_fn.{name}") is not None else "dropped"
        source.note(kind, f"loss_fn.{name}", "the KL is not clamped here" if weight else "its weight is 0")
    return ours


def _correction(source: Source) -> dict[str, Any]:
    threshold = source.take("grpo.seq_logprob_error_threshold")
    ours: dict[str, Any] = {} if threshold is None else {"sequence_error_threshold": threshold}
    kind = source.take("loss_fn.truncated_importance_sampling_type")
    high = source.take("loss_fn.truncated_importance_sampling_ratio")
    low = source.take("loss_fn.truncated_importance_sampling_ratio_min")
    if not source.take("loss_fn.use_importance_sampling_correction"):
        return ours
    sequence = source.peek("loss_fn.sequence_level_importance_ratios")
    ours["weight"] = "sequence" if sequence else "token"
    if kind == "seq-mask-tis":
        return ours | {"weight": "token", "high": float("inf"), "geometric_low": low, "geometric_high": high}
    ours["high"] = float("inf") if high is None else high
    if low is not None:
        ours["low"] = low
    if kind == "icepop":
        ours["outside"] = "mask"
    return ours


def _selection(source: Source) -> dict[str, Any]:
    ours: dict[str, Any] = {"groups_without_signal": "keep"}
    batches = source.take("grpo.dynamic_sampling_max_gen_batches", 10)
    if source.take("grpo.use_dynamic_sampling"):
        ours = {"groups_without_signal": "drop", "max_generation_batches": batches}
    if source.take("grpo.overlong_filtering"):
        ours["mask_truncated"] = True
    if source.take("grpo.batch_multiplier", 1) != 1:
        source.untranslated("grpo.batch_multiplier", "every further batch of prompts is as large as the first here")
    return ours


def _overlong(source: Source) -> dict[str, Any]:
    section = "grpo.reward_shaping"
    if not source.take(f"{section}.enabled"):
        return {}
    if source.take(f"{section}.stop_properly_penalty_coef") is not None:  # 0 has an effect, too
        source.untranslated(f"{section}.stop_properly_penalty_coef", "write it into the reward")
    return {
        "max_length": source.take(f"{section}.max_response_length"),
        "buffer": source.take(f"{section}.overlong_buffer_length", 0),
        "penalty": source.take(f"{section}.overlong_buffer_penalty", 1.0),
    }


def _asynchronous(source: Source, steps: int) -> dict[str, Any]:
    section = "grpo.async_grpo"
    age = source.take(f"{section}.max_trajectory_age_steps", 1)
    in_flight = source.take(f"{section}.in_flight_weight_updates")
    engine = source.peek("policy.generation.backend", "vllm")
    if in_flight and not (engine == "vllm" and source.peek("policy.generation.vllm_cfg.async_engine")):
        reason = "the engine is synchronous, so weights change between calls"
        source.untranslated(f"{section}.in_flight_weight_updates", reason)
        in_flight = False
    # They count batches of rollouts, we count optimizer steps; a synchronous run is up to `steps - 1` of them behind.
    return {
        "max_staleness": (age + 1) * steps - 1,
        "weights": "in_flight" if in_flight else "between_calls",
    }


def distillation(source: Source) -> dict[str, Any]:
    """Return our `distill`."""
    steps = steps_per_generation(source, "distillation")
    teacher = source.take("teacher.model_name")
    ours = {
        **_rounds(source, "distillation", steps),
        "k": source.take("distillation.topk_logits_k", 64),
        "teacher": {"model_name": str(teacher)},
    }
    mixed = source.take("loss_fn.mixed_kl_weight", 0.5)
    match source.take("loss_fn.kl_type", "mixed"):
        case "forward":
            ours["beta"] = 0.0
        case "reverse":
            ours["beta"] = 1.0
        case _:  # their weight is that of the forward KL, ours that of the reverse KL
            ours |= {"beta": 1.0 - mixed, "interpolation": "mixed"}
    outside = "distill.tail says what becomes of tokens outside the top k; it is bucket here"
    source.note("untranslated", "loss_fn.zero_outside_topk", outside)
    source.note("dropped", "teacher", "the teacher is sharded like the policy", value="its other keys")
    return ours


def sft(source: Source) -> dict[str, Any]:
    """Return our `sft`."""
    return {
        "train_on": "last_turn" if source.take("sft.only_unmask_final") else "assistant",
        "max_num_steps": source.take("sft.max_num_steps"),
        "batch_size": source.take("policy.train_global_batch_size"),
    }


def dpo(source: Source) -> dict[str, Any]:
    """Return our `dpo` on given pairs."""
    if source.take("dpo.preference_loss_weight", 1) != 1:
        source.untranslated("dpo.preference_loss_weight", "it is 1: scale the learning rate, and dpo.nll_weight")
    source.take("dpo.sft_average_log_probs")
    return {
        "pairs": "data",
        "max_num_steps": source.take("dpo.max_num_steps"),
        "batch_size": source.take("policy.train_global_batch_size"),
        "beta": source.take("dpo.reference_policy_kl_penalty", 0.1),
        "loss": "sigmoid_norm" if source.take("dpo.preference_average_log_probs") else "sigmoid",
        "nll_weight": source.take("dpo.sft_loss_weight", 0.0),
    }
