"""Which of Megatron's parameters train: those of the Hugging Face model that require a gradient."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rl_backends.errors import ModelError
from rl_backends.loading.weights import first_names
from rl_backends.megatron.config import MegatronConfig
from rl_backends.megatron.mapping import HeldTensor

__all__ = ["freeze", "require_trainable"]


def freeze(gpt: nn.Module, held: Sequence[HeldTensor], skeleton: nn.Module | None, *, config: MegatronConfig) -> None:
    """Make parameters require a gradient as those of `skeleton` do; none of them where it is None.

    Raises:
        ModelError: tensors that Megatron has fused into one parameter are frozen in part.
    """
    if skeleton is None:
        gpt.requires_grad_(requires_grad=False)
        return
    first = first_names(skeleton)
    trains = {first[name]: each.requires_grad for name, each in skeleton.named_parameters(remove_duplicate=False)}
    parts: dict[str, list[HeldTensor]] = {}
    for each in held:
        parts.setdefault(each.megatron_name, []).append(each)
    for megatron_name, several in parts.items():
        flags = {trains[each.name] for each in several}
        if len(flags) > 1:
            frozen = ", ".join(each.name for each in several if not trains[each.name])
            raise ModelError(
                f"{frozen} is frozen, and Megatron holds it in {megatron_name} together with what is not: freeze all "
                f"of {', '.join(each.name for each in several)}, or none"
            )
        several[0].parameter.requires_grad = flags.pop()
    embedding = parts.get("embedding.word_embeddings.weight")
    if config.recompute_granularity == "full" and embedding and not embedding[0].parameter.requires_grad:
        # A layer is computed again only where its input requires a gradient, which that of a frozen embedding does not.
        gpt.get_submodule("embedding").register_forward_hook(_require_grad)


def _require_grad(_module: nn.Module, _arguments: object, embedded: Tensor) -> Tensor:
    return embedded.requires_grad_() if torch.is_grad_enabled() else embedded


def require_trainable(gpt: nn.Module) -> None:
    """Something on this pipeline stage trains.

    Raises:
        ModelError: nothing does.
    """
    if not any(parameter.requires_grad for parameter in gpt.parameters()):
        raise ModelError(
            "no parameter of this pipeline stage requires a gradient, so there is nothing to optimize, and nothing "
            "to send back to the stage before it: unfreeze some, or choose other stages"
        )
