"""Plain format: the text of messages as it is, one after another; no roles, no tools, no template.

What the user and the environment say between two answers is one piece of text, tokenised by itself, so a conversation
has the same tokens in SFT as when it is sampled.
"""

from collections.abc import Sequence

from rl_algorithms.chat.tokenizer import SpecialTokens, Tokenizer, encode
from rl_algorithms.chat.transcript import Answered, Span, Transcript, content_of
from rl_algorithms.contracts import Message
from rl_algorithms.rows import DataError

__all__ = ["Plain"]


class Plain:
    """Messages to token ids, without a template."""

    def __init__(self, tokenizer: Tokenizer, *, special: SpecialTokens, stop_token_ids: tuple[int, ...]) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._stops = stop_token_ids

    def prompt(self, transcript: Transcript) -> tuple[int, ...]:
        """All messages, begun as the tokenizer begins a sequence."""
        self._check_tools(transcript)
        text = "".join(content_of(message, transcript.where) for message in transcript.messages)
        tokens = encode(self._tokenizer, text, where=transcript.where, special=True)
        if tokens[-1] in self._stops:
            raise DataError(
                f"{transcript.where}: the prompt {text!r:.60} ends with the stop token {tokens[-1]}, so the policy "
                f"would be asked to go on after an end; switch off what adds it to the tokenizer (add_eos_token)"
            )
        return tokens

    def between(self, transcript: Transcript, observations: Sequence[Message], *, stopped: bool) -> tuple[int, ...]:
        """The observations; whether the answer before them ended with a stop token makes no difference."""
        del stopped
        where = transcript.where
        pieces = self._special.pieces("".join(content_of(message, where) for message in observations), where=where)
        return tuple(token for piece in pieces for token in encode(self._tokenizer, piece, where=where))

    def answered(self, transcript: Transcript, learnt: Sequence[int]) -> Answered:
        """All tokens, and where the answers `learnt` stand: each ends with the first stop token."""
        self._check_tools(transcript)
        tokens: tuple[int, ...] = ()
        spans: list[Span] = []
        start = 0
        for index in transcript.answers:
            if not start:
                tokens = self.prompt(transcript.upto(index)) if index else self._nothing()
            elif start < index:
                tokens += self._said(transcript.where, transcript.messages[start:index])
            begin = len(tokens)
            tokens += (*self._said(transcript.where, transcript.messages[index : index + 1]), self._stops[0])
            if index in learnt:
                spans.append((begin, len(tokens)))
            start = index + 1
        if not start:  # nobody answers
            return self.prompt(transcript), spans
        if start < len(transcript.messages):
            tokens += self._said(transcript.where, transcript.messages[start:])
        return tokens, spans

    def continued(self, transcript: Transcript, learnt: Sequence[int]) -> Answered:
        """The same: what comes before an answer is always what an engine would be asked."""
        return self.answered(transcript, learnt)

    def _check_tools(self, transcript: Transcript) -> None:
        if transcript.tools:
            raise DataError(
                f"{transcript.where}: there are tools, and prompt_format='plain' has no place to tell the policy of "
                f"them; use 'chat' with a template that renders them"
            )

    def _nothing(self) -> tuple[int, ...]:
        """What the tokenizer begins a sequence with, where the assistant speaks first; it may be nothing."""
        return tuple(self._tokenizer("", add_special_tokens=True)["input_ids"])

    def _said(self, where: str, messages: Sequence[Message]) -> tuple[int, ...]:
        return encode(self._tokenizer, "".join(content_of(message, where) for message in messages), where=where)
