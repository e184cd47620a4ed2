"""The sampling distribution: processed logits, counter-based uniforms, the drawn token and its log-probability.

    z    = logits / temperature                         then -inf outside min-p, then top-k, then top-p
    w    = exp(z - max z)        c = cumsum(w)          c in float64, w itself in float32
    token = min {v : c[v] > u c[V]}                     u uniform in [0, 1): the inverse of the CDF
    logp  = z[token] - max z - log c[V]

One uniform number a token, handed in, makes a draw a pure function: a row draws the same token whatever its batch
holds. `c[v] > u c[V] >= c[v - 1]` means that the token drawn has `w > 0`, so nothing outside the support is ever drawn.

Axes: N rows, V vocabulary. References: top-p, Holtzman et al. (arXiv:1904.09751); top-k, Fan et al. (arXiv:1805.04833);
min-p, Nguyen et al. (arXiv:2407.01082); the order of the cuts, vLLM's sampler (github.com/vllm-project/vllm).

    u = top 53 bits of mix(mix(seed) + (step + 1) γ) / 2^53        γ = 0x9E3779B97F4A7C15, mix = splitmix64's finaliser

A counter-based generator has no state to carry: a row draws the same number whatever its batch holds, wherever its rows
moved to, and on every device, for two integer multiplications a number.
Reference: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from rl_generation.requests import Sampling


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """What each of N rows samples with. None stands for a setting that is off in every row, and costs nothing."""

    greedy: Bool[Tensor, " N"] | None
    temperature: Float[Tensor, "N 1"] | None
    min_p: Float[Tensor, "N 1"] | None
    top_k: Int[Tensor, "N 1"] | None
    top_p: Float[Tensor, "N 1"] | None
    all_greedy: bool

    @classmethod
    def of(cls, samplings: Sequence[Sampling], *, vocab_size: int, device: torch.device) -> "SamplingTensors":
        """Lay out the settings of N requests; those of greedy ones are off."""
        greedy = [sampling.greedy for sampling in samplings]
        drawn = [sampling for sampling in samplings if not sampling.greedy]

        def column(name: str, off: float, dtype: torch.dtype) -> Tensor | None:
            if all(getattr(sampling, name) == off for sampling in drawn):
                return None
            values = [off if sampling.greedy else getattr(sampling, name) for sampling in samplings]
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        top_k = column("top_k", 0.0, torch.int64)
        return cls(
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            temperature=column("temperature", 1.0, torch.float32),
            min_p=column("min_p", 0.0, torch.float32),
            top_k=None if top_k is None else torch.where(top_k == 0, vocab_size, top_k.clamp(max=vocab_size)),
            top_p=column("top_p", 1.0, torch.float32),
            all_greedy=all(greedy),
        )


def choose(
    logits: Float[Tensor, "N V"], uniforms: Float[Tensor, " N"], sampling: SamplingTensors
) -> tuple[Int[Tensor, " N"], Float[Tensor, " N"]]:
    """Choose each row's next token, and its logp under the distribution drawn from (of greedy rows: the softmax)."""
    if sampling.all_greedy:
        return take_best(logits)
    tokens, logp = draw(sampled_logits(logits, sampling), uniforms)
    if sampling.greedy is not None:
        best, best_logp = take_best(logits)
        tokens = torch.where(sampling.greedy, best, tokens)
        logp = torch.where(sampling.greedy, best_logp.to(logp.dtype), logp)
    return tokens, logp


def sampled_logits(logits: Float[Tensor, "N V"], sampling: SamplingTensors) -> Float[Tensor, "N V"]:
    """Return float32 logits whose softmax is the distribution that each row draws from; -inf outside its support.

    Ties with the last token that a cut admits are admitted too: the support does not depend on an order of equals.
    """
    scaled = logits.float()
    if sampling.temperature is not None:
        scaled = scaled / sampling.temperature
    if sampling.min_p is not None:
        scaled = scaled.masked_fill(scaled < scaled.amax(-1, keepdim=True) + sampling.min_p.log(), -torch.inf)
    if sampling.top_k is not None:
        scaled = _cut_some(scaled, _cut_to_top_k, setting=sampling.top_k, off=scaled.shape[1])
    if sampling.top_p is not None:
        scaled = _cut_some(scaled, _cut_to_nucleus, setting=sampling.top_p, off=1)
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
    tokens = logits.argmax(-1)
    return tokens, raw_logp(logits, tokens)


def raw_logp(logits: Float[Tensor, "N V"], tokens: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Return the log-softmax of `logits` at `tokens`."""
    raw = logits.float()
    return raw.gather(1, tokens[:, None])[:, 0] - raw.logsumexp(-1)


def _cut_some(
    logits: Float[Tensor, "N V"], cut: Callable[[Tensor, Tensor], Tensor], *, setting: Shaped[Tensor, "N 1"], off: int
) -> Float[Tensor, "N V"]:
    """Cut the rows whose setting is below `off`; the others, which may be many, are not sorted."""
    below = setting[:, 0] < off
    if below.all():
        return cut(logits, setting)
    rows = below.nonzero()[:, 0]
    return logits.index_copy(0, rows, cut(logits[rows], setting[rows])) if len(rows) else logits


def _cut_to_top_k(logits: Float[Tensor, "N V"], top_k: Int[Tensor, "N 1"]) -> Float[Tensor, "N V"]:
    # A whole sort where rows differ much in their k is no dearer than the largest of them.
    largest = logits.topk(int(top_k.max())).values
    return logits.masked_fill(logits < largest.gather(1, top_k - 1), -torch.inf)


def _cut_to_nucleus(logits: Float[Tensor, "N V"], top_p: Float[Tensor, "N 1"]) -> Float[Tensor, "N V"]:
    descending = logits.sort(dim=-1, descending=True).values
    probabilities = descending.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    last_admitted = descending.masked_fill(before >= top_p, torch.inf).amin(-1, keepdim=True)
    return logits.masked_fill(logits < last_admitted, -torch.inf)


def _signed(bits: int) -> int:
    """The int64 of the same 64 bits."""
    return bits - (1 << 64) if bits >= 1 << 63 else bits


GAMMA = _signed(0x9E3779B97F4A7C15)
MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def uniforms(seeds: Int[Tensor, "*shape"], steps: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return a number in [0, 1) for each pair of a seed and a step, in `exact_dtype`. `steps` counts from 0."""
    bits = seeds
    for offset in (0, (steps + 1) * GAMMA):
        bits = bits + offset
        # splitmix64's finaliser. `>>` of int64 copies the sign, hence the masks: no bit comes in from the left.
        bits = (bits ^ (bits >> 30 & (1 << 34) - 1)) * MULTIPLIERS[0]
        bits = (bits ^ (bits >> 27 & (1 << 37) - 1)) * MULTIPLIERS[1]
        bits ^= bits >> 31 & (1 << 33) - 1
    dtype = exact_dtype(seeds.device)
    # As many bits as the mantissa holds: one more could round up to 1.
    kept = 53 if dtype == torch.float64 else 24
    return (bits >> 64 - kept & (1 << kept) - 1).to(dtype) * 2.0**-kept


def exact_dtype(device: torch.device) -> torch.dtype:
    """Return the widest float that `device` computes with, in which to cumulate probabilities.

    float32 sums round away tokens rarer than 6e-8; Apple's mps has nothing wider.
    """
    return torch.float32 if device.type == "mps" else torch.float64
