"""FLOPs that a model takes to be trained on rows of given lengths, as its mathematics needs them.

Knows shapes and lengths; measures nothing. For a row of T tokens of which n are asked, a parameter W and a layer of
attention with window w and width d = heads · (query width + value width):

    matrix products    2 |W| T forward, 2 |W| T for the gradient of its input, 2 |W| T for its own where it is trained
    head               the same with n in the place of T: logits of other tokens are never made
    attention          2 d · pairs(T, w) forward, twice that backward; pairs(T, w) = sum over t of min(t, w), t = 1 .. T

A mask is counted as what it saves: causal attention over T tokens is T (T + 1) / 2 pairs. Experts count with the share
that sees a token. Norms, rotary angles, softmax and the router's choice are not counted: they are no matrix products.
The convention is that of PaLM's appendix B (arXiv:2204.02311) with the causal half of attention left out; what
activation checkpointing computes again is in hardware FLOPs (arXiv:2205.05198) and not in model FLOPs.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int
from torch import Tensor, nn

from rl_backends.metrics.modules import attention_widths, decoder_of, head_of, matmul_parameters

__all__ = ["AttentionFlops", "ModelFlops", "TokenFlops"]


@dataclass(frozen=True, slots=True)
class TokenFlops:
    """Of matrix products, for one token."""

    forward: float
    """2 for each parameter."""

    backward: float
    """2 for the gradient of its input, where anything needs it, and 2 for its own, where it is trained."""


@dataclass(frozen=True, slots=True)
class AttentionFlops:
    """Of all layers with one window."""

    window: int | None
    """Keys that a query sees at most, itself included; None for all before it."""

    per_pair: float
    """Of a query and a key that sees it, forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """What one token, one asked token and one pair of tokens cost. Made by `ModelFlops.of(model)`."""

    layers: TokenFlops
    """Of each token that is read."""

    head: TokenFlops
    """Of each token that is asked about."""

    attention: tuple[AttentionFlops, ...]
    """Of each pair of tokens."""

    @classmethod
    def of(cls, model: nn.Module) -> "ModelFlops":
        """Read a Hugging Face decoder with its head, before it is sharded; its weights may be on the meta device.

        Raises:
            ModelError: a model whose modules do not tell what a token costs.
        """
        decoder, head = decoder_of(model), head_of(model)
        hidden_size = int(next(model.get_input_embeddings().parameters()).shape[-1])  # type: ignore[operator]
        trains = any(parameter.requires_grad for parameter in decoder.parameters())
        widths = attention_widths(decoder, hidden_size)
        windows = dict.fromkeys(window for window, _ in widths)
        return cls(
            layers=_token_flops(decoder, gradient_of_input=trains),
            head=TokenFlops(0.0, 0.0) if head is None else _token_flops(head, gradient_of_input=trains),
            attention=tuple(
                AttentionFlops(window, 2.0 * sum(n * width for (each, width), n in widths.items() if each == window))
                for window in windows
            ),
        )

    @property
    def _trains_layers(self) -> bool:
        return self.layers.backward > 0

    def of_rows(
        self, lengths: Int[Tensor, " b"], asked: Int[Tensor, " b"], *, recomputed: bool = False
    ) -> Float64[Tensor, " b"]:
        """Of a forward and a backward pass over each row.

        Args:
            lengths: tokens that are read of each row.
            asked: tokens that something is wanted of.
            recomputed: count every layer's forward, and the head's, once more, as checkpointing runs them.
        """
        tokens, wanted = lengths.double(), asked.double()
        again = 1 if recomputed else 0
        total = tokens * (self.layers.forward * (1 + again) + self.layers.backward)
        total += wanted * (self.head.forward * (1 + again) + self.head.backward)
        passes = 1 + again + (2 if self._trains_layers else 0)
        for each in self.attention:
            total += passes * each.per_pair * _pairs(tokens, each.window)
        return total


def _token_flops(module: nn.Module, *, gradient_of_input: bool) -> TokenFlops:
    forward = backward = 0.0
    for parameter, share in matmul_parameters(module):
        product = 2.0 * parameter.numel() * share
        forward += product
        backward += product * (int(gradient_of_input) + int(parameter.requires_grad))
    return TokenFlops(forward, backward)


def _pairs(tokens: Tensor, window: int | None) -> Tensor:
    """Queries and keys of causal rows: sum over t of min(t, window)."""
    if window is None:
        return tokens * (tokens + 1) / 2
    inside = torch.clamp(tokens, max=window)
    return inside * (inside + 1) / 2 + (tokens - inside) * window
