"""The frozen model that a policy is compared with: a model of its own, or the policy with its adapters off.

A copy has its own parameters, so that nothing which fails can leave its weights in the policy.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn

from rl_backends.batching.dealing import DealtRows, RowDealing
from rl_backends.examples import TokenBatch
from rl_backends.readers import Head, Reader, read_logp, read_top_k
from rl_parallel_plans import TopKLogp


@runtime_checkable
class Readable(Protocol):
    """A model over ranks, of which every rank is told what is read of all rows."""

    @property
    def row_dealing(self) -> RowDealing:
        """How the rows of a batch are shared out."""

    def read_all(self, examples: TokenBatch | DealtRows[Any], reader: Reader) -> dict[int, Tensor]:
        """By the number of the reader's output, `[B, T, ...]`; of dealt rows, those of this rank."""


class ReferenceModel:
    """Log-probabilities, and the most probable tokens, of a model that nothing trains."""

    def __init__(
        self,
        model: Readable,
        head: Head,
        *,
        temperature: Callable[[], float],
        as_reference: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._model = model
        self._head = head
        self._temperature = temperature
        self._as_reference = as_reference

    def row_dealing(self) -> RowDealing:
        """As the policy's."""
        return self._model.row_dealing

    def logp(self, examples: TokenBatch | DealtRows[Any]) -> Float[Tensor, "B T"]:
        """As the policy's `logp`, at the policy's temperature; float32."""
        with self._as_reference():
            return self._model.read_all(examples, read_logp(self._head, self._temperature()))[0]

    def topk_logits(self, examples: TokenBatch | DealtRows[Any], k: int) -> TopKLogp:
        """As the policy's `topk_logits`, at the policy's temperature: a policy's teacher may be what it was before."""
        with self._as_reference():
            read = self._model.read_all(examples, read_top_k(self._head, self._temperature(), k))
        return TopKLogp(logp=read[0], token_ids=read[1])


def without_weights(model: nn.Module) -> nn.Module:
    """A copy of `model` with its parameters on the meta device, ties and buffers kept; no weight is copied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)
