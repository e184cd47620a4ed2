"""The embedded engine: a Hugging Face model in the caller's process.

Does not know text, rewards or training; how new weights arrive is its caller's affair, who writes them into `model`
between two calls and says so with `commit_version`.

Randomness: one uniform number for each prompt and token is drawn before anything runs, from a generator on the CPU.
A rollout of a seeded call therefore depends on the weights, the seed, `max_new_tokens` and the prompt's place in the
list; not on `max_batch_size`, on the other prompts, or on when rows finish, up to the rounding of matrix products,
which differs with their shape by about 1e-6 in a logit.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, final

import torch
from jaxtyping import Float
from torch import Tensor

from rl_generation.decode import Completions, Decoder
from rl_generation.distribution import exact_dtype
from rl_generation.errors import LogpError, ModelError
from rl_generation.prompts import check_prompts, check_token_ids
from rl_generation.rollout import Rollout
from rl_generation.sampling import Sampling
from rl_generation.support import inspect_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["TransformersEngine"]


@final
class TransformersEngine:
    """Generates with a `transformers` causal language model, on whatever device the model is. One thread at a time.

    Args:
        model: Has its own weights, which nothing else trains or uses. The engine switches it to eval mode.
        stop_token_ids: Tokens that end an answer in every call; may be empty.
        pad_token_id: Any id of the vocabulary; fills the left of shorter prompts, where it is masked.
        max_batch_size: Rows decoded together at most; more is faster until the cache fills the memory.
        seed: Of the generator behind calls whose `Sampling.seed` is None.
        version: Number of optimizer steps that `model`'s weights have seen already.
        drop_finished: False decodes finished rows to the end and shares no prefill, which serves models whose cache
            cannot select rows, at up to several times the cost.
        ready: Called at the start of every `generate`; raises to refuse, as when the last refit left torn weights.

    Raises:
        ModelError: The model cannot be served, or its cache cannot drop rows.
        PromptError: A stop or pad token is outside the vocabulary.
        ValueError: `max_batch_size` or `version` is out of range.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        *,
        stop_token_ids: Sequence[int],
        pad_token_id: int,
        max_batch_size: int = 256,
        seed: int = 0,
        version: int = 0,
        drop_finished: bool = True,
        ready: Callable[[], None] | None = None,
    ) -> None:
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1; got max_batch_size={max_batch_size}")
        self._support = inspect_model(model, drop_finished=drop_finished)
        check_token_ids(stop_token_ids, vocab_size=self._support.vocab_size, name="stop_token_ids")
        check_token_ids([pad_token_id], vocab_size=self._support.vocab_size, name="pad_token_id")
        self.model = model.train(mode=False)
        self._decoder = Decoder(
            model=model,
            pad_token_id=pad_token_id,
            logits_to_keep=self._support.logits_to_keep,
            drop_finished=drop_finished,
        )
        self._stop_token_ids = tuple(stop_token_ids)
        self._max_batch_size = max_batch_size
        self._generator = torch.Generator().manual_seed(seed)
        self._ready = ready
        self.commit_version(version)

    @property
    def version(self) -> int:
        """Number of optimizer steps that the weights have seen, as last committed."""
        return self._version

    def commit_version(self, version: int) -> None:
        """State that `model` now holds the weights of `version`; an earlier one than before is a rollback, and right.

        Raises:
            ValueError: `version` is negative.
        """
        if version < 0:
            raise ValueError(f"a version counts optimizer steps and is at least 0; got version={version}")
        self._version = version

    def get_rng_state(self) -> Tensor:
        """The state of the generator behind unseeded calls, uint8, for `set_rng_state`."""
        return self._generator.get_state()

    def set_rng_state(self, state: Tensor) -> None:
        """Go on drawing as the engine did when `get_rng_state` gave `state`."""
        self._generator.set_state(state)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Rollout]:
        """Answer each of `prompts`, token ids of any lengths; rollout i answers prompt i. No prompts, no rollouts.

        Several rollouts of one prompt are the prompt repeated; repeats in one batch share its prefill. Greedy
        rollouts draw nothing from the generator.

        Raises:
            PromptError: Before generation: a prompt is empty, too long or outside the vocabulary; a stop token is.
            LogpError: The logits of a generated token are not finite.
            ModelError: The model was put into training mode.
        """
        if self._ready is not None:
            self._ready()
        self._refuse_training_mode()
        stop_token_ids = self._stop_token_ids + sampling.stop_token_ids
        check_token_ids(stop_token_ids, vocab_size=self._support.vocab_size, name="stop_token_ids")
        checked = check_prompts(
            prompts,
            vocab_size=self._support.vocab_size,
            max_new_tokens=sampling.max_new_tokens,
            max_positions=self._support.max_positions,
        )
        stops = torch.tensor(stop_token_ids, dtype=torch.int64, device=self.model.device)
        uniforms = None if sampling.greedy else self._uniforms(len(checked), sampling)
        # Longest first: what does not fit into memory shows at once. Equal prompts end up side by side.
        order = sorted(range(len(checked)), key=lambda index: (-len(checked[index]), checked[index]))
        rollouts: dict[int, Rollout] = {}
        for start in range(0, len(order), self._max_batch_size):
            batch = order[start : start + self._max_batch_size]
            completions = self._decoder.decode(
                [checked[index] for index in batch],
                sampling,
                uniforms=None if uniforms is None else uniforms[batch],
                stop_token_ids=stops,
            )
            _refuse_broken_logp(completions, batch, version=self._version)
            rollouts.update(zip(batch, self._rollouts(completions, greedy=sampling.greedy), strict=True))
        return [rollouts[index] for index in range(len(checked))]

    def explain(self) -> str:
        """Say which engine this is, how it decodes, and what is special about this model. For people."""
        support, decoder = self._support, self._decoder
        finished = "dropped from the cache at a quarter" if decoder.drop_finished else "decoded to the end (asked for)"
        prefill = "one for each distinct prompt of a batch" if decoder.drop_finished else "one for each row (asked for)"
        lines = [
            f"engine: TransformersEngine over {type(self.model).__name__}, {self.model.dtype} on {self.model.device}",
            f"version: {self._version}",
            f"cache: DynamicCache of {', '.join(support.cache_layers)}; prefill: {prefill}; finished rows: {finished}",
            f"attention: {support.attention}",
            f"limits: vocabulary {support.vocab_size}, positions {support.max_positions}, batch {self._max_batch_size}",
            f"stop tokens: {list(self._stop_token_ids)}; pad token: {decoder.pad_token_id}",
            *(f"quirk: {quirk}" for quirk in support.quirks),
        ]
        return "\n".join(lines)

    def _refuse_training_mode(self) -> None:
        training = next((name for name, module in self.model.named_modules() if module.training), None)
        if training is not None:
            raise ModelError(
                f"the engine's model is in training mode (module {training!r}): something else uses this model. "
                f"Give the engine a model of its own, or call model.eval() before generate"
            )

    def _uniforms(self, num_prompts: int, sampling: Sampling) -> Float[Tensor, "prompts max_new_tokens"]:
        generator = self._generator if sampling.seed is None else torch.Generator().manual_seed(sampling.seed)
        # Drawn on the CPU, so that a seed means the same on every device.
        uniforms = torch.rand(
            num_prompts,
            sampling.max_new_tokens,
            generator=generator,
            dtype=exact_dtype(self.model.device),
            device="cpu",
        )
        return uniforms.to(self.model.device)

    def _rollouts(self, completions: Completions, *, greedy: bool) -> list[Rollout]:
        return [
            Rollout(
                tokens=tuple(tokens[:length]),
                logp=tuple(logp[:length]),
                logp_of="raw" if greedy else "sampled",
                finish_reason="stop" if stopped else "length",
                version=self._version,
            )
            for tokens, logp, length, stopped in zip(
                completions.tokens.tolist(),
                completions.logp.tolist(),
                completions.lengths.tolist(),
                completions.stopped.tolist(),
                strict=True,
            )
        ]


def _refuse_broken_logp(completions: Completions, batch: Sequence[int], *, version: int) -> None:
    """Raise where a logp inside an answer is not finite; `batch` holds each row's index among the prompts."""
    steps = torch.arange(completions.logp.shape[1], device=completions.logp.device)
    broken = ~completions.logp.isfinite() & (steps < completions.lengths[:, None])
    if bool(broken.any()):
        row, step = broken.nonzero()[0].tolist()
        raise LogpError(
            f"prompt {batch[row]}: token {step} of its answer, id {int(completions.tokens[row, step])}, has "
            f"logp={float(completions.logp[row, step])} under weights of version {version}: the logits hold NaN or "
            f"infinity; look for it in the weights"
        )
