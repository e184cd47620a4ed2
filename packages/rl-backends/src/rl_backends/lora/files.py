"""Adapters as a folder in peft's format: adapter_config.json and adapter_model.safetensors.

`peft.PeftModel.from_pretrained` and vLLM read it. Written beside its place and renamed into it; read by every rank,
each of which copies its own part. The folder names the model that it belongs to.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl_backends.checkpoints.folders import atomic_folder
from rl_backends.checkpoints.manifest import write_safetensors
from rl_backends.errors import CheckpointError
from rl_backends.loading.weights import Shard
from rl_backends.lora.inject import require_peft
from rl_backends.lora.layers import (
    ADAPTER,
    AdaptedLayer,
    adapted_layers,
    adapter_tensors,
    from_peft,
    peft_names,
    to_peft,
    trained_whole,
    unwrapped,
)
from rl_backends.rank_agreement import on_every_rank, on_rank_0
from rl_parallel_plans import export_state_dict, named_shards

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


TASKS = {"ForCausalLM": "CAUSAL_LM", "ForSequenceClassification": "SEQ_CLS"}
"""How the name of a model's class ends to what peft calls its task."""

OTHER_MATHS = (
    "lora_bias",
    "use_qalora",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "trainable_token_indices",
    "alora_invocation_tokens",
)
"""Keys of adapter_config.json that, set, make something else of A and B than W + scaling * B A."""

