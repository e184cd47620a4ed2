"""The truth of a comparison: a small model, a few rows, and what plain transformers and AdamW make of them in float32.

One row at a time, without padding, whole logits, no ranks.

Axes: B rows, T tokens.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

__all__ = [
    "BETAS",
    "EPS",
    "LR",
    "MAX_GRAD_NORM",
    "STEPS",
    "WEIGHT_DECAY",
    "Plain",
    "SmallModel",
    "VerifyRows",
    "loss_of",
    "make_rows",
    "plain_result",
    "save_small_model",
]

STEPS, LR, WEIGHT_DECAY, MAX_GRAD_NORM, BETAS = 3, 1e-2, 0.01, 1.0, (0.9, 0.95)
EPS = 1e-4
"""Large, so that Adam does not blow the rounding of gradients near 0 up to whole steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallModel:
    """What was saved to be compared with."""

    described: str
    vocabulary: int
    """Words that rows may hold."""
    padding: int | None
    """The one that rows do not hold, since transformers never trains its embedding; None where there is none."""


@dataclass(frozen=True)
class VerifyRows:
    """Ragged rows, each with a weight in the loss."""

    rows_per_unit: ClassVar[int] = 1
    tokens: Int[Tensor, "B T"]
    lengths: Int[Tensor, " B"]
    trainable: Bool[Tensor, "B T"]
    weight: Float[Tensor, " B"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """What comes out."""

    logp: Float[Tensor, "B T"]
    gradients: dict[str, Tensor]
    """Of the first step."""
    grad_norm: float
    weights: dict[str, Tensor]
    """After the last."""


def save_small_model(
    source: str,
    folder: Path,
    *,
    tp: int,
    pp: int = 1,
    keep_heads: bool = False,
    shrink: bool,
    seed: int,
    revision: str | None,
    trust_remote_code: bool,
) -> SmallModel:
    """Write a model of the kind that `source` names, small, with random weights.

    tp: ranks that its heads can be shared out to.
    pp: stages that its layers can be shared out to.
    keep_heads: leave the size of a head as it is, on which kernels of attention depend.

    Raises:
        PlanError: `source` names no model, or one that cannot be made small.
    """
    from transformers.utils import logging

    from rl_parallel_plans.model_source import build, read_config

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = read_config(source, revision=revision, trust_remote_code=trust_remote_code)
    if shrink:
        head_dim = getattr(config, "head_dim", None)
        config = _shrunk(config, tp=max(2, tp), pp=pp)
        if keep_heads and head_dim is not None:
            config.head_dim = head_dim
    torch.manual_seed(seed)
    model: Any = build(config, device="cpu", dtype=torch.float32, trust_remote_code=trust_remote_code)
    with torch.no_grad():
        for parameter in model.parameters():  # norms of 1 and biases of 0 would be trivially right
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder)
    embeddings = model.get_input_embeddings()
    return SmallModel(
        described=f"{type(model).__name__} of {sum(p.numel() for p in model.parameters()):,} parameters",
        vocabulary=embeddings.weight.shape[0],
        padding=getattr(embeddings, "padding_idx", None),
    )


def _shrunk(config: Any, *, tp: int, pp: int) -> Any:
    from rl_parallel_plans.verification.shrink import shrunk

    small = shrunk(config, tp=tp)
    if pp > 1 and (left := small.num_hidden_layers % pp):
        return shrunk(config, tp=tp, extra_layers=pp - left)
    return small


def make_rows(
    *, rows: int, seed: int, vocabulary: int, padding: int | None = None, shortest: int = 5, longest: int = 13
) -> VerifyRows:
    """The same rows in every process, of `shortest` to `longest` tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (rows, longest), generator=generator)
    if padding is not None:
        tokens = torch.where(tokens == padding, (padding + 1) % vocabulary, tokens)
    lengths = torch.randint(shortest, longest + 1, (rows,), generator=generator)
    starts = torch.randint(1, 4, (rows,), generator=generator)
    place = torch.arange(longest)
    return VerifyRows(
        tokens=tokens,
        lengths=lengths,
        trainable=(place >= starts[:, None]) & (place < lengths[:, None]),
        weight=torch.randn(rows, generator=generator),
    )


def loss_of(logp: Float[Tensor, "b w"], rows: VerifyRows, *, num_tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Of a sign and a size for each row, over the tokens of the whole batch."""
    total = -(torch.where(rows.trainable, logp, 0.0) * rows.weight[:, None]).sum() / num_tokens
    return total, {"loss": total.detach()}


def plain_result(folder: Path, batch: VerifyRows) -> Plain:
    """Three steps without the backend."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)  # in eval mode
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=LR,
        betas=BETAS,
        eps=EPS,
    )
    with torch.no_grad():
        logp = _logp(model, batch)
    gradients: dict[str, Tensor] = {}
    norm = 0.0
    for step in range(STEPS):
        value, _ = loss_of(_logp(model, batch), batch, num_tokens=int(batch.trainable.sum()))
        torch.autograd.backward(value)
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            norm = float(torch.nn.utils.get_total_norm(list(gradients.values())))
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return Plain(logp=logp, gradients=gradients, grad_norm=norm, weights=weights)


def _logp(model: nn.Module, rows: VerifyRows) -> Tensor:
    out = torch.zeros(rows.tokens.shape)
    for row, length in enumerate(rows.lengths.tolist()):
        tokens = rows.tokens[row, :length]
        logits = model(input_ids=tokens[None]).logits[0, :-1].float()
        logp = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        asked = rows.trainable[row, 1:length]
        out = out.index_put((torch.tensor([row]), torch.arange(1, length)[asked]), logp[asked])
    return out
