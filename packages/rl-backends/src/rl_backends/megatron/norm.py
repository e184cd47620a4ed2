"""RMS norm as Hugging Face's Llama and Qwen compute it, in the shape that megatron-core's ModuleSpec builds.

Under sequence parallelism each holds some of the tokens, and Megatron sums the gradients of weights that are marked
`sequence_parallel`.

    y = w · cast(x / sqrt(mean(x²) + eps)), with the mean, the root and the quotient in float32

The cast comes before the weight, as in Hugging Face; torch's own `rms_norm` casts after it, which differs by a rounding
in bfloat16. In float32 there is no cast, and torch's is the faster.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim (arXiv:1910.07467)."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        """A norm of `hidden_size` features, ones for weights.

        Args:
            config: Megatron's TransformerConfig; its `params_dtype` and `sequence_parallel` are read.
            hidden_size: features of a token, or of a head where queries and keys are normalised.
            eps: added to the mean square.
        """
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] to the same, in the dtype of `x` times that of the weight."""
        if x.dtype == self.weight.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        exact = x.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * exact.to(x.dtype)

    def extra_repr(self) -> str:
        """Features and eps."""
        return f"{self.weight.numel()}, eps={self.eps}"
