"""Text to token ids by a tokenizer of Hugging Face's shape, also where text spells special tokens or repeats text.

A tokenizer takes the spelling of a special token for the token, whoever wrote it: a web page that a tool read could end
the policy's turn and begin another. And it cuts text at special tokens before all else, so what stands behind one is
tokenised in the same way whatever stands before it.
"""

import bisect
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from rl_algorithms.contracts import Message
from rl_algorithms.rows import DataError

__all__ = ["Encoded", "SpecialTokens", "TextError", "Tokenizer", "encode", "shared_length"]


class TextError(DataError):
    """A text without token ids. It says nothing of the template: other texts in its place would have some."""


@runtime_checkable
class Tokenizer(Protocol):
    """What is used of a `transformers` tokenizer."""

    chat_template: str | None
    eos_token_id: int | None

    def __len__(self) -> int:
        """How many tokens it knows."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> Mapping[str, list[int]]:
        """Token ids of `text`, as `["input_ids"]`."""

    def apply_chat_template(
        self, conversation: Sequence[Message], *, add_generation_prompt: bool, tokenize: bool, **options: Any
    ) -> Any:
        """The conversation as the text that the model was trained on.

        Options are given only where there is something to say: `tools` where there are tools, the template's own where
        `Chat` was given some. With `tokenize=True, return_dict=True, return_assistant_tokens_mask=True`, which only a
        template with `{% generation %}` sees, token ids and mask as `["input_ids"]` and `["assistant_masks"]`.
        """

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids."""


def encode(tokenizer: Tokenizer, text: str, *, where: str, special: bool = False) -> tuple[int, ...]:
    """Token ids of `text`; with `special` the tokenizer adds what begins a sequence.

    Raises:
        TextError: the tokenizer has no token for a part of it, or for nothing at all.
    """
    try:
        tokens = tokenizer(text, add_special_tokens=special)["input_ids"]
    except Exception as error:  # tokenizers raise a bare Exception for a character that they do not know
        raise TextError(f"{where}: the tokenizer cannot encode {text!r:.200}: {error}") from error
    if not tokens:
        raise TextError(f"{where}: {text!r} has no tokens")
    return tuple(tokens)


class SpecialTokens:
    """The special tokens of a tokenizer, and where text spells them.

    They are those that a `transformers` tokenizer calls special; of one that calls none so, its end of sequence.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.ids = _special_ids(tokenizer)
        longest_first = sorted(map(re.escape, self.ids), key=len, reverse=True)
        self._pattern = re.compile("|".join(longest_first) or r"(?!)")

    def found_in(self, text: str) -> tuple[str, ...]:
        """Those that `text` spells, in its order."""
        return tuple(self._pattern.findall(text))

    def pieces(self, text: str, *, where: str) -> list[str]:
        """`text` cut behind the first character of each special token: tokenised one by one, it has none.

        Raises:
            TextError: a special token of one character cannot be cut.
        """
        pieces, start = [], 0
        while match := self._pattern.search(text, start):
            if len(match.group()) == 1:
                raise TextError(
                    f"{where}: the text {text!r:.60} has {match.group()!r}, which is a special token of one character "
                    f"and cannot be said otherwise; remove it from what is said"
                )
            pieces.append(text[start : match.start() + 1])
            start = match.start() + 1
        return [*pieces, text[start:]]

    def borders(self, text: str, tokens: tuple[int, ...]) -> list[tuple[int, int, int]]:
        """Of each special token, where it begins and ends in `text`, and its place in `tokens`; [] if unclear."""
        spelled = list(self._pattern.finditer(text))
        known = {*self.ids.values()}
        places = [place for place, token in enumerate(tokens) if token in known]
        if [self.ids[match.group()] for match in spelled] != [tokens[place] for place in places]:
            return []
        return [(*match.span(), place) for match, place in zip(spelled, places, strict=True)]


class Encoded:
    """A text with its token ids, for those of other texts that begin as it does: only their rest is tokenised."""

    def __init__(self, tokenizer: Tokenizer, special: SpecialTokens, text: str, *, where: str) -> None:
        self.text, self.tokens = text, encode(tokenizer, text, where=where)
        self._tokenizer, self._where = tokenizer, where
        self._borders = special.borders(text, self.tokens)
        self._ends = [end for _, end, _ in self._borders]

    def of(self, other: str) -> tuple[int, ...]:
        """The token ids of `other`: from the last special token on that it shares with the text before they differ."""
        last = bisect.bisect_right(self._ends, shared_length(self.text, other)) - 1
        if last < 0:
            return encode(self._tokenizer, other, where=self._where)
        start, _, place = self._borders[last]
        return self.tokens[:place] + encode(self._tokenizer, other[start:], where=self._where)


def shared_length(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one.startswith(other[low:middle], low) else (low, middle - 1)
    return low


def _special_ids(tokenizer: Any) -> dict[str, int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    ids = {str(token.content): token_id for token_id, token in added.items() if token.special}
    names, numbers = getattr(tokenizer, "all_special_tokens", ()), getattr(tokenizer, "all_special_ids", ())
    ids |= dict(zip(map(str, names), numbers, strict=False))
    if not ids and tokenizer.eos_token_id is not None:
        ids = {tokenizer.decode([tokenizer.eos_token_id], skip_special_tokens=False): tokenizer.eos_token_id}
    return {name: token_id for name, token_id in ids.items() if name}
