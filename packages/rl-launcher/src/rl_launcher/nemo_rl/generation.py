"""Their engines, as `policy.generation`. It knows no algorithm."""

from typing import Any

from rl_launcher.nemo_rl.source import Source

__all__ = ["generation"]

SECTION = "policy.generation"
FOR_EVALUATION = 256
SAME = {"precision", "tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization", "max_model_len"}


def generation(source: Source) -> dict[str, Any]:
    """Return `policy.generation`."""
    if source.peek(SECTION) is None:
        reason = "theirs does not generate here; ours does, to evaluate"
        source.note("fill_in", "policy.generation.max_new_tokens", reason, value=FOR_EVALUATION)
        return {"max_new_tokens": FOR_EVALUATION}
    ours: dict[str, Any] = {"backend": "vllm"}
    match source.take(f"{SECTION}.backend", "vllm"):
        case "vllm":
            ours["vllm_cfg"] = _vllm(source)
        case "hf":
            ours["backend"] = "transformers"
        case other:
            source.untranslated(f"{SECTION}.backend", f"vllm stands in the place of {other}, with its defaults")
    ours["max_new_tokens"] = _longest_answer(source)
    ours["temperature"] = source.take(f"{SECTION}.temperature", 1.0)
    _sampling(source, ours["temperature"])
    _colocated(source, ours)
    return ours


def _longest_answer(source: Source) -> Any:
    """Tokens of an answer; often only a file that theirs starts from says it, and that file is not always there."""
    written = source.take(f"{SECTION}.max_new_tokens")
    if written is not None:
        return written
    whole = source.peek("policy.max_total_sequence_length")
    reason = "theirs does not say it; this is policy.max_total_sequence_length, which holds prompt and answer"
    if whole is None:
        whole, reason = FOR_EVALUATION, "theirs does not say it, nor how long a row may be"
    source.note("fill_in", f"{SECTION}.max_new_tokens", reason, value=whole)
    return whole


def _vllm(source: Source) -> dict[str, Any]:
    section = f"{SECTION}.vllm_cfg"
    ours = {name: value for name in sorted(SAME) if (value := source.take(f"{section}.{name}")) is not None}
    ours["async_engine"] = bool(source.take(f"{section}.async_engine", default=False))
    ours["enforce_eager"] = bool(source.take(f"{section}.enforce_eager", default=False))
    if ours.get("precision") not in {"bfloat16", "float32", "auto", None}:
        source.untranslated(f"{section}.precision", "engines take the policy's precision; quantised refit is not ours")
        del ours["precision"]
    if (source.take(f"{section}.expert_parallel_size") or 1) > 1:
        ours["enable_expert_parallel"] = True
    extra = dict(source.take(f"{SECTION}.vllm_kwargs") or {})
    if source.peek(f"{section}.kv_cache_dtype", "auto") != "auto":
        extra["kv_cache_dtype"] = source.take(f"{section}.kv_cache_dtype")
    if extra:
        ours["vllm_kwargs"] = extra
    return ours


def _sampling(source: Source, temperature: float) -> None:
    for name, neutral in (("top_p", 1.0), ("top_k", None)):
        if source.take(f"{SECTION}.{name}", neutral) not in {neutral, -1}:
            reason = "a rollout is sampled from the whole distribution, which its logp is of"
            source.untranslated(f"{SECTION}.{name}", reason)
        source.take(f"{SECTION}.val_{name}")
    if source.take(f"{SECTION}.val_temperature", temperature) != temperature:
        source.untranslated(
            f"{SECTION}.val_temperature", "evaluation samples at the temperature of training, and greedily"
        )
    for name in ("stop_token_ids", "stop_strings"):
        if source.take(f"{SECTION}.{name}"):
            source.untranslated(f"{SECTION}.{name}", "an answer ends with the model's own stop tokens")


def _colocated(source: Source, ours: dict[str, Any]) -> None:
    section = f"{SECTION}.colocated"
    if source.take(f"{section}.enabled", default=True):
        return
    resources = {
        name: value for name in ("num_nodes", "gpus_per_node") if (value := source.take(f"{section}.resources.{name}"))
    }
    if source.peek("cluster.num_nodes", 1) == 1:
        resources.pop("num_nodes", None)  # theirs counts by GPUs on one machine
    if resources:
        ours["colocated"] = {"enabled": False, "resources": resources}
        return
    source.untranslated(f"{section}.enabled", "it does not say which GPUs are the engines'; they share the trainer's")
