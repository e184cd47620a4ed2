"""Where the weights of a Megatron model come from: a Hugging Face model in memory, its files, another Megatron one."""

import torch
from torch import nn

from rl_backends.loading import ModelSource
from rl_backends.loading.skeleton import initial_value
from rl_backends.loading.weights import first_names, write_whole
from rl_backends.lora.layers import base_name
from rl_backends.megatron.lora import is_adapter
from rl_backends.megatron.mapping import HeldTensor
from rl_backends.megatron.model import Fill, MegatronModel


def from_hugging_face(source: nn.Module) -> Fill:
    """This rank's parts of the weights of a model in memory."""

    def copy(model: MegatronModel) -> None:
        names, tensors = first_names(source), source.state_dict()
        whole = {names[name]: tensor for name, tensor in tensors.items() if names[name] == name}
        for held in model.held:
            write_whole(whole[held.name], [held])

    return copy


def from_files(source: ModelSource, skeleton: nn.Module, *, new_head: bool = False, seed: int = 0) -> Fill:
    """This rank's parts, read from the safetensors files of `source` one by one; `skeleton` is its.

    With `new_head` the head is drawn from `seed` where the files have none, as for a reward model from a language
    model; adapters always are.
    """

    def read(model: MegatronModel) -> None:
        source.load_shards(_by_name(model), skeleton, new_head=new_head, seed=seed)
        if model.adapters is not None:
            model.adapters.initialise(seed=seed)

    return read


def at_random(skeleton: nn.Module, *, seed: int) -> Fill:
    """This rank's parts of the weights that transformers would begin with; the same weights in every layout."""

    def draw(model: MegatronModel) -> None:
        for name, held in _by_name(model).items():
            write_whole(initial_value(skeleton, name, seed=seed), held)
        if model.adapters is not None:
            model.adapters.initialise(seed=seed)

    return draw


def from_megatron(policy: MegatronModel) -> Fill:
    """A copy of the weights of a model that is laid out alike."""

    @torch.no_grad()
    def copy(model: MegatronModel) -> None:
        for mine, theirs in zip(model.gpt.parameters(), policy.gpt.parameters(), strict=True):
            mine.copy_(theirs)

    return copy


def _by_name(model: MegatronModel) -> dict[str, list[HeldTensor]]:
    """By the names of the model without adapters, which are left out."""
    shards: dict[str, list[HeldTensor]] = {}
    for held in model.held:
        if not is_adapter(held.name):
            shards.setdefault(base_name(held.name), []).append(held)
    return shards
