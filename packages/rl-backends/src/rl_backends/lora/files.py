"""Adapters as a folder in peft's format: adapter_config.json and adapter_model.safetensors.

`peft.PeftModel.from_pretrained` and vLLM read it. Written beside its place and renamed into it. The folder names the
model that it belongs to.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rl_backends.checkpoints.folders import atomic_folder, write_safetensors
from rl_backends.lora.inject import require_peft
from rl_backends.lora.layers import ADAPTER, adapted_layers, peft_names, to_peft, trained_whole, unwrapped
from rl_backends.rank_agreement import on_rank_0
from rl_parallel_plans import export_state_dict

WEIGHTS = "adapter_model.safetensors"

TASKS = {"ForCausalLM": "CAUSAL_LM", "ForSequenceClassification": "SEQ_CLS"}
"""How the name of a model's class ends to what peft calls its task."""


def save_adapter(
    model: nn.Module, folder: str | Path, *, base_model_name: str, tensors: Iterable[tuple[str, Tensor]] | None = None
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
        require_peft()
        import peft

        held: Any = model
        trained = held.peft_config[ADAPTER]  # as add_lora has made it
        config = peft.LoraConfig(
            base_model_name_or_path=base_model_name,
            task_type=next((task for end, task in TASKS.items() if type(model).__name__.endswith(end)), None),
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
        with atomic_folder(Path(folder), replace=False) as unfinished:
            config.save_pretrained(str(unfinished))
            write_safetensors(unfinished / WEIGHTS, weights, metadata={"format": "pt"})

    on_rank_0(write)


def _gathered(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name in the model and unsharded tensor, on rank 0; on the others nothing."""
    for path, module in model.named_modules():
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            for name, tensor in export_state_dict(module):
                if module.get_parameter(name).requires_grad:
                    yield f"{unwrapped(path)}.{name}", tensor


def _short_names(names: list[str], targets: list[str], *, tokens: int) -> list[str]:
    """Last tokens where they mean these targets and no other name; else the whole names."""
    ends = sorted({".".join(target.split(".")[-tokens:]) for target in targets})
    fits = {name for name in names if ".".join(name.split(".")[-tokens:]) in ends}
    return ends if fits == set(targets) else targets
