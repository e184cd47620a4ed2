"""Models on disk and what becomes of them, for the tests of conversions. Runs on ranks."""

import torch

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
    from rl_backends.loading import open_model
    from rl_backends.megatron import conversion

    return conversion.convert(open_model(str(model)), directory=directory, progress=progress)


def held(model, fill, precision="float32", **sizes):
    """Every part that this rank holds, when `fill(model, skeleton's source)` has filled a model of these sizes."""
    from rl_backends.loading import open_model
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

    from_files(source, skeleton)(made)


def from_conversion(conversion):
    """By way of one."""
    from rl_backends.megatron.conversion import load_weights

    def fill(made, source, skeleton):
        with torch.no_grad():
            for parameter in made.gpt.parameters():
                parameter.fill_(torch.nan)  # nothing may stay as it was
        load_weights(conversion, made.chunks)

    return fill


def only(directory):
    """The one conversion that lies there, and nothing hidden beside it."""
    found = list(directory.iterdir())
    assert len(found) == 1, found
    return found[0]
