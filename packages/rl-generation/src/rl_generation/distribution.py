"""From logits to a token and its log-probability. Does not know models, rows that belong together, or randomness.

    z    = logits / temperature                         then -inf outside top-k, then outside top-p
    w    = exp(z - max z)        c = cumsum(w)          c in float64, w itself in float32
    token = min {v : c[v] > u c[V]}                     u uniform in [0, 1): the inverse of the CDF
    logp  = z[token] - max z - log c[V]

One uniform number a token, handed in, makes a draw a pure function: a row draws the same token whatever its batch
holds. `c[v] > u c[V] >= c[v - 1]` means that the token drawn has `w > 0`, so nothing outside the support is ever drawn.

Axes: N rows, V vocabulary. References: top-p, Holtzman et al. (arXiv:1904.09751); top-k, Fan et al. (arXiv:1805.04833).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rl_generation.sampling import Sampling

__all__ = ["choose", "draw", "exact_dtype", "sampled_logits", "take_best"]


def choose(
    logits: Float[Tensor, "N V"], uniforms: Float[Tensor, " N"] | None, sampling: Sampling
) -> tuple[Int[Tensor, " N"], Float[Tensor, " N"]]:
    """Choose each row's next token: greedy where `uniforms` is None, else drawn as `sampling` says."""
    if uniforms is None:
        return take_best(logits)
    return draw(sampled_logits(logits, sampling), uniforms)


def sampled_logits(logits: Float[Tensor, "N V"], sampling: Sampling) -> Float[Tensor, "N V"]:
    """Return float32 logits whose softmax is the distribution that `sampling` draws from; -inf outside its support.

    Ties with the last token that a cut admits are admitted too: the support does not depend on an order of equals.
    """
    scaled = logits.float()
    if sampling.temperature != 1.0:
        scaled = scaled / sampling.temperature
    if 0 < sampling.top_k < scaled.shape[-1]:
        last_admitted = scaled.topk(sampling.top_k).values[:, -1:]
        scaled = scaled.masked_fill(scaled < last_admitted, -torch.inf)
    if sampling.top_p < 1.0:
        scaled = _cut_to_nucleus(scaled, sampling.top_p)
    return scaled


def draw(logits: Float[Tensor, "N V"], uniforms: Float[Tensor, " N"]) -> tuple[Int[Tensor, " N"], Float[Tensor, " N"]]:
    """Draw one token a row from softmax(logits) by its uniform number in [0, 1); return it and its logp.

    Cumulates in the dtype of `uniforms`. A NaN or +inf among the logits, or only -inf, gives a NaN logp.
    """
    peak = logits.amax(-1, keepdim=True)
    cumulative = (logits - peak).exp_().cumsum(-1, dtype=uniforms.dtype)
    total = cumulative[:, -1:]
    # The clamp is for rows of NaN alone: u < 1 in the same dtype puts u * total below total.
    tokens = torch.searchsorted(cumulative, uniforms[:, None] * total, right=True).clamp_(max=logits.shape[-1] - 1)
    logp = (logits.gather(1, tokens) - peak).to(uniforms.dtype) - total.log()
    return tokens[:, 0], logp[:, 0]


def take_best(logits: Float[Tensor, "N V"]) -> tuple[Int[Tensor, " N"], Float[Tensor, " N"]]:
    """Take each row's likeliest token, the lowest id among equals, and its logp at temperature 1."""
    raw = logits.float()
    best = raw.max(-1)
    return best.indices, best.values - raw.logsumexp(-1)


def exact_dtype(device: torch.device) -> torch.dtype:
    """Return the widest float that `device` computes with, in which to cumulate probabilities.

    float32 sums round away tokens rarer than 6e-8; Apple's mps has nothing wider.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def _cut_to_nucleus(logits: Float[Tensor, "N V"], top_p: float) -> Float[Tensor, "N V"]:
    descending = logits.sort(dim=-1, descending=True).values
    probabilities = descending.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    last_admitted = descending.masked_fill(before >= top_p, torch.inf).amin(-1, keepdim=True)
    return logits.masked_fill(logits < last_admitted, -torch.inf)
