"""Proof that the head is read as the model itself reads it: log-probabilities of a few tokens, both ways.

An architecture may do to its logits what no field of its configuration tells. One forward of a few tokens with the
model's own logits finds out, before anything is trained on numbers that are wrong.
"""

from typing import Any

import torch
from torch import Tensor

from rl_backends.batching.microbatches import ModelInputs, make_inputs
from rl_backends.dtensor.sharded_model import ShardedModel
from rl_backends.errors import ModelError
from rl_backends.rank_agreement import largest_on_any_rank, told_by_last_rank
from rl_backends.readers import Head, read_logp
from rl_parallel_plans import get_logprobs_from_vocab_parallel_logits, to_local_if_dtensor
from rl_parallel_plans.dtensor import has_numbers

__all__ = ["check_head"]

NUM_TOKENS = 8
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}
"""Nats. Rounding is far below; a scale that was missed is far above, unless all logits are near 0."""


@torch.no_grad()
def check_head(sharded: ShardedModel, head: Head) -> None:
    """Compare on every rank; all must call it. Weights without numbers, as in a dry run, have nothing to compare.

    Raises:
        ModelError: on every rank; the model's own logits give other log-probabilities on one of them.
    """
    if not all(has_numbers(to_local_if_dtensor(parameter)) for parameter in sharded.model.parameters()):
        return
    shard, limits = sharded.sequence_shard, sharded.row_dealing.limits
    length = NUM_TOKENS if shard is None else shard.padded(NUM_TOKENS)
    inputs = make_inputs(
        ((torch.arange(length) * 7 + 3) % sharded.vocabulary_size)[None],
        torch.tensor([length]),
        torch.ones(1, length, dtype=torch.bool),
        layout=limits.layout,
        offset=0,  # at each token of this rank's own: how likely that token was to follow itself
        shard=shard,
    ).to(sharded.config.device)
    ours = sharded.read(inputs, read_logp(head, temperature=1.0), shape=(1, inputs.longest))[0][0, inputs.into]
    theirs = _from_logits(sharded, inputs)
    sharded.reshard()
    apart = largest_on_any_rank((ours - theirs).abs().max())
    if apart > TOLERANCE[sharded.config.precision]:
        raise ModelError(
            f"{type(sharded.model).__qualname__} gives log-probabilities from its own logits that differ by "
            f"{apart:.3g} nats from lm_head(hidden states) with logit_scale={head.logit_scale} and "
            f"softcap={head.softcap}: it does something to its logits that this backend does not know; use another "
            f"architecture, or report this one"
        )


def _from_logits(sharded: ShardedModel, inputs: ModelInputs) -> Tensor:
    def logp(model: Any, each: ModelInputs) -> Tensor:
        logits = model(**each.as_arguments(), use_cache=False).logits
        return get_logprobs_from_vocab_parallel_logits(logits, each.targets[None])[0]

    if sharded.pipeline is None:
        return logp(sharded.model, inputs)
    kept: list[Tensor] = []

    def use(number: int, model: Any, each: ModelInputs) -> Tensor:
        found = logp(model, each)
        if number == 0:
            kept.append(found)
        return found.sum()

    sharded.run_pipeline([inputs], use, backward=False)
    return told_by_last_rank(kept, sharded.pipeline.group, device=sharded.pipeline.device)[0]
