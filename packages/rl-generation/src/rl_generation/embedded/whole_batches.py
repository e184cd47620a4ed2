"""Generation by the model's own `generate`, for models that continuous batching cannot serve. Slow, and says so.

Prompts of one length form a batch, so that nothing is padded, which recurrent models would take for input; it runs
until its last row has finished, and its rows share no prefill. What `generate` decides is replaced: at each step it is
handed logits in which the token that was drawn here is the only one left.

Axes: N rows, S tokens so far, V vocabulary.
"""

from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_generation.embedded.bare_generate import bare_generate
from rl_generation.embedded.continuous_batching import Batch, Counters, Ended, Progress, Row
from rl_generation.embedded.proof import generate_cache_is_right
from rl_generation.rollout import LogpOf

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["WholeBatches"]


@final
class WholeBatches:
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
        self.counters = Counters()
        self._model, self._reason, self._pad_token_id = model, reason, pad_token_id
        self._logp_of, self._version = logp_of, 0
        self._use_cache = generate_cache_is_right(model, pad_token_id=pad_token_id, vocab_size=vocab_size)
        self._waiting: deque[Row] = deque()
        self._batch = Batch(capacity=max_batch_size, vocab_size=vocab_size, device=model.device, logp_of=logp_of)

    @property
    def max_cache_tokens(self) -> None:
        """`generate` knows no bound."""
        return None

    @property
    def running(self) -> int:
        """Answers being generated: none between two steps."""
        return 0

    @property
    def waiting(self) -> int:
        """Answers that wait for their batch."""
        return len(self._waiting)

    @property
    def cache_usage(self) -> float:
        """`generate` keeps no cache between two steps."""
        return 0.0

    def add(self, rows: Sequence[Row]) -> None:
        """Take answers in; they start in this order, those with prompts of one length together."""
        self._waiting.extend(rows)

    def advance(self, *, stream: bool) -> list[Progress]:
        """Run the next batch to its end."""
        if not self._waiting:
            return []
        rows = self._next_batch()
        self._batch.clear()
        self._batch.place(rows, range(len(rows)))
        self._batch.settle()
        for row in rows:
            row.mark_version(self._version, start=0)
        ended = self._generate(rows)
        self.counters.prompt_tokens += sum(len(row.request.prompt) for row in rows)
        self.counters.generated_tokens += sum(len(item.tokens) for item in ended)
        return [self._progress(item, stream=stream) for item in ended]

    def abort(self, owner: object) -> list[Progress]:
        """Take the answers that somebody wanted out: none of them has begun."""
        aborted = [row for row in self._waiting if row.owner == owner]
        self._waiting = deque(row for row in self._waiting if row.owner != owner)
        return [self._progress(Ended(row, [], [], "abort", None), stream=False) for row in aborted]

    def commit_version(self, version: int) -> None:
        """From here on, tokens are made by the weights of `version`."""
        self._version = version

    def clear(self) -> None:
        """Forget all answers."""
        self._waiting.clear()
        self._batch.clear()

    def explain(self) -> list[str]:
        """How it generates, in lines for people."""
        cache = "that of model.generate, without a bound; every answer runs its prompt, and none is replaced"
        if not self._use_cache:
            cache = "none: with the one of model.generate, logits differ from those of a plain forward"
        return [
            f"batching: whole batches of prompts of one length, by model.generate, since {self._reason}",
            f"cache: {cache}",
        ]

    def _next_batch(self) -> list[Row]:
        length = len(self._waiting[0].request.prompt)
        rows = [row for row in self._waiting if len(row.request.prompt) == length][: self._batch.capacity]
        taken = set(rows)
        self._waiting = deque(row for row in self._waiting if row not in taken)
        return rows

    def _generate(self, rows: list[Row]) -> list[Ended]:
        from transformers import LogitsProcessorList, StoppingCriteriaList

        ended: list[Ended] = []

        def draw(_: Int[Tensor, "N S"], logits: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
            tokens, _logp, finished = self._batch.draw(logits, None)
            now = monotonic()
            for row in rows:
                row.first_token_s = now if row.first_token_s is None else row.first_token_s
            ended.extend(finished)
            return torch.full_like(logits, -torch.inf).scatter_(1, tokens[:, None], 0.0)

        def all_ended(seen: Int[Tensor, "N S"], *_: object, **__: object) -> Bool[Tensor, " N"]:
            return torch.full((len(seen),), self._batch.num_alive == 0, device=seen.device)

        bare_generate(
            self._model,
            torch.tensor([row.request.prompt for row in rows], device=self._model.device),
            max_new_tokens=max(row.request.sampling.max_new_tokens for row in rows),
            pad_token_id=self._pad_token_id,
            use_cache=self._use_cache,
            logits_processor=LogitsProcessorList([draw]),
            stopping_criteria=StoppingCriteriaList([all_ended]),
        )
        return ended

    def _progress(self, ended: Ended, *, stream: bool) -> Progress:
        news = ended.progress(logp_of=self._logp_of, version=self._version)
        return (
            news._replace(tokens=tuple(ended.tokens), logp=tuple(ended.logp), top_logp=tuple(ended.row.top_logp))
            if stream
            else news
        )
