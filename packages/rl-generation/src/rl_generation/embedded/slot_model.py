"""Runs a model over a slot cache: prompts into it, then a token a row. Knows no requests and no sampling.

Axes: P distinct prompts, L their padded length, N rows, V vocabulary.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rl_generation.embedded.attention import AttentionStep, attending, register_attention, stepping
from rl_generation.embedded.cache import SlotCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["SlotModel"]


@final
class SlotModel:
    """A model, its cache, and how to run it. Holds nothing made from weights but the cache.

    The modules of `model` get a deep copy of their configs. While it runs it attends by another name, read from
    there, and a model that was made from the same config may run in another thread meanwhile.
    """

    def __init__(self, model: "PreTrainedModel", *, pad_token_id: int, logits_to_keep: bool) -> None:
        register_attention()
        self.model = model
        self.cache = SlotCache()
        self.logits_to_keep = logits_to_keep
        self._pad_token_id = pad_token_id
        _copy_configs(model)
        self._configs = list({id(config): config for config in _configs(model)}.values())
        # Answers agree with the model's own forward, which under this name leaves the cap out.
        self._softcap = model.config._attn_implementation != "sdpa"  # noqa: SLF001
        self.last_step: AttentionStep | None = None

    def running(self) -> AbstractContextManager[None]:
        """Forwards happen inside; outside, the model attends as it did before."""
        return attending(self._configs)

    # Not inference_mode: some rotary embeddings replace their buffers inside forward, and an inference tensor left
    # there would refuse the in-place copy of the next refit.
    @torch.no_grad()
    def prefill(
        self, prompts: Sequence[tuple[int, ...]], *, slots: Int[Tensor, " rows"], sources: Int[Tensor, " rows"]
    ) -> Float[Tensor, "P V"]:
        """Run each prompt once, keep prompt `sources[i]` in slot `slots[i]`; return the logits of their ends."""
        lengths = [len(prompt) for prompt in prompts]
        columns = max(lengths)
        # Padded on the right, where causal attention does not look; what is kept of it is written over in time.
        tokens = torch.tensor(
            [[*prompt, *[self._pad_token_id] * (columns - len(prompt))] for prompt in prompts], device=self.model.device
        )
        positions = torch.arange(columns, device=tokens.device)[None]
        self.cache.begin_prefill(slots=slots, prompts=sources, columns=columns)
        ends = sorted(set(lengths))
        keep = torch.tensor([end - 1 for end in ends], device=tokens.device)
        logits = self._forward(tokens, positions, columns=columns, logits_to_keep=keep)
        place = {end: index for index, end in enumerate(ends)} if self.logits_to_keep else {e: e - 1 for e in ends}
        return logits[torch.arange(len(prompts)), [place[length] for length in lengths]]

    @torch.no_grad()
    def decode(self, tokens: Int[Tensor, " N"], positions: Int[Tensor, " N"], *, columns: int) -> Float[Tensor, "N V"]:
        """Run one token of each of the first N slots; all `positions` are below `columns`."""
        self.cache.begin_decode(positions=positions, columns=columns)
        return self._forward(tokens[:, None], positions[:, None], columns=columns, logits_to_keep=1)[:, -1]

    def _forward(
        self,
        tokens: Int[Tensor, "rows S"],
        positions: Int[Tensor, "positions S"],
        *,
        columns: int,
        logits_to_keep: int | Tensor,
    ) -> Float[Tensor, "rows kept V"]:
        self.last_step = AttentionStep(
            positions=positions,
            columns=columns,
            dtype=self.model.dtype,
            softcap=self._softcap,
            from_start=positions.shape[1] == columns > 1,
        )
        with stepping(self.last_step):
            output = self.model(
                input_ids=tokens,
                position_ids=positions.expand(len(tokens), -1),
                past_key_values=self.cache,
                use_cache=True,
                **({"logits_to_keep": logits_to_keep} if self.logits_to_keep else {}),
            )
        logits: Tensor = output.logits
        return logits


def _copy_configs(model: "PreTrainedModel") -> None:
    """Give the model configs that no other model has; what was one config, or part of one, is so again."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if hasattr(value, "_attn_implementation"):
                setattr(module, name, copy.deepcopy(value, copies))


def _configs(model: "PreTrainedModel") -> Iterator[Any]:
    """Every config that a part of the model may read its attention from, outer ones first."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            yield config
