"""Proof that Megatron computes what the Hugging Face model computes, not only that it holds the same weights.

A class of somebody's own, a hook or a changed buffer may make a model compute what its configuration does not tell.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rl_backends.errors import ModelError
from rl_backends.megatron.model import MegatronModel
from rl_backends.rank_agreement import largest_on_any_rank
from rl_backends.readers import Head, read_logp, value_reader

NUM_TOKENS = 48
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Nats. Rounding is far below; something that was missed is far above, unless all logits are near 0."""


@dataclass(frozen=True)
class _Rows:
    """A `TokenBatch`."""

    rows_per_unit: ClassVar[int] = 1
    tokens: Tensor
    lengths: Tensor
    trainable: Tensor


def require_own_code(model: nn.Module) -> None:
    """The model's class is one of transformers."""
    if not type(model).__module__.startswith("transformers."):
        raise ModelError(
            f"{type(model).__module__}.{type(model).__qualname__} is no class of transformers, and Megatron would "
            f"compute what transformers' own does: train it with policy.dtensor_cfg.enabled=true, which runs its code"
        )


def prove(model: MegatronModel, *, source: Any) -> None:
    """Compare log-probabilities of a row, or what a value head says of its tokens, with those of the model in memory.

    Every rank must call it.
    """
    bound = model.config.micro_batch_tokens or NUM_TOKENS  # of a row that fits into a microbatch
    length = min(NUM_TOKENS, model.architecture.max_positions, max(2, bound - bound % model.token_multiple))
    tokens = (torch.arange(length) * 7 + 3) % model.architecture.vocab_size
    rows = _Rows(tokens=tokens[None], lengths=torch.tensor([length]), trainable=torch.arange(length)[None] > 0)
    scores = model.architecture.num_labels > 0
    reader = value_reader(source) if scores else read_logp(Head.of(source), temperature=1.0)
    ours = model.read_all(rows, reader)[0][0, 1:]
    apart = largest_on_any_rank((ours - _plain(source, tokens, scores=scores)).abs().max().to(model.config.device))
    dtypes = {parameter.dtype for parameter in (*source.parameters(), *model.gpt.parameters())}
    if not apart <= max(TOLERANCE.get(dtype, 0.25) for dtype in dtypes):
        what = "values" if scores else "log-probabilities"
        raise ModelError(
            f"{type(source).__qualname__} gives {what} that differ by {apart:.3g} from those of the same weights on "
            f"Megatron: hooks, buffers or attributes of this model were changed; train it with "
            f"policy.dtensor_cfg.enabled=true, which runs its code"
        )


@torch.no_grad()
def _plain(source: Any, tokens: Tensor, *, scores: bool) -> Tensor:
    """Log-probabilities of all tokens but the first, or what the head says of the state before each, [n - 1]."""
    device, training = next(source.parameters()).device, source.training
    row = tokens[None].to(device)
    source.eval()
    try:
        if scores:
            hidden = source.base_model(input_ids=row, use_cache=False).last_hidden_state
            values: Tensor = source.score(hidden)[0, :-1, 0].float().cpu()
            return values
        logits = source(input_ids=row).logits[0, :-1].float().cpu()
    finally:
        source.train(training)
    logp: Tensor = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return logp
