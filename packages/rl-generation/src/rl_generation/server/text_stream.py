"""Text of an answer while it grows. Knows a tokenizer; does not know HTTP.

Text is given out once no further token can change it: not before it is certain, and not while its end may be the
beginning of a stop string. So the pieces joined are the text of the whole answer, cut where its stop string began.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, final

from rl_generation.detokenizer import Detokenizer
from rl_generation.rollout import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TextStream"]


@final
class TextStream:
    """Decodes one answer, token by token.

    Args:
        tokenizer: Of the model.
        stop: Strings that may end the answer.
        include_stop_string: Whether its text holds the one that did.
        prompt: What it answers.
        kept: Special tokens that are written out, with their text; the others are left out.

    Attributes:
        length: Characters decoded so far, given out or not; the text offset of the next token.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        stop: Sequence[str],
        include_stop_string: bool,
        prompt: Sequence[int] = (),
        kept: Mapping[int, str] | None = None,
    ) -> None:
        self.length = 0
        self._tokenizer = tokenizer
        self._text = Detokenizer(tokenizer, prompt)
        self._stop = stop
        self._include_stop_string = include_stop_string
        self._kept = kept or {}
        self._held = ""

    def push(self, token: int, *, is_last: bool = False) -> str:
        """Take the next token in; return what text is certain now. `is_last` of a stop token, which is left out."""
        if token in self._kept and not is_last:
            fresh = self._text.pending + self._kept[token]
            self._text = Detokenizer(self._tokenizer, [token])
        else:
            fresh = self._text.push(token)
        self.length += len(fresh)
        text = self._held + fresh
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        certain, self._held = text[: len(text) - held], text[len(text) - held :]
        return certain

    def finish(self, rollout: Rollout) -> str:
        """Return the rest of the text, up to the stop string that ended the answer where one did."""
        text = self._held + self._text.pending
        start = text.find(rollout.stop_reason) if isinstance(rollout.stop_reason, str) else -1
        if start < 0:
            return text
        return text[: start + len(str(rollout.stop_reason)) if self._include_stop_string else start]


def _overlap(text: str, stop: str) -> int:
    """Characters from the first place in `text` at which `stop` begins, or may begin once more text follows."""
    found = text.find(stop)
    if found >= 0:
        return len(text) - found
    sizes = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
