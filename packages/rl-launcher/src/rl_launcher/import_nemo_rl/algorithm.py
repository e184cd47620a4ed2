"""Their algorithms as our stages, without the optimizer. What is a key for a key is in `key_map.yaml`."""

from typing import Any

from rl_launcher.import_nemo_rl.read import Source


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
    ours = length(source.copy(section), steps=steps)
    return {**ours, "steps_per_generation": steps}


def length(ours: dict[str, Any], *, steps: int = 1) -> dict[str, Any]:
    """Return the keys of a stage with our number of steps: theirs counts batches, and -1 leaves the end to epochs."""
    number = ours.pop("max_num_steps", -1)
    if number is not None and number > 0:
        ours["max_num_steps"] = number * steps
    if (epochs := ours.get("max_num_epochs")) is not None and epochs <= 0:
        del ours["max_num_epochs"]
    return ours


def grpo(source: Source) -> dict[str, Any]:
    """Return our `grpo`."""
    steps = steps_per_generation(source, "grpo")
    objective = {**source.copy("loss_fn"), "advantage": _advantage(source)}
    _kl_limits(source, objective["kl"])
    batches = source.take("grpo.dynamic_sampling_max_gen_batches", 10)
    objective["selection"] = source.copy("grpo.selection", "grpo")
    if objective["selection"]["groups_without_signal"] == "drop":
        objective["selection"]["max_generation_batches"] = batches
    if correction := _correction(source, "grpo"):
        objective["correction"] = correction
    if source.take("grpo.reward_shaping.enabled"):
        objective["overlong"] = source.copy("grpo.reward_shaping")
    ours: dict[str, Any] = {**_rounds(source, "grpo", steps), "objective": objective}
    if not source.take("grpo.async_grpo.enabled", default=False):
        return ours
    in_flight = source.take("grpo.async_grpo.in_flight_weight_updates")
    engine = source.peek("policy.generation.backend", "vllm")
    if in_flight and not (engine == "vllm" and source.peek("policy.generation.vllm_cfg.async_engine")):
        reason = "the engine is synchronous, so weights change between calls"
        source.untranslated("grpo.async_grpo.in_flight_weight_updates", reason)
        in_flight = False
    # They count batches of rollouts, we count optimizer steps; a synchronous run is up to `steps - 1` of them behind.
    staleness = (source.take("grpo.async_grpo.max_trajectory_age_steps", 1) + 1) * steps - 1
    return {
        **ours,
        "async_grpo": {"max_staleness": staleness, "weights": ("between_calls", "in_flight")[bool(in_flight)]},
    }


def _kl_limits(source: Source, kl: dict[str, Any]) -> None:
    """Add the bounds of a token's KL, which theirs has unless the file says null, to `kl` where it counts."""
    for name, ours, usual in (("input", "log_ratio_limit", 20.0), ("output", "limit", 10.0)):
        limit = source.take(f"loss_fn.kl_{name}_clamp_value", usual)
        if kl["weight"] and limit is not None:
            kl[ours] = limit


def _advantage(source: Source) -> dict[str, Any]:
    # Older files have these two directly below `grpo`.
    leave_out, normalize = (
        source.take(f"grpo.adv_estimator.{name}", source.take(f"grpo.{name}", default=True))
        for name in ("use_leave_one_out_baseline", "normalize_rewards")
    )
    baseline = "leave_one_out" if leave_out else "group_mean"
    match source.take("grpo.adv_estimator.name", "grpo"):
        case "reinforce_plus_plus":
            centred = source.take("grpo.adv_estimator.minus_baseline", default=True)
            return {"baseline": "group_mean" if centred else "none", "scale": "none", "whiten": "tokens"}
        case "gdpo":
            reason = "name your rewards in env.rewards, and set grpo.objective.advantage.normalize_each_reward: true"
            source.untranslated("grpo.adv_estimator.name", reason)
        case name if name != "grpo":
            source.untranslated("grpo.adv_estimator.name", f"{baseline} is used instead of {name}")
    return {"baseline": baseline, "scale": "group_std" if normalize else "none"}


def _correction(source: Source, section: str) -> dict[str, Any]:
    threshold = source.take(f"{section}.seq_logprob_error_threshold")
    ours: dict[str, Any] = {} if threshold is None else {"sequence_error_threshold": threshold}
    kind = source.take("loss_fn.truncated_importance_sampling_type")
    high = source.take("loss_fn.truncated_importance_sampling_ratio")
    low = source.take("loss_fn.truncated_importance_sampling_ratio_min")
    if not source.take("loss_fn.use_importance_sampling_correction"):
        return ours
    if kind == "seq-mask-tis":
        return ours | {"weight": "token", "high": float("inf"), "geometric_low": low, "geometric_high": high}
    ours["weight"] = "sequence" if source.peek("loss_fn.sequence_level_importance_ratios") else "token"
    ours["high"] = float("inf") if high is None else high
    if low is not None:
        ours["low"] = low
    if kind == "icepop":
        ours["outside"] = "mask"
    return ours


def distillation(source: Source) -> dict[str, Any]:
    """Return our `distill`."""
    steps = steps_per_generation(source, "distillation")
    ours = {**_rounds(source, "distillation", steps), "teacher": source.copy("teacher")}
    mixed = source.take("loss_fn.mixed_kl_weight", 0.5)
    match source.take("loss_fn.kl_type", "mixed"):
        case "forward":
            ours["beta"] = 0.0
        case "reverse":
            ours["beta"] = 1.0
        case _:  # their weight is that of the forward KL, ours that of the reverse KL
            ours |= {"beta": 1.0 - mixed, "interpolation": "mixed"}
    # Their default scales both distributions to the k tokens, of which one alone would be certain.
    if not source.peek("loss_fn.zero_outside_topk") and ours.get("k") != 1:
        source.take("loss_fn.zero_outside_topk")
        ours["tail"] = "renormalize"
    source.note("dropped", "teacher", "the teacher is sharded like the policy", value="its other keys")
    return ours


def ppo(source: Source) -> dict[str, Any]:
    """Return our `ppo`, without its optimizers."""
    epochs = source.take("ppo.ppo_epochs", 1)
    steps = steps_per_generation(source, "ppo") * epochs
    objective = source.copy("loss_fn")
    _kl_limits(source, objective["kl"])
    objective["selection"] = source.copy("ppo.selection", "ppo")
    if not source.peek("ppo.use_dynamic_sampling"):
        source.note("dropped", "ppo.dynamic_sampling_max_gen_batches", "ppo.use_dynamic_sampling is off")
    if correction := _correction(source, "ppo"):
        objective["correction"] = correction
    if source.take("ppo.reward_shaping.enabled"):
        objective["overlong"] = source.copy("grpo.reward_shaping", "ppo.reward_shaping")
    value = {**source.copy("ppo.adv_estimator"), **source.copy("value_loss_fn")}
    return {**_rounds(source, "ppo", steps), "num_epochs": epochs, "objective": objective, "value": value}


def reward_model(source: Source) -> dict[str, Any]:
    """Return our `reward_model`."""
    return {**length(source.copy("rm")), "batch_size": source.take("policy.train_global_batch_size")}


def sft(source: Source) -> dict[str, Any]:
    """Return our `sft`."""
    return {**length(source.copy("sft")), "batch_size": source.take("policy.train_global_batch_size")}


def dpo(source: Source) -> dict[str, Any]:
    """Return our `dpo` on given pairs."""
    return {"pairs": "data", **length(source.copy("dpo")), "batch_size": source.take("policy.train_global_batch_size")}
