"""Text of an answer while it grows. Knows a tokenizer; does not know HTTP.

Text is given out once no further token can change it: not before the bytes of a character are complete, and not while
its end may be the beginning of a stop string. So the pieces joined are the text of the whole answer, cut where its stop
string began.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from rl_generation.answer_text import INCOMPLETE, decode, prompt_tail
from rl_generation.chat import decode_rollout
from rl_generation.rollout import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TextStream"]


@final
class TextStream:
    """Decodes one answer, token by token.

    Decodes only the last few tokens each time, beginning where a piece was given out before: a tokenizer writes a
    token's text by its left neighbours. (The scheme is that of Hugging Face's text-generation-inference and of vLLM.)

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
    ) -> None:
        self.length = 0
        self._tokenizer = tokenizer
        self._stop = stop
        self._include_stop_string = include_stop_string
        self._prompt = prompt
        self._window, self._decoded_of_window = prompt_tail(tokenizer, prompt)
        """The last tokens: those of the last piece, then those of which nothing was decoded yet; how many the first."""
        self._held = ""
        self._given = ""

    def push(self, token: int) -> str:
        """Take the next token in; return what text is certain now."""
        self._window.append(token)
        before = decode(self._tokenizer, self._window[: self._decoded_of_window])
        text = decode(self._tokenizer, self._window)
        if len(text) <= len(before) or text.endswith(INCOMPLETE):
            return ""
        self._window = self._window[self._decoded_of_window :]
        self._decoded_of_window = len(self._window)
        self.length += len(text) - len(before)
        return self._give(self._held + text[len(before) :])

    def finish(self, rollout: Rollout) -> str:
        """Return the rest of the text.

        Raises:
            RuntimeError: The text given out so far is not what the whole answer begins with: this tokenizer decodes a
                token otherwise once others follow.
        """
        text = decode_rollout(
            self._tokenizer, rollout, prompt=self._prompt, include_stop_string=self._include_stop_string
        )
        if not text.startswith(self._given):
            raise RuntimeError(
                f"streamed {self._given[-40:]!r}, but the whole answer reads {text[: len(self._given)][-40:]!r}: this "
                f"tokenizer cannot be streamed"
            )
        return text[len(self._given) :]

    def _give(self, text: str) -> str:
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        certain, self._held = text[: len(text) - held], text[len(text) - held :]
        self._given += certain
        return certain


def _overlap(text: str, stop: str) -> int:
    """Characters from the first place in `text` at which `stop` begins, or may begin once more text follows."""
    found = text.find(stop)
    if found >= 0:
        return len(text) - found
    sizes = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
