"""What a backend needs to find in the examples that it is given; the loss may find more in them.

Axes: B rows, T tokens, K tokens of the vocabulary that are asked about in one place.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol, TypeVar, cast, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from rl_backends.errors import BatchError


@runtime_checkable
class TokenBatch(Protocol):
    """A dataclass of tensors: [B], or [B, T, ...], which are cut along their tokens.

    A field [B, n, ...] that is of rows is named in `row_fields: ClassVar[tuple[str, ...]]` of the class, and not cut.

    For the output "logp_of_token_ids" one of them is `token_ids` [B, T, K]: K tokens of the
    vocabulary for each trainable token's place.
    """

    rows_per_unit: ClassVar[int]
    """How many consecutive rows the loss needs together; cuts fall between such units only."""

    @property
    def tokens(self) -> Int[Tensor, "B T"]:
        """Token ids, right-padded."""

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """Tokens of each row that are not padding; at least 1."""

    @property
    def trainable(self) -> Bool[Tensor, "B T"]:
        """The tokens whose log-probability the loss looks at; never the first of a row, never padding."""


BatchT = TypeVar("BatchT", bound=TokenBatch)


@dataclass(frozen=True)
class TokenRows:
    """The least that is a `TokenBatch`: of the rows by which a backend is tried out."""

    rows_per_unit: ClassVar[int] = 1
    tokens: Int[Tensor, "B T"]
    lengths: Int[Tensor, " B"]
    trainable: Bool[Tensor, "B T"]


def token_ids_of(examples: TokenBatch) -> Tensor | None:
    """`examples.token_ids`; None where there are none."""
    found = getattr(examples, "token_ids", None)
    return found if isinstance(found, Tensor) else None


def require_token_ids(examples: TokenBatch, *, vocabulary_size: int) -> None:
    """Refuse `examples.token_ids` that are absent or unknown to the model; places that do not train may hold any."""
    token_ids = token_ids_of(examples)
    if token_ids is None:
        raise BatchError(
            f"output='logp_of_token_ids' is of examples.token_ids [B, T, K], and {type(examples).__qualname__} has no "
            f"tensor of that name: give it the tokens to ask about, such as teacher.topk_logits(examples, k).token_ids"
        )
    shape, tokens = tuple(token_ids.shape), tuple(examples.tokens.shape)
    if len(shape) != 3 or shape[:2] != tokens or not shape[2] or token_ids.dtype not in {torch.int64, torch.int32}:
        raise BatchError(
            f"token_ids are {token_ids.dtype} {list(shape)}, and tokens {list(tokens)}: token_ids must be integers "
            f"[B, T, K], K of the vocabulary for each token, K at least 1"
        )
    asked = token_ids[examples.trainable.to(token_ids.device)]
    if asked.numel() and not 0 <= int(asked.min()) <= int(asked.max()) < vocabulary_size:
        wrong = (token_ids < 0) | (token_ids >= vocabulary_size)
        row, column, word = (wrong & cast("Any", examples.trainable)[..., None].to(wrong.device)).nonzero()[0].tolist()
        raise BatchError(
            f"row {row}: token_ids of token {column} have the id {int(token_ids[row, column, word])}, and the model's "
            f"ids are from 0 to {vocabulary_size - 1}: is the teacher of another vocabulary?"
        )


def row_fields(examples: TokenBatch) -> Collection[str]:
    """The fields of more than one dim that are of rows and not of tokens, which `row_fields` of the class names."""
    named: Collection[str] = getattr(examples, "row_fields", ())
    return named


def changed(examples: BatchT, change: Callable[[str, Tensor], Tensor]) -> BatchT:
    """The same examples with what `change` makes of each field, of its name and tensor."""
    instance = cast("Any", examples)  # the protocol cannot say that it is a dataclass
    names = [field.name for field in fields(instance) if field.init]
    made: BatchT = replace(instance, **{name: change(name, getattr(instance, name)) for name in names})
    return made


_ROWS_CHECKED_AT_A_TIME = 256


def check_examples(examples: TokenBatch, lengths: list[int], *, most_rows: int, vocabulary_size: int) -> None:
    """Refuse examples that cannot be cut or computed; a unit with too many tokens is left to `RowDealing.cut`.

    lengths: `examples.lengths`, on the host.
    most_rows: of a microbatch.
    """
    if not lengths:
        raise BatchError("the batch has no rows (B=0): there is nothing to compute; do not ask with an empty batch")
    tokens, trainable = examples.tokens, examples.trainable
    num_tokens = tokens.shape[1]
    for row, length in enumerate(lengths):
        if not 1 <= length <= num_tokens:
            raise BatchError(
                f"row {row} has length {length}, where tokens hold {num_tokens}: lengths must be from 1 to that; "
                f"leave out rows without tokens"
            )

    # A field is cut along its tokens by what its class says of it: by its shape, one of [B, 16] would be cut where rows
    # have 16 tokens, and nowhere else.
    for field in fields(cast("Any", examples)):
        shape = tuple(getattr(examples, field.name).shape)
        if shape[:1] != (len(lengths),):
            raise BatchError(f"{field.name} is {list(shape)}, and the batch has {len(lengths)} rows: give [B, ...]")
        if len(shape) > 1 and shape[1] != num_tokens and field.name not in row_fields(examples):
            raise BatchError(
                f"{field.name} is {list(shape)}, and tokens are {[len(lengths), num_tokens]}: give a number for each "
                f"token, or name the field in `row_fields: ClassVar = ({field.name!r},)` of "
                f"{type(examples).__qualname__}, if it is of rows"
            )

    # Nothing precedes the first token to predict it from, and padding must not train. Rows of like length at a time:
    # columns that are padding to all of them need no comparison.
    if bool(trainable[:, 0].any()):
        row = int(trainable[:, 0].int().argmax())
        raise BatchError(f"row {row}: its first token is marked trainable, and nothing precedes it to predict it from")
    of_rows = examples.lengths.to(trainable.device)
    for rows in torch.split(of_rows.argsort(), _ROWS_CHECKED_AT_A_TIME):
        shortest, longest = int(of_rows[rows[0]]), int(of_rows[rows[-1]])
        padding = torch.arange(shortest, longest, device=of_rows.device) >= of_rows[rows, None]
        if bool(trainable[rows, longest:].any()) or bool((trainable[rows, shortest:longest] & padding).any()):
            beyond = torch.arange(num_tokens, device=of_rows.device) >= of_rows[rows, None]
            within, column = (trainable[rows] & beyond).nonzero()[0].tolist()
            row = int(rows[within])
            raise BatchError(
                f"row {row}: token {column} is marked trainable, and its length is {lengths[row]}: "
                f"padding is nothing to train on"
            )

    unit = examples.rows_per_unit
    if len(lengths) % unit:
        raise BatchError(f"{len(lengths)} rows, of which {unit} belong together each: B must be a multiple of {unit}")
    if unit > most_rows:
        raise BatchError(
            f"{unit} rows belong together, and a microbatch holds {most_rows}; micro_batch_size must be at least {unit}"
        )

    # Ids of tokens that are not padding; rows are looked at one by one only where some id is wrong.
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary_size:
        real = torch.arange(num_tokens, device=tokens.device) < examples.lengths.to(tokens.device)[:, None]
        wrong = (real & ((tokens < 0) | (tokens >= vocabulary_size))).nonzero()
        if len(wrong):
            row, column = wrong[0].tolist()
            raise BatchError(
                f"row {row}: token {column} has the id {int(tokens[row, column])}, and the model's ids are from 0 to "
                f"{vocabulary_size - 1}: give the tokens of the model's own tokenizer"
            )