KEEP_BASE = ("gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights`, beside booleans, that left W alone."""


def save_adapter(
    model: nn.Module,
    folder: str | Path,
    *,
    base_model_name: str,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
) -> None:
    """Write the adapters to `folder`, whole or not at all; every rank must call it. Gathered tensor by tensor.

    All of it is on the disk when the call returns.

    Args:
        model: with adapters; sharded or not.
        folder: must not exist.
        base_model_name: folder or hub id of the model without adapters, which loaders of the folder will open.
        tensors: names in the model and unsharded tensors on rank 0, of what trains, where `model` is a skeleton.

    Raises:
        FileExistsError: `folder` is there already; nothing is overwritten.
        OSError: the disk is full or read-only; `folder` does not exist afterwards.
        RankError: on the other ranks, whatever rank 0 raises.
        ModelError: the model has no adapters.
    """
    layers = adapted_layers(model)
    in_file = peft_names(model)
    named = _gathered(model) if tensors is None else tensors
    weights = {in_file(name): to_peft(name, tensor).to("cpu").contiguous() for name, tensor in named}

    def write() -> None:
        config = _peft_config(model, layers, base_model_name)
        target = Path(folder)
        if target.exists():
            raise FileExistsError(
                f"{folder} exists already; a saved adapter is never overwritten, choose another folder"
            )
        with atomic_folder(target) as unfinished:
            config.save_pretrained(str(unfinished))
            write_safetensors(unfinished / WEIGHTS, weights, metadata={"format": "pt"})

    on_rank_0(write)


@torch.no_grad()
def load_adapter(model: nn.Module, folder: str | Path, *, shards: Sequence[Shard] | None = None) -> None:
    """Put the values of a saved adapter into the model's, in place; every rank must call it, and reads only its part.

    Strict: the same layers, rank, scaling, shapes and names. Nothing is copied before every rank has read its part.

    Args:
        model: with adapters; sharded or not.
        folder: that `save_adapter` or peft has written.
        shards: what this rank holds of what trains, where `model` is a skeleton.

    Raises:
        CheckpointError: the folder is not there, is damaged, or holds another adapter than the model has.
        RankError: another rank could not read it.
        ModelError: the model has no adapters.
    """
    adapted_layers(model)
    for target, saved in on_every_rank(lambda: _read(model, Path(folder), shards=shards)):
        target.copy_(saved)


def _read(model: nn.Module, folder: Path, *, shards: Sequence[Shard] | None) -> list[tuple[Tensor, Tensor]]:
    """Views of this rank's adapters, and what the folder has for each."""
    from safetensors import SafetensorError, safe_open

    found = []
    try:
        config = json.loads((folder / CONFIG).read_text())
        if not isinstance(config, dict):
            raise CheckpointError(f"{folder / CONFIG} holds no JSON object, but {type(config).__name__}")
        _check_config(config, model, folder)
        with safe_open(str(folder / WEIGHTS), framework="pt") as file:
            in_file = peft_names(model)
            own: dict[str, Shard] = {
                in_file(shard.name): shard for shard in (named_shards(model) if shards is None else shards)
            }
            wanted = {
                name: tuple(to_peft(own[name].name, torch.empty(own[name].shape, device="meta")).shape)
                if name in own
                else tuple(tensor.shape)  # of another pipeline stage
                for name, tensor in adapter_tensors(model).items()
            }
            held = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            _check_same(wanted, held, folder / WEIGHTS)
            for name in wanted.keys() & own.keys():
                shard, saved = own[name], file.get_slice(name)
                whole = from_peft(shard.name, saved[:], shape=shard.shape) if wanted[name] != shard.shape else saved
                for box in shard.boxes():
                    cut = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
                    found.append((box.of_local(shard.local), whole[cut]))
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{folder}: the adapter cannot be read: {type(error).__name__}: {error}") from error
    return found


def _gathered(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name in the model and unsharded tensor, on rank 0; on the others nothing."""
    for path, module in model.named_modules():
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            for name, tensor in export_state_dict(module):
                if module.get_parameter(name).requires_grad:
                    yield f"{unwrapped(path)}.{name}", tensor


def _peft_config(model: Any, layers: list[AdaptedLayer], base_model_name: str) -> Any:
    require_peft()
    import peft

    trained = model.peft_config[ADAPTER]  # as add_lora has made it
    task = next((task for end, task in TASKS.items() if type(model).__name__.endswith(end)), None)
    config = peft.LoraConfig(
        base_model_name_or_path=base_model_name,
        task_type=task,
        inference_mode=True,
        r=trained.r,
        lora_alpha=trained.lora_alpha,
        use_rslora=trained.use_rslora,
        use_dora=trained.use_dora,
        modules_to_save=sorted({name.rpartition(".")[0] for name in trained_whole(model)}) or None,
    )
    paths = [unwrapped(path) for path, _ in model.named_modules()]
    targets = [layer.name for layer in layers if layer.kind != "experts"]
    config.target_modules = _short_names(paths, targets, tokens=1)  # peft would make a set of it
    if experts := [layer.name for layer in layers if layer.kind == "experts"]:
        parameters = [unwrapped(name) for name, _ in model.named_parameters()]
        config.target_parameters = _short_names(parameters, experts, tokens=2)
    return config


def _short_names(names: list[str], targets: list[str], *, tokens: int) -> list[str]:
    """Last tokens where they mean these targets and no other name; else the whole names."""
    ends = sorted({".".join(target.split(".")[-tokens:]) for target in targets})
    fits = {name for name in names if ".".join(name.split(".")[-tokens:]) in ends}
    return ends if fits == set(targets) else targets


def _check_config(config: dict[str, Any], model: Any, folder: Path) -> None:
    trained = model.peft_config[ADAPTER]  # as add_lora has made it
    ours = {
        "peft_type": "LORA",
        "r": trained.r,
        "lora_alpha": trained.lora_alpha,
        "use_rslora": trained.use_rslora,
        "use_dora": trained.use_dora,
        "bias": "none",
    }
    theirs = {"use_rslora": False, "use_dora": False, "bias": "none", **config}
    for key, value in ours.items():
        if theirs.get(key) != value:
            raise CheckpointError(
                f"{folder / CONFIG}: {key} is {theirs.get(key)!r}, and the model's adapters have {value!r}; give the "
                f"LoraConfig that the adapter was trained with"
            )
    others = {key: config[key] for key in OTHER_MATHS if config.get(key)}
    start = config.get("init_lora_weights", True)
    if not (isinstance(start, bool) or start in KEEP_BASE):
        others["init_lora_weights"] = start
    if others:
        raise CheckpointError(f"{folder / CONFIG}: {others} makes another model of A and B than LoRA; convert it first")


def _check_same(wanted: dict[str, tuple[int, ...]], held: dict[str, tuple[int, ...]], path: Path) -> None:
    missing, foreign = sorted(wanted.keys() - held.keys()), sorted(held.keys() - wanted.keys())
    if missing or foreign:
        raise CheckpointError(
            f"{path} lacks {len(missing)} tensors of the model's adapters {missing[:2]} and has {len(foreign)} of "
            f"others {foreign[:2]}; give the LoraConfig that the adapter was trained with"
        )
    for name, shape in wanted.items():
        if held[name] != shape:
            raise CheckpointError(
                f"{path}: {name} is {list(held[name])} and the model's {list(shape)}: not its adapter"
            )
