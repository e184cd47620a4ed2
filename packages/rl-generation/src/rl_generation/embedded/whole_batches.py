"""Generation by the model's own `generate`, for models that continuous batching cannot serve. Slow, and says so.

Prompts of one length form a batch, so that nothing is padded, which recurrent models would take for input; it runs
until its last row has finished, and its rows share no prefill. What `generate` decides is replaced: at each step it is
handed logits in which the token that was drawn here is the only one left.

Axes: N rows, S tokens so far, V vocabulary.
"""

from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_generation.embedded.rows import News, Row, Runner
from rl_generation.embedded.slot_model import PROMPT_LENGTHS, plain_logits, what_differs
from rl_generation.rollout import LogpOf

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class WholeBatches(Runner):
    """Runs one batch of up to `max_batch_size` rows a step, to its end; `reason` says why it is not continuous."""

    def __init__(
        self,
        model: "PreTrainedModel",
        *,
        reason: str,
        pad_token_id: int,
        max_batch_size: int,
        vocab_size: int,
        logp_of: LogpOf,
    ) -> None:
        super().__init__(max_batch_size=max_batch_size, vocab_size=vocab_size, device=model.device, logp_of=logp_of)
        self._model, self._reason, self._pad_token_id = model, reason, pad_token_id
        self._use_cache = _cache_is_right(model, pad_token_id=pad_token_id, vocab_size=vocab_size)

    def advance(self, *, stream: bool) -> list[News]:
        """Run the next batch to its end."""
        if not self.waiting:
            return []
        length = len(self.waiting[0].request.prompt)
        rows = [row for row in self.waiting if len(row.request.prompt) == length][: self._max_batch_size]
        taken = set(rows)
        self.waiting = deque(row for row in self.waiting if row not in taken)
        for row in rows:
            row.version = self._version
        self._generate(rows)
        self.counters["prompt_tokens"] += length * len(rows)
        self.counters["generated_tokens"] += sum(len(row.tokens) for row in rows)
        return self._news(rows)

    def explain(self) -> list[str]:
        """How it generates, in lines for people."""
        cache = "that of model.generate, without a bound; every answer runs its prompt, and none is replaced"
        if not self._use_cache:
            cache = "none: with the one of model.generate, logits differ from those of a plain forward"
        return [
            f"batching: whole batches of prompts of one length, by model.generate, since {self._reason}",
            f"cache: {cache}",
        ]

    def _generate(self, rows: list[Row]) -> None:
        from transformers import LogitsProcessorList, StoppingCriteriaList

        draw = self._draw([*rows])

        def only_the_drawn(_: Int[Tensor, "N S"], logits: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
            for row in draw(logits):
                draw.rows[draw.rows.index(row)] = None
            tokens = torch.tensor([[row.last_token] for row in rows], device=logits.device)
            return torch.full_like(logits, -torch.inf).scatter_(1, tokens, 0.0)

        def all_ended(seen: Int[Tensor, "N S"], *_: object, **__: object) -> Bool[Tensor, " N"]:
            return torch.full((len(seen),), not any(draw.rows), device=seen.device)

        _bare_generate(
            self._model,
            torch.tensor([row.request.prompt for row in rows], device=self._model.device),
            max_new_tokens=max(row.request.sampling.max_new_tokens for row in rows),
            pad_token_id=self._pad_token_id,
            use_cache=self._use_cache,
            logits_processor=LogitsProcessorList([only_the_drawn]),
            stopping_criteria=StoppingCriteriaList([all_ended]),
        )


def _bare_generate(
    model: "PreTrainedModel",
    prompts: Int[Tensor, "N S"],
    *,
    max_new_tokens: int,
    pad_token_id: int,
    use_cache: bool,
    **others: Any,
) -> Any:
    """Take the likeliest tokens behind prompts of one length; `others` go to `generate`."""
    import transformers

    make_config: Any = transformers.GenerationConfig
    bare = make_config(max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=pad_token_id, use_cache=use_cache)
    # What a config leaves open, generate takes from the model's own.
    before = model.generation_config
    try:
        model.generation_config = bare
        generate: Any = model.generate
        return generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=bare, **others)
    finally:
        model.generation_config = before


def _cache_is_right(model: "PreTrainedModel", *, pad_token_id: int, vocab_size: int) -> bool:
    """Whether `model.generate` with its own cache sees the logits of a plain forward.

    transformers 4.57 gets the first tokens wrong behind a prompt shorter than the window of a convolution.
    """
    for length in (*PROMPT_LENGTHS, 1):
        prompt = torch.arange(1, length + 1, device=model.device)[None] % vocab_size
        generated = _bare_generate(
            model,
            prompt,
            max_new_tokens=3,
            pad_token_id=pad_token_id,
            use_cache=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
        plain = plain_logits(model, generated.sequences[0, :-1].tolist(), count=3)
        if what_differs(torch.cat(generated.logits), plain) is not None:
            return False
    return True
