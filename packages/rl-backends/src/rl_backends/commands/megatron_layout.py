"""How Megatron would lay a model over ranks, and what each holds, by arithmetic: no ranks, weights or megatron-core."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from torch import nn

from rl_backends.dry_run.explanation import release_of
from rl_backends.least_memory import GRADIENT_BYTES, bytes_of_element
from rl_backends.loading.weights import first_names
from rl_backends.lora.layers import A_TAIL, B_TAIL, base_name
from rl_backends.megatron.architecture import Architecture, read_architecture
from rl_backends.megatron.config import MegatronConfig, explain_megatron_checkpoint_dir
from rl_backends.megatron.gpt_model import layers_of_stages, padded_vocab_size, require_layout
from rl_backends.megatron.groups import sizes_of
from rl_backends.megatron.installed import INSTALL
from rl_parallel_plans.explain.report import size

MadeT = TypeVar("MadeT")

DOES = {
    "tp": "share each matrix multiplication",
    "cp": "share the tokens of each row",
    "ep": "share the experts of each layer, in place of tp, cp and dp ranks",
    "dp": "have rows of their own, and sum gradients",
    "pp": "share the layers, as stages of a pipeline",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What each rank of a pipeline stage holds."""

    ranks: tuple[int, ...]
    layers: tuple[int, ...]
    numbers: int
    """Of weights, on one rank; padding of the vocabulary, and a copy of tied embeddings, included."""
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    """Two moments, and a float32 master of each weight in bfloat16; a distributed optimizer has its share of them."""

    @property
    def num_bytes(self) -> int:
        """All of it; activations and buffers of communication come on top."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes


def shapes_of(skeleton: nn.Module, config: MegatronConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's tensors, tied ones once, with the adapters that `config` asks for."""
    if config.lora_cfg is not None and not getattr(skeleton, "peft_config", None):
        from rl_backends.loading.skeleton import without_weights
        from rl_backends.lora.inject import add_lora

        skeleton = add_lora(without_weights(skeleton), config.lora_cfg, layers_only=True)
    names = first_names(skeleton)
    shapes = {name: tuple(t.shape) for name, t in skeleton.state_dict().items() if names[name] == name}
    return {base_name(name): shape for name, shape in shapes.items()}


def readable_layout(
    hf_config: Any, make_config: Callable[[], MegatronConfig], *, ranks: int
) -> tuple[Architecture, MegatronConfig]:
    """The architecture of a configuration, and how it is asked to be laid over so many ranks."""
    if ranks < 1:
        raise ValueError(f"--ranks must be at least 1; got {ranks}")
    problems: list[str] = []

    def tried(action: Callable[[], MadeT]) -> MadeT | None:
        try:
            return action()
        except ValueError as refusal:
            problems.append(str(refusal))
            return None

    config, architecture = tried(make_config), tried(lambda: read_architecture(hf_config))
    if config is not None:
        tried(lambda: sizes_of(config, ranks))
    if config is not None and architecture is not None:
        tried(lambda: require_layout(architecture, config))
    if problems:
        raise ValueError("\n".join(problems))
    assert architecture is not None
    assert config is not None
    return architecture, config


