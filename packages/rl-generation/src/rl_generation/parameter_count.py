"""How many parameters a model has, whole and on one rank of an engine. Nothing is loaded or allocated.

The model is built on torch's meta device, where tensors have shapes and no storage; tied parameters count once.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from rl_generation.cache_layers import key_value_heads
from rl_generation.errors import EngineOptionError, ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["as_config", "count_parameters", "stage_sizes"]

_WHOLE_ON_EVERY_RANK = frozenset({"gate", "router", "kv_a_proj_with_mqa", "q_a_proj"})
_LAYER = re.compile(r"\b(?:layers|h|blocks)\.(\d+)\.")
_KEYS_AND_VALUES = frozenset({"k_proj", "v_proj"})


def as_config(config: "PretrainedConfig | Mapping[str, Any]") -> "PretrainedConfig":
    """Return a config as it is, or make one of the dictionary in a `config.json`.

    Raises:
        ModelError: The dictionary has no `model_type`, or one that transformers does not know.
    """
    from transformers import AutoConfig

    if not isinstance(config, Mapping):
        return config
    options = dict(config)
    if "model_type" not in options:
        raise ModelError(f"a config needs a model_type; this one has {sorted(options)}")
    model_type = options.pop("model_type")
    try:
        made: PretrainedConfig = AutoConfig.for_model(model_type, **options)
    except ValueError as error:
        raise ModelError(f"transformers does not know model_type={model_type!r}: {error}") from error
    return made


def stage_sizes(num_layers: int, stages: int) -> list[int]:
    """Divide layers among the stages of a pipeline as vLLM does: what is left over goes to the last but one, and on."""
    sizes = [num_layers // stages] * stages
    for index in range(2, num_layers % stages + 2):
        sizes[-index] += 1
    return sizes


def count_parameters(config: "PretrainedConfig", *, ranks: int, stages: int = 1) -> tuple[int, int]:
    """Count the parameters of the whole model, and those of one rank of the fullest stage.

    Matrices are cut over the ranks, those of keys and values over as many as there are heads; vectors, routers and the
    projections into a latent space are whole on every rank, as in vLLM. Its padding of the vocabulary is left out. The
    first of several stages has the embedding, the last one what comes after the layers, with a copy of an embedding
    that is tied to it.

    Raises:
        ModelError: transformers has no causal language model of this config.
        EngineOptionError: The attention heads do not divide over the ranks, or there are fewer layers than stages.
    """
    text = config.get_text_config(decoder=True)
    heads = int(getattr(text, "num_attention_heads", 0) or 0)
    if heads % ranks:
        raise EngineOptionError(f"{heads} attention heads do not divide over tensor_parallel_size={ranks}")
    shared_by = min(ranks, key_value_heads(text))
    model = _meta_model(config)
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    whole, in_layers, before, after = 0, dict[int, int](), 0, 0
    for name, parameter in model.named_parameters():
        module = name.split(".")[-2] if "." in name else name
        cut = shared_by if module in _KEYS_AND_VALUES else ranks
        if parameter.dim() < 2 or module in _WHOLE_ON_EVERY_RANK:
            cut = 1
        whole += parameter.numel()
        of_a_rank = -(-parameter.numel() // cut)
        if layer := _LAYER.search(name):
            in_layers[int(layer[1])] = in_layers.get(int(layer[1]), 0) + of_a_rank
        elif parameter is getattr(embedding, "weight", None):
            before += of_a_rank
        else:
            after += of_a_rank
    if stages == 1:
        return whole, before + sum(in_layers.values()) + after
    if len(in_layers) < stages:
        raise EngineOptionError(f"{len(in_layers)} layers are fewer than the stages of pipeline_parallel_size={stages}")
    if getattr(text, "tie_word_embeddings", False):
        after += before
    layers, of_stages = iter([in_layers[index] for index in sorted(in_layers)]), []
    for stage, size in enumerate(stage_sizes(len(in_layers), stages)):
        own = sum(next(layers) for _ in range(size))
        of_stages.append(own + before * (stage == 0) + after * (stage == stages - 1))
    return whole, max(of_stages)


def _meta_model(config: "PretrainedConfig") -> torch.nn.Module:
    """The architecture that the config names, or else the causal language model of its type."""
    import transformers

    named = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    known = next((architecture for architecture in named if architecture is not None), None)
    make = transformers.AutoModelForCausalLM.from_config if known is None else known
    try:
        with torch.device("meta"):
            return make(config)  # type: ignore[no-any-return]
    except ValueError as error:
        raise ModelError(
            f"transformers knows no causal language model of model_type={config.model_type!r}: {error}"
        ) from error
    except RuntimeError as error:
        raise ModelError(
            f"transformers cannot construct model_type={config.model_type!r} without memory, so its parameters are not "
            f"counted: {error}"
        ) from error
