"""Decodes one batch with a key/value cache. Does not know versions, admission, or where randomness comes from.

Prompts are padded on the left, with explicit positions. Rows with the same prompt share its prefill: each distinct
prompt runs once and its cache is copied to its rows. Finished rows leave the cache once a quarter of it is theirs, so
that a long tail is paid for by the rows in it alone.

Axes: B rows of the batch, N rows in the cache, L padded prompt length, S tokens fed at once, T tokens generated,
V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_generation.distribution import choose, exact_dtype
from rl_generation.prompts import Prompt, left_pad
from rl_generation.sampling import Sampling

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

__all__ = ["Completions", "Decoder"]

# To drop rows is to copy the cache of the others, as much as a step reads: it must save a good share of later steps.
DROP_AT_FRACTION = 0.25


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """What a batch generated; row b answers prompt b."""

    tokens: Int[Tensor, "B T"]
    """Meaningless from `lengths` on."""

    logp: Float[Tensor, "B T"]
    """Meaningless from `lengths` on; may be NaN or infinite before: the caller judges."""

    lengths: Int[Tensor, " B"]
    """Tokens of each answer, its stop token included."""

    stopped: Bool[Tensor, " B"]
    """Whether a stop token ended the answer."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A model and how to run it. Holds nothing made from weights, which may change between two calls."""

    model: "PreTrainedModel"

    pad_token_id: int
    """Fills the left of shorter prompts; masked, so which one it is does not matter."""

    logits_to_keep: bool
    """Whether the model can be asked for the last position's logits alone."""

    drop_finished: bool
    """False never selects rows of the cache: each row is prefilled by itself and stays to the end."""

    # Not inference_mode: some rotary embeddings replace their buffers inside forward, and an inference tensor left
    # there would refuse the in-place copy of the next refit.
    @torch.no_grad()
    def decode(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        uniforms: Float[Tensor, "B max_new_tokens"] | None,
        stop_token_ids: Int[Tensor, " stops"],
    ) -> Completions:
        """Generate an answer to each of `prompts`; `uniforms` holds one number in [0, 1) a token, None for greedy."""
        active = self._start(prompts, room=sampling.max_new_tokens)
        shape, device = (len(prompts), sampling.max_new_tokens), active.rows.device
        tokens_BT = torch.full(shape, self.pad_token_id, device=device)
        logp_BT = torch.zeros(shape, device=device, dtype=exact_dtype(device))
        for step in range(sampling.max_new_tokens):
            chances = None if uniforms is None else uniforms[active.rows, step]
            tokens, logp = choose(active.logits, chances, sampling)
            tokens_BT[active.rows, step] = tokens
            logp_BT[active.rows, step] = logp.to(logp_BT.dtype)
            # A row whose logits broke has nothing more to say; the caller finds its logp.
            active.finished |= _is_stop(tokens, stop_token_ids) | ~logp.isfinite()
            num_finished = int(active.finished.sum())
            if num_finished == len(tokens) or step + 1 == sampling.max_new_tokens:
                break
            if self.drop_finished and num_finished >= DROP_AT_FRACTION * len(tokens):
                unfinished = (~active.finished).nonzero()[:, 0]
                active.select(unfinished)
                tokens = tokens[unfinished]
            active.seen += 1
            active.positions += 1
            active.logits = self._forward(active, tokens[:, None], active.positions)
        return _measure(tokens_BT[:, : step + 1], logp_BT[:, : step + 1], stop_token_ids)

    def _start(self, prompts: Sequence[Prompt], *, room: int) -> "_Active":
        """Run the prompts, each distinct one once, and leave one row for each of `prompts`."""
        from transformers import DynamicCache

        distinct = list(dict.fromkeys(prompts)) if self.drop_finished else list(prompts)
        tokens, mask = left_pad(distinct, pad_token_id=self.pad_token_id, device=self.model.device)
        positions = (mask.cumsum(1) - 1).clamp_(min=0)
        active = _Active(
            cache=DynamicCache(config=self.model.config),
            rows=torch.arange(len(distinct), device=mask.device),
            positions=positions[:, -1:].clone(),
            mask=torch.cat([mask, mask.new_ones(len(distinct), room)], dim=1),
            seen=tokens.shape[1],
            finished=torch.zeros(len(distinct), dtype=torch.bool, device=mask.device),
        )
        active.logits = self._forward(active, tokens, positions)
        if len(distinct) < len(prompts):
            place = {prompt: index for index, prompt in enumerate(distinct)}
            active.select(torch.tensor([place[prompt] for prompt in prompts], device=mask.device))
            active.logits = active.logits[active.rows]
            active.rows = torch.arange(len(prompts), device=mask.device)
        return active

    def _forward(
        self, active: "_Active", tokens: Int[Tensor, "N S"], positions: Int[Tensor, "N S"]
    ) -> Float[Tensor, "N V"]:
        output = self.model(
            input_ids=tokens,
            attention_mask=active.mask[:, : active.seen],
            position_ids=positions,
            past_key_values=active.cache,
            use_cache=True,
            **({"logits_to_keep": 1} if self.logits_to_keep else {}),
        )
        logits: Tensor = output.logits[:, -1]
        return logits


@dataclass(slots=True, kw_only=True)
class _Active:
    """The rows in the cache, and what the next step needs of them."""

    cache: "DynamicCache"
    rows: Tensor  # int64 [N]: their rows of the batch
    positions: Tensor  # int64 [N, 1]: of the last token seen
    mask: Tensor  # int64 [N, L + room]: over the prompt and every token to come; a step sees its first `seen` columns
    seen: int
    finished: Tensor  # bool [N]
    logits: Tensor = field(init=False)  # [N, V]: of the next token

    def select(self, indices: Int[Tensor, " M"]) -> None:
        """Make row m what row `indices[m]` was. `logits` is left: the next step replaces it."""
        self.cache.batch_select_indices(indices)
        self.rows, self.positions, self.mask = self.rows[indices], self.positions[indices], self.mask[indices]
        self.finished = self.finished[indices]


def _is_stop(tokens: Int[Tensor, "*shape"], stop_token_ids: Int[Tensor, " stops"]) -> Bool[Tensor, "*shape"]:
    return (tokens[..., None] == stop_token_ids).any(-1)


def _measure(
    tokens: Int[Tensor, "B T"], logp: Float[Tensor, "B T"], stop_token_ids: Int[Tensor, " stops"]
) -> Completions:
    is_stop = _is_stop(tokens, stop_token_ids)
    stopped = is_stop.any(1)
    lengths = torch.where(stopped, is_stop.int().argmax(1) + 1, tokens.shape[1])
    return Completions(tokens=tokens, logp=logp, lengths=lengths, stopped=stopped)
