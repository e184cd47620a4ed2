"""An embedding whose words are shared out: each rank looks up its own, and the sum over ranks has them all.

torch's row-wise embedding (2.13) makes the gradient of all words on every rank; here it is cut as the weight is. A
padding word is one on the rank that holds it and on no other.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from rl_parallel_plans.dtensor import has_numbers, is_dtensor
from rl_parallel_plans.logp.chunks import VocabularySlice
from rl_parallel_plans.styles.local_parameters import LocalParameters, ParameterRule
from rl_parallel_plans.styles.sharded_forward import wrap_forward
from rl_parallel_plans.styles.sums import sum_over_ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class VocabularyParallelEmbedding(LocalParameters):
    """An nn.Embedding with its rows shared out; any number of words."""

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """The rows of this rank."""
        del module
        return {"weight": ParameterRule(placement=Shard(0))}

    def collectives(self) -> tuple[dict[str, int], dict[str, int]]:
        """One all-reduce forward."""
        return {"all_reduce": 1}, {}

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        super()._apply(module, device_mesh)
        weight = module.get_parameter("weight")
        assert is_dtensor(weight)
        total, local = weight.shape[0], weight.to_local().shape[0]
        start = min(total, device_mesh.get_local_rank() * -(-total // device_mesh.size()))
        where = VocabularySlice(start=start, size=local, total=total, group=None)
        padding = getattr(module, "padding_idx", None)
        if padding is not None:
            module.padding_idx = padding - start if start <= padding < start + local else None  # type: ignore[assignment]
        wrap_forward(module, partial(_own_tokens, where=where, mesh=device_mesh))
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _own_tokens(
    _module: nn.Module,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    where: VocabularySlice,
    mesh: "DeviceMesh",
) -> Tensor:
    tokens, *others = args
    inside = ((tokens >= 0) & (tokens < where.total)).all()
    if tokens.device.type == "cuda":
        torch._assert_async(inside)  # noqa: SLF001 - no public one; without waiting for the device
    elif has_numbers(tokens) and not inside:
        raise IndexError(f"token ids must lie in 0 to {where.total - 1}, as an embedding's must on one rank")
    index, mine = where.owned(tokens)
    output = call(index, *others, **kwargs)
    return sum_over_ranks(output * mine[..., None].to(output.dtype), mesh)
