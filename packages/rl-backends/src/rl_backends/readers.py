"""Readers: log-probabilities, entropies, the most probable tokens or values from hidden states, without whole logits.

A reader is called inside the model's forward, where FSDP has gathered the head, on the hidden states of the asked
places alone.

Axes: n asked places, H hidden, V vocabulary, k tokens of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_backends.batching.microbatches import ModelInputs
from rl_backends.config import KernelsConfig
from rl_backends.errors import ModelError
from rl_backends.lora.layers import adapted_head
from rl_backends.losses import Output
from rl_parallel_plans import TopKLogp, linear_logp, logp_of_token_ids, top_k_logp

Reader = Callable[[nn.Module, Tensor, ModelInputs], Any]


def has_language_model_head(model: nn.Module) -> bool:
    """Whether the model ends in logits over a vocabulary."""
    embeddings = getattr(model, "get_output_embeddings", None)
    return embeddings is not None and embeddings() is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """How logits come of hidden states: `cap(logit_scale * lm_head(hidden)) / temperature`."""

    logit_scale: float
    softcap: float | None
    kernels: KernelsConfig
    """What computes log-probabilities and entropies; the top k and given tokens are torch's."""

    @classmethod
    def of(cls, model: nn.Module, kernels: KernelsConfig | None = None) -> "Head":
        """As the model's configuration says it, read by the kernel of the loss."""
        if not has_language_model_head(model):
            raise ModelError(
                f"{type(model).__qualname__} has no language-model head, so it has no log-probabilities; load it with "
                f"head='causal_lm', or read value(examples) or score(examples)"
            )
        config: Any = model.config
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        scale = float(getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0)
        divisor = float(getattr(config, "logits_scaling", None) or 1.0)
        softcap = getattr(config, "final_logit_softcapping", None)
        return cls(logit_scale=scale / divisor, softcap=softcap, kernels=kernels or KernelsConfig())

    def options(self, temperature: float) -> dict[str, Any]:
        """The keyword arguments of `linear_logp`, `logp_of_token_ids` and `top_k_logp`."""
        return {
            "temperature": temperature,
            "logit_scale": self.logit_scale,
            "softcap": self.softcap,
            "chunk_size": self.kernels.loss_chunk_size,
        }


def token_logp_reader(output: str, head: Head, temperature: float) -> Reader:
    """Reads the `output` of a language model that a loss asks for, float32 of each asked token.

    "logp" [n], its log-probability; "logp_and_entropy" [n, 2], with the entropy in nats of the distribution that it was
    drawn from; "logp_of_token_ids" [n, k], the log-probabilities of the k tokens asked about in its place.
    """
    if output not in {"logp", "logp_and_entropy", "logp_of_token_ids"}:
        raise ValueError(f"output={output!r} must be one of {', '.join(map(repr, get_args(Output)))}")
    options = head.options(temperature)
    by_kernel = {**options, "ignore_index": None, "kernel": head.kernels.loss}

    def read(model: Any, hidden: Float[Tensor, "n H"], inputs: ModelInputs) -> Tensor:
        lm_head, hidden = adapted_head(model.get_output_embeddings(), hidden)
        if output == "logp_of_token_ids":
            assert inputs.words is not None
            logp: Tensor = logp_of_token_ids(hidden, lm_head, inputs.words, **options)
        elif output == "logp_and_entropy":
            logp = torch.stack(linear_logp(hidden, lm_head, inputs.targets, entropy=True, **by_kernel), dim=-1)
        else:
            logp = linear_logp(hidden, lm_head, inputs.targets, **by_kernel)
        return logp

    return read


def read_logp(head: Head, temperature: float) -> Reader:
    """Log-probability of each asked token: float32 [n]."""
    return token_logp_reader("logp", head, temperature)


def read_entropy(head: Head, temperature: float) -> Reader:
    """Entropy in nats of the distribution that each asked token was drawn from: float32 [n]."""
    both = token_logp_reader("logp_and_entropy", head, temperature)
    return lambda model, hidden, inputs: both(model, hidden, inputs)[:, 1]


def read_top_k(head: Head, temperature: float, k: int) -> Reader:
    """The k most probable tokens in each asked token's place: `TopKLogp` of [n, k]."""

    def read(model: Any, hidden: Float[Tensor, "n H"], _: ModelInputs) -> TopKLogp:
        lm_head, hidden = adapted_head(model.get_output_embeddings(), hidden)
        return top_k_logp(hidden, lm_head, k, **head.options(temperature))

    return read


def value_reader(model: nn.Module) -> Reader:
    """Reads what a head of one number says of each asked place: float32 [n]."""
    if not hasattr(model, "score"):
        raise ModelError(
            f"{type(model).__qualname__} has no head `score` that gives a number; load it with "
            f"head='sequence_classification'"
        )

    def read(model: Any, hidden: Float[Tensor, "n H"], _: ModelInputs) -> Float[Tensor, " n"]:
        values: Tensor = model.score(hidden)
        if values.shape[-1] != 1:
            raise ModelError(
                f"{type(model).__qualname__} says {values.shape[-1]} numbers of a token, one for each of its labels, "
                f"and a value or score is one: load it with num_labels=1"
            )
        return values.squeeze(-1).to(torch.float32)

    return read
