"""Models on disk and what becomes of them, for the tests of conversions. Runs on ranks."""

import warnings

import torch
from torch.utils._pytree import tree_leaves

KINDS = {
    "Llama": {"num_hidden_layers": 4},
    "Qwen2": {"tie_word_embeddings": True, "layer_types": ["full_attention"] * 2},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
"""Untied; tied, with biases; experts. Their vocabulary of 67 is padded wherever two ranks share it."""


def save(world, folder, family="Llama", dtype=torch.float32, **overrides):
    """A tiny model's folder."""
    world.make_model(family, **{**KINDS[family], **overrides}).to(dtype).save_pretrained(folder)
    return folder


def convert(model, directory, *, progress=None):
    """As the command does."""
    from rl_backends.loading.source import open_model
    from rl_backends.megatron import conversion

    return conversion.convert(open_model(str(model)), directory=directory, progress=progress)


def held(model, fill, precision="float32", **sizes):
    """Every part that this rank holds, when `fill(model, skeleton's source)` has filled a model of these sizes."""
    from rl_backends.loading.source import open_model
    from rl_backends.megatron.config import MegatronConfig
    from rl_backends.megatron.model import MegatronModel

    source = open_model(str(model))
    skeleton = source.skeleton()
    config = MegatronConfig(precision=precision, **sizes)
    made = MegatronModel(skeleton, config, fill=lambda each: fill(each, source, skeleton), trainable=False)
    parts = {f"{part.name}|{box.offsets}": box.of_local(part.local).clone() for part in made.held for box in part.parts}
    made.close()
    return parts


def from_files(made, source, skeleton):
    """Without a conversion."""
    from rl_backends.megatron.weights import from_files

    from_files(source, skeleton, made)


def from_conversion(conversion):
    """By way of one, which megatron-core reads, as Megatron-LM does."""

    def fill(made, source, skeleton):
        with torch.no_grad():
            for parameter in made.gpt.parameters():
                parameter.fill_(torch.nan)  # nothing may stay as it was
        load_weights(conversion.folder / "release", made.chunks)

    return fill


def load_weights(folder, chunks):
    """Fill a model of any layout in place, cast to its dtype; rows that pad a vocabulary become 0."""
    from megatron.core.dist_checkpointing import load
    from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, apply_factories
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
    from megatron.core.dist_checkpointing.validation import StrictHandling

    class Reading(TorchDistLoadShardedStrategy):
        """Megatron's own stops at `TensorProperties.strides`, new in torch 2.15."""

        def load_tensors_metadata(self, checkpoint_dir, metadata=None):
            for stored in metadata.state_dict_metadata.values() if metadata else ():
                if properties := getattr(stored, "properties", None):
                    vars(properties).pop("strides", None)
            return super().load_tensors_metadata(checkpoint_dir, metadata)

    named = {
        f"{number}.{name}": value
        for number, chunk in enumerate(chunks)
        for name, value in chunk.sharded_state_dict().items()
    }
    sharded, _ = extract_matching_values(named, lambda value: isinstance(value, ShardedTensor | ShardedTensorFactory))
    apply_factories(sharded)  # here and not by `load`, which would join what they cut in memory of its own
    parts = {str(number): part for number, part in enumerate(tree_leaves(sharded))}  # also of the lists that those made
    targets = {name: part.data.detach() for name, part in parts.items()}
    with warnings.catch_warnings():  # what torch says of how megatron-core 0.16.1 loads
        warnings.simplefilter("ignore", FutureWarning)
        loaded = load(parts, str(folder), Reading(), strict=StrictHandling.RAISE_ALL)
    with torch.no_grad():
        for name, target in targets.items():
            if loaded[name].data_ptr() != target.data_ptr():
                target.copy_(loaded[name].view(target.shape))


def only(directory):
    """The one conversion that lies there, and nothing hidden beside it."""
    found = list(directory.iterdir())
    assert len(found) == 1, found
    return found[0]
