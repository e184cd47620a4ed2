"""How evenly a mixture's experts are used, from how often each was chosen."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["router_metrics"]


def router_metrics(counts: Mapping[str, Float[Tensor, " experts"]]) -> dict[str, float]:
    """What to report of a step.

    counts: by router, how often each expert was chosen, added up over all rows of the step.

    Returns "router_max_load", the busiest expert's share of its router's tokens over an even share, averaged over
    routers (1 is even, the number of experts over top_k the worst), "router_worst_load", the same of the worst router,
    and "router_idle_experts", the share of experts that got no token. Nothing is dropped: Hugging Face's mixtures
    compute whatever is routed.
    """
    loads = [count / count.mean().clamp(min=1) for count in counts.values()]
    busiest = torch.stack([load.max() for load in loads])
    idle = torch.cat([load == 0 for load in loads])
    return {
        "router_max_load": busiest.mean().item(),
        "router_worst_load": busiest.max().item(),
        "router_idle_experts": idle.float().mean().item(),
    }
