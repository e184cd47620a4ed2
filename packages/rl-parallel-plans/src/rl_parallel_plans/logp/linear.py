"""Log-probabilities straight from hidden states and an lm_head: the logits of all rows never exist.

`linear_logp` makes the logits of `chunk_size` rows at a time, and again in backward, for which it saves only hidden,
weight, targets and O(N) statistics (logits of a megabyte or less are kept instead). Over a vocabulary cut on the tp
axis it does two collectives forward, and one backward for the gradient of hidden; a sequence-parallel hidden is
gathered once before, and that one collective is then a reduce-scatter.

It knows nothing of shifting: `targets[n]` is the token that row n predicts. The idea of fusing the linear layer with
the softmax is that of Cut Cross-Entropy (arXiv:2411.09009); here in plain torch, any device.
"""

from typing import Literal, overload

import torch
from torch import Tensor, nn

from rl_parallel_plans.logp.fused import logp_of
from rl_parallel_plans.logp.inputs import local_head, local_hidden, one_dtype, read_targets
from rl_parallel_plans.logp.kernels import Kernel, kernel_logp, require_kernel
from rl_parallel_plans.logp.options import Options


@overload
def linear_logp(
    hidden: Tensor,
    lm_head: nn.Module,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    entropy: Literal[False] = False,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int | None = -100,
    kernel: Kernel = "torch",
    tp_axis: str = "tp",
) -> Tensor: ...


@overload
def linear_logp(
    hidden: Tensor,
    lm_head: nn.Module,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    entropy: Literal[True],
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int | None = -100,
    kernel: Kernel = "torch",
    tp_axis: str = "tp",
) -> tuple[Tensor, Tensor]: ...


def linear_logp(
    hidden: Tensor,
    lm_head: nn.Module,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    entropy: bool = False,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int | None = -100,
    kernel: Kernel = "torch",
    tp_axis: str = "tp",
) -> Tensor | tuple[Tensor, Tensor]:
    """`log_softmax(cap(logit_scale * (hidden @ weight.T + bias)) / temperature)` at the targets, differentiable.

    hidden: [..., H], fp32, bf16 or fp16, the dtype of the weight. Plain or a DTensor Replicate: the same on every rank
        of the tp axis. A DTensor Shard of a leading dim, as sequence parallelism has it: gathered once, and its
        gradient is sharded again.
    lm_head: a linear layer, its weight [V, H] and bias [V] plain tensors, or DTensors on a mesh with the one axis
        `tp_axis`, Shard(0) (V need not divide evenly) or Replicate, both alike.
    targets: [...] token ids in [0, V), or [..., K] for K words in each row, on every rank those of the whole
        vocabulary and of all rows.
    chunk_size: rows whose logits exist at one time; memory is O(chunk_size * V / tp), independent of the number of
        rows. None: an eighth of them, at least 256, at most 1024 and at most 256 MiB of logits.
    entropy: also return the entropy of each row's distribution, in nats, differentiable.
    softcap: `cap(x) = softcap * tanh(x / softcap)`, the final_logit_softcapping of Gemma 2; None for none.
    ignore_index: a row with this target (all K of them) costs nothing: its logp and entropy are 0 and its gradient is
        0, as in `F.cross_entropy`. None: every target is a word, and nothing waits for the device to count rows.
    kernel: "torch"; "liger" and "verl" hand the whole to their CUDA kernels, which take temperature and entropy alone.

    Returns logp, shaped as targets, fp32 (fp64 for fp64 inputs), plain, the same on every rank; or (logp, entropy
    [...]). Raises ValueError for shapes, dtypes and targets that do not fit, PlanError for placements, layers and
    kernels that do not.
    """
    options = Options(
        temperature=temperature, chunk_size=chunk_size, entropy=entropy, softcap=softcap, logit_scale=logit_scale
    )
    head = local_head(lm_head, tp_axis=tp_axis)
    _check_shapes(hidden, lm_head, targets)
    asked = read_targets(targets, hidden.shape[:-1], total=head.where.total, ignore_index=ignore_index)
    require_kernel(kernel, head, hidden=hidden, words=asked.token_ids.shape[1], options=options)
    by_kernel = kernel != "torch" and len(asked.token_ids) > 0
    whole = local_hidden(hidden, head.where, tp_axis=tp_axis, summed=by_kernel and kernel == "liger")
    whole, head = one_dtype(whole.flatten(0, -2), head)
    if by_kernel:
        rows = whole if asked.rows is None else whole.index_select(0, asked.rows)
        logp, entropies = kernel_logp(kernel, rows, head, token_ids=asked.token_ids, options=options)
    else:
        logp, entropies, _ = logp_of(whole, head, asked.token_ids, rows=asked.rows, options=options)
    logp = asked.spread_words(logp)
    return (logp, asked.spread_rows(entropies)) if entropies is not None else logp


def _check_shapes(hidden: Tensor, lm_head: nn.Module, targets: Tensor) -> None:
    weight = lm_head.weight
    assert isinstance(weight, torch.Tensor)
    fitting = (
        hidden.ndim > 1
        and weight.ndim == 2
        and hidden.shape[-1] == weight.shape[1]
        and targets.shape[: hidden.ndim - 1] == hidden.shape[:-1]
        and targets.ndim <= hidden.ndim
    )
    if not fitting:
        raise ValueError(
            f"hidden is {list(hidden.shape)}, lm_head.weight {list(weight.shape)} and targets {list(targets.shape)}: "
            "they must be [..., H], [V, H] and [...], or [..., K] for K words in each row"
        )
