"""Architectures that our own mapping does not have, through NVIDIA's Megatron-Bridge, on machines with GPUs.

Optional, and imported only when it is asked for. Its release for megatron-core 0.16 needs transformers 4 and
Transformer Engine, so that it lives in an environment of its own. That it carries weights over exactly does not mean
that the model computes the same: what it misreads of positions is wrong without an error. So what it made of the rotary
embedding is compared with `config.json` as it was written, and what differs, or cannot be compared, is refused.
"""

import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl_backends.errors import MissingDependencyError, ModelError
from rl_backends.megatron.config import MegatronConfig
from rl_backends.megatron.installed import require_megatron

__all__ = ["BridgedModel", "bridge_problem", "build_through_bridge", "rope_differences"]

NEEDED = {"megatron-bridge": ">=0.3.1,<0.4", "transformers": ">=4.57,<5"}
"""0.3.1 was tried with 4.57.6, without Transformer Engine. With transformers 5 it takes a rotary base of 10000 for
every model, without an error."""

LLAMA3_CONSTANTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What megatron-core's Llama 3 scaling is built with, whatever a configuration says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgedModel:
    """One pipeline stage's part of a model that Megatron-Bridge built and filled with weights."""

    module: nn.Module
    """megatron-core's model, not wrapped in any data parallelism or precision."""

    provider: Any
    """Megatron-Bridge's configuration of it, which is a TransformerConfig."""

    bridge: Any
    """Its AutoBridge."""

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors under their Hugging Face names, one after the other, on the CPU; every rank calls it."""
        yield from self.bridge.export_hf_weights([self.module], cpu=True, show_progress=False)


def bridge_problem() -> str | None:
    """Why Megatron-Bridge cannot be used here, all reasons in one line, or None. Imports nothing of it."""
    problems = [problem for name, needed in NEEDED.items() if (problem := _release_problem(name, needed))]
    if importlib.util.find_spec("transformer_engine") is None:
        problems.append("transformer_engine is not installed, which megatron-bridge imports")
    if not torch.cuda.is_available():
        problems.append("torch sees no GPU")
    return "; ".join(problems) or None


def build_through_bridge(folder: Path, config: MegatronConfig) -> BridgedModel:
    """Build this rank's part of a Hugging Face model, with its weights. Every rank calls it, inside joined groups.

    Args:
        folder: the model, with config.json and safetensors. No code of it is run.
        config: how it is laid over ranks.

    Raises:
        MissingDependencyError: something is absent, or of another release; all of it is in the message.
        ModelError: Megatron-Bridge has no such architecture, or reads its positions differently.
        RuntimeError: Megatron's groups are not joined, which Megatron-Bridge would then do in its own way.
    """
    require_megatron()
    if problem := bridge_problem():
        raise MissingDependencyError(
            f"Megatron-Bridge cannot be used here: {problem}. Architectures that rl-backends maps itself need none of "
            f"it; for others, use a machine with GPUs and megatron-bridge==0.3.1, transformers 4, Transformer Engine"
        )
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        raise RuntimeError("Megatron-Bridge builds within Megatron's groups, and they are not joined: join them first")
    try:
        bridge = AutoBridge.from_hf_pretrained(folder, trust_remote_code=False)
        provider = bridge.to_megatron_provider(load_weights=True)
    except (ValueError, NotImplementedError) as error:
        raise ModelError(f"Megatron-Bridge cannot build {folder}: {error}") from error
    _require_same_positions(folder, provider)
    _lay_out(provider, config)
    (module,) = provider.provide_distributed_model(wrap_with_ddp=False, mixed_precision_wrapper=None)
    return BridgedModel(module=module, provider=provider, bridge=bridge)


def rope_differences(hf_config: Mapping[str, Any], provider: Any) -> list[str]:
    """What a provider's rotary positions have not from `config.json`, field by field; nothing where they agree.

    Args:
        hf_config: config.json, read as JSON: classes of transformers leave fields out that are of another release.
        provider: Megatron-Bridge's.
    """
    if getattr(provider, "position_embedding_type", None) not in {"rope", "yarn"}:
        return []
    fields = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in fields.values()):
        return [f"rope_parameters={fields}: one kind of positions for each kind of layer cannot be compared"]
    kind = fields.get("rope_type", fields.get("type", "default"))
    percent = fields.get("partial_rotary_factor", hf_config.get("partial_rotary_factor", 1.0))
    pairs = [
        ("rope_theta", _base(hf_config, fields), "rotary_base", _as_tuple(provider.rotary_base)),
        ("partial_rotary_factor", percent, "rotary_percent", provider.rotary_percent),
        *_scaling(kind, fields, provider),
    ]
    return [f"{ours}={wanted} of config.json is {theirs}={got}" for ours, wanted, theirs, got in pairs if wanted != got]


def _release_problem(name: str, needed: str) -> str | None:
    from packaging.specifiers import SpecifierSet  # comes with transformers

    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"{name} is not installed, and {needed} is needed"
    return None if installed in SpecifierSet(needed) else f"{name} {installed} is installed, and {needed} is needed"


def _require_same_positions(folder: Path, provider: Any) -> None:
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if differences := rope_differences(written.get("text_config", written), provider):
        raise ModelError(
            f"Megatron-Bridge would compute other positions than {folder}: {'; '.join(differences)}. Weights would be "
            f"the same and log-probabilities wrong; train this model with the DTensor backend"
        )


def _base(hf_config: Mapping[str, Any], fields: Mapping[str, Any]) -> Any:
    """`rope_theta`; with that of local layers before it, where a model has both."""
    base = fields.get("rope_theta", hf_config.get("rope_theta"))
    local = hf_config.get("rope_local_base_freq")
    return base if local is None else (local, base)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _scaling(kind: str, fields: Mapping[str, Any], provider: Any) -> list[tuple[str, Any, str, Any]]:
    """What has to be equal: (field of config.json, its value, the provider's name for it, its value)."""
    scaled = provider.rope_scaling
    if kind == "default":
        return [("rope_type", "default", "rope_scaling", "llama3" if scaled else "default")]
    if kind == "llama3":
        constants = LLAMA3_CONSTANTS.items()
        return [
            ("rope_type", "llama3", "rope_scaling", "llama3" if scaled else "default"),
            ("factor", fields.get("factor"), "rope_scaling_factor", provider.rope_scaling_factor),
            *((name, fields.get(name), "megatron-core's constant", value) for name, value in constants),
        ]
    if kind == "yarn" and provider.position_embedding_type == "yarn":
        names = ("factor", "rotary_scaling_factor"), ("original_max_position_embeddings",) * 2
        return [
            (ours, fields.get(ours), f"yarn_{theirs}", getattr(provider, f"yarn_{theirs}", None))
            for ours, theirs in names
        ]
    return [("rope_type", kind, "position_embedding_type", provider.position_embedding_type)]


def _lay_out(provider: Any, config: MegatronConfig) -> None:
    """Say to a provider what `transformer_config` says to our own models."""
    dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
    layout = {
        "tensor_model_parallel_size": config.tensor_model_parallel_size,
        "sequence_parallel": config.sequence_parallel,
        "pipeline_model_parallel_size": config.pipeline_model_parallel_size,
        "context_parallel_size": config.context_parallel_size,
        "expert_model_parallel_size": config.expert_model_parallel_size,
        "expert_tensor_parallel_size": 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "fp16": False,
        "bf16": dtype == torch.bfloat16,
        "should_pad_vocab": True,
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        "variable_seq_lengths": config.pipeline_model_parallel_size > 1,
        "moe_token_dispatcher_type": "alltoall",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        # Without it parameters lack the marks of tensor parallelism, by which gradient norms are counted.
        "perform_initialization": True,
        "recompute_granularity": config.recompute_granularity,
    }
    if config.recompute_granularity == "full":
        layout |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    for name, value in layout.items():
        setattr(provider, name, value)
    provider.finalize()
