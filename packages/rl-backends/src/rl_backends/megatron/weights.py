"""Where the weights of a Megatron model come from: a Hugging Face model in memory, its files, or another of Megatron."""

import torch
from torch import nn

from rl_backends.loading import ModelSource
from rl_backends.loading.shards_by_name import first_names
from rl_backends.megatron.mapping import HeldTensor
from rl_backends.megatron.model import Fill, MegatronModel

__all__ = ["from_files", "from_hugging_face", "from_megatron"]


def from_hugging_face(source: nn.Module) -> Fill:
    """This rank's parts of the weights of a model in memory."""

    @torch.no_grad()
    def fill(model: MegatronModel) -> None:
        names = first_names(source)
        tensors = {names[name]: tensor for name, tensor in source.state_dict().items() if names[name] == name}
        _zero_padding(model)
        for held in model.held:
            for box in held.parts:
                box.of_local(held.local).copy_(box.of_whole(tensors[held.name]))

    return fill


def from_files(source: ModelSource, skeleton: nn.Module) -> Fill:
    """This rank's parts, read from the safetensors files one by one."""

    def fill(model: MegatronModel) -> None:
        shards: dict[str, list[HeldTensor]] = {}
        for held in model.held:
            shards.setdefault(held.name, []).append(held)
        _zero_padding(model)
        source.load_shards(shards, skeleton)

    return fill


def from_megatron(policy: MegatronModel) -> Fill:
    """A copy of the weights of a model that is laid out alike."""

    @torch.no_grad()
    def fill(model: MegatronModel) -> None:
        for mine, theirs in zip(model.gpt.parameters(), policy.gpt.parameters(), strict=True):
            mine.copy_(theirs)

    return fill


@torch.no_grad()
def _zero_padding(model: MegatronModel) -> None:
    """Rows that pad the vocabulary to a multiple of the ranks are nobody's, and nothing may be read there."""
    for name, parameter in model.gpt.named_parameters():
        if name in {"embedding.word_embeddings.weight", "output_layer.weight"}:
            parameter.zero_()
