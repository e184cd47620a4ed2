"""Random weights for a sharded model, the same whole weights on every mesh.

Each parameter is drawn by the rules of its own class (`_init_weights` of transformers, with its standard deviations,
zeros and ones), whole, on the CPU, in float32, by a generator that its name and the seed set; then this rank keeps its
part. So one parameter at a time lies whole in memory, and nothing is sent.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from rl_backends.errors import ModelError
from rl_backends.loading.shards_by_name import shards_by_name, write_whole
from rl_backends.loading.skeleton import twin_of

__all__ = ["initial_value", "initialise"]


def initialise(model: nn.Module, *, seed: int) -> None:
    """Draw every parameter of a (sharded) model anew; one that is tied once, and adapters not at all.

    Raises:
        ModelError: it is no model of transformers, its parameters lie on the meta device, or one has no rule.
    """
    skeleton = twin_of(model)
    for name, shards in shards_by_name(model, skeleton).items():
        write_whole(initial_value(skeleton, name, seed=seed), shards)


@torch.no_grad()
def initial_value(skeleton: nn.Module, name: str, *, seed: int) -> Tensor:
    """The whole tensor `name` in float32 on the CPU, as a new model has it; a buffer as the model was made with it.

    skeleton: the unsharded model on the meta device; it is left as it was.

    Raises:
        ModelError: no rule gives it numbers.
    """
    path, _, leaf = name.rpartition(".")
    owner = skeleton.get_submodule(path)
    meta = owner._parameters.get(leaf)  # noqa: SLF001 - its place, whatever the class does to attributes
    if meta is None:
        return _require_numbers(owner.get_buffer(leaf), name)
    value = torch.full(meta.shape, torch.nan)
    owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)  # noqa: SLF001
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(_seed_of(name, seed))  # torch.manual_seed would reseed GPUs too
            _apply_rules(skeleton, path)
    finally:
        owner._parameters[leaf] = meta  # noqa: SLF001
    return _require_numbers(value, name)


def _apply_rules(skeleton: nn.Module, path: str) -> None:
    """What torch, then transformers does to a new module, and then to those that it is part of.

    Everything but one parameter lies on the meta device, where the same rules do nothing.
    """
    reset: Any = getattr(skeleton.get_submodule(path), "reset_parameters", None)
    if reset is not None:
        reset()
    chain = [path]
    while chain[-1]:
        chain.append(chain[-1].rpartition(".")[0])
    modules = [skeleton.get_submodule(each) for each in chain]
    for at, module in enumerate(modules):
        # In a model that is made of models, each has the rules for its own part.
        ruler: Any = next((each for each in modules[at:] if hasattr(each, "_init_weights")), skeleton)
        ruler._init_weights(module)  # noqa: SLF001 - the method that transformers asks every model to have


def _seed_of(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") >> 1


def _require_numbers(value: Tensor, name: str) -> Tensor:
    if value.is_meta or (value.is_floating_point() and bool(value.isnan().any())):
        raise ModelError(f"{name} has no rule by which a new model gets it; start from pretrained weights")
    return value