def stages_of(
    architecture: Architecture, shapes: Mapping[str, tuple[int, ...]], config: MegatronConfig, *, ranks: int
) -> list[Stage]:
    """Each pipeline stage, and what each of its ranks holds. All ranks of a stage hold as much.

    shapes: of `shapes_of`.
    """
    count, each = config.pipeline_model_parallel_size, ranks // config.pipeline_model_parallel_size
    sharing, sharing_experts = 1, 1  # ranks that have the optimizer's state between them
    if config.use_distributed_optimizer:
        sharing, sharing_experts = each // config.tensor_model_parallel_size, each // config.expert_model_parallel_size
    element, state = bytes_of_element(config, optimizers=("adamw",))
    made = []
    for number, layers in enumerate(layers_of_stages(architecture.num_layers, config)):
        first, last = number == 0, number == count - 1
        held = {}
        for name, shape in shapes.items():
            parts = name.split(".")
            if parts[:2] == ["model", "layers"]:
                here = int(parts[2]) in layers
            else:  # the last stage has a copy of tied embeddings
                here = first or (last and architecture.tied) if parts[1] == "embed_tokens" else last
            if here:
                held[name] = shape
        dense, experts = _numbers(architecture, held, config)
        adapters = {name: shape for name, shape in held.items() if name.endswith((A_TAIL, B_TAIL))}
        trained = (dense, experts) if config.lora_cfg is None else _numbers(architecture, adapters, config)
        stage = Stage(
            ranks=tuple(range(number * each, (number + 1) * each)),
            layers=tuple(layers),
            numbers=dense + experts,
            weight_bytes=(dense + experts) * element,
            gradient_bytes=sum(trained) * GRADIENT_BYTES,
            optimizer_bytes=(-(-trained[0] // sharing) + -(-trained[1] // sharing_experts)) * state,
        )
        made.append(stage)
    return made


def _numbers(
    architecture: Architecture, shapes: Mapping[str, tuple[int, ...]], config: MegatronConfig
) -> tuple[int, int]:
    """On one rank: those that data-parallel ranks all have, and those of experts."""
    ranks, dense, experts = config.tensor_model_parallel_size, 0, 0
    padding = padded_vocab_size(architecture, config) - architecture.vocab_size
    for name, shape in shapes.items():
        numbers = math.prod(shape)
        # Of an adapter's two, tensor parallelism does not shard B where W is cut by columns, else A.
        replicated = B_TAIL if ".o_proj." in name or ".down_proj." in name else A_TAIL
        if ".mlp.experts." in name:
            experts += numbers
        elif name in {"model.embed_tokens.weight", "lm_head.weight"}:
            dense += (numbers + padding * shape[1]) // ranks
        elif "norm" in name or name.endswith((".mlp.gate.weight", "score.weight", replicated)):
            dense += numbers
        else:
            dense += numbers // ranks
    return dense, experts // config.expert_model_parallel_size


def describe_layout(
    skeleton: nn.Module, make_config: Callable[[], MegatronConfig], *, ranks: int
) -> tuple[str, dict[str, Any], int]:
    """Layout and memory without activations, for people and in plain values, and the most bytes of a rank."""
    architecture, config = readable_layout(skeleton.config, make_config, ranks=ranks)
    stages = stages_of(architecture, shapes_of(skeleton, config), config, ranks=ranks)
    fullest = max(stages, key=lambda stage: stage.num_bytes)
    parameters = sum(parameter.numel() for parameter in skeleton.parameters())
    release, layout = release_of("megatron-core"), sizes_of(config, ranks)
    document = {
        "backend": "megatron",
        "model": {"class": type(skeleton).__name__, "type": architecture.model_type, "parameters": parameters},
        "megatron-core": release,
        "world_size": ranks,
        "config": asdict(config),
        "layout": layout,
        "stages": [{**asdict(stage), "bytes": stage.num_bytes} for stage in stages],
        "memory": {"fullest_rank_bytes": fullest.num_bytes},
    }
    used = [f"  {axis}{count:>5}  {DOES[axis]}" for axis, count in layout.items() if axis in DOES and count > 1]
    told = [
        f"MegatronBackend of {type(skeleton).__name__} ({parameters:,} parameters) on {ranks} {config.device} ranks",
        f"megatron-core {release or f'is not installed, and training needs it: {INSTALL}'}",
        *["\nlayout", *(used or ["  one rank: nothing is shared out"]), "\nstages"],
    ]
    for stage in stages:
        first, last = stage.layers[0], stage.layers[-1]
        in_one = last - first == len(stage.layers) - 1  # and not in the chunks of virtual stages
        parts = [f"layers {first} to {last}" if in_one else f"layers {' '.join(map(str, stage.layers))}"]
        parts += ["the embedding"] * (stage is stages[0]) + ["the last norm and the head"] * (stage is stages[-1])
        told.append(f"  ranks {stage.ranks[0]} to {stage.ranks[-1]}: {', '.join(parts)}; {stage.numbers:,} elements")
    states = "AdamW, two moments" + (" and float32 masters" if config.precision == "bfloat16" else "")
    shared = ", shared out to data-parallel ranks" if config.use_distributed_optimizer else ""
    told += [
        f"\nmemory of the fullest ranks (from {fullest.ranks[0]} on), without activations and communication",
        f"  weights    {size(fullest.weight_bytes):>12}  {config.precision}",
        f"  gradients  {size(fullest.gradient_bytes):>12}  float32",
        f"  optimizer  {size(fullest.optimizer_bytes):>12}  {states}{shared}",
        f"  together   {size(fullest.num_bytes):>12}",
        "\nweights are read from the Hugging Face files, each rank its own parts; nothing is converted",
        f"  `rl-backends convert` would write a Megatron-LM checkpoint to {explain_megatron_checkpoint_dir()}",
    ]
    return "\n".join(told), document, fullest.num_bytes
