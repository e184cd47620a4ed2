"""Which rows the model can read, as token ids: none that is longer than its context may reach a step."""

from dataclasses import dataclass
from typing import Any

from rl_algorithms.chat import Demonstration, Prompt, TokenizedConversation
from rl_algorithms.data import DataError
from rl_launcher.loading_preferences import TokenizedPair

__all__ = ["ContextLength"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLength:
    """Each method returns the row that it is given, or raises a DataError that names it and says what to do."""

    tokens: int | None
    """Tokens that the model can read at most; None where it does not say."""

    max_new_tokens: int
    """Tokens of an answer to a prompt."""

    @classmethod
    def of(cls, model: Any, *, max_new_tokens: int) -> "ContextLength":
        """As the configuration of a Hugging Face model has it."""
        return cls(tokens=getattr(model.config, "max_position_embeddings", None), max_new_tokens=max_new_tokens)

    def leaves_room_for_an_answer(self, prompt: Prompt) -> bool:
        """Whether an answer of `max_new_tokens` fits behind the prompt."""
        return self.tokens is None or len(prompt.tokens) + self.max_new_tokens <= self.tokens

    def prompt(self, prompt: Prompt) -> Prompt:
        """A prompt that is asked."""
        if not self.leaves_room_for_an_answer(prompt):
            raise DataError(
                f"{prompt.row.where}: the prompt has {len(prompt.tokens)} tokens, and with "
                f"policy.generation.max_new_tokens={self.max_new_tokens} it does not fit into the model's context of "
                f"{self.tokens} (max_position_embeddings); shorten it, lower max_new_tokens, or leave such rows out by "
                f"data.on_bad_row=skip"
            )
        return prompt

    def lesson(self, lesson: Demonstration | TokenizedConversation) -> Demonstration | TokenizedConversation:
        """A row that is imitated."""
        said = "prompt and answer have" if isinstance(lesson, Demonstration) else "the conversation has"
        self._refuse_longer(len(lesson.tokens), f"{lesson.row.where}: {said}")
        return lesson

    def pair(self, pair: TokenizedPair) -> TokenizedPair:
        """Two answers, of which one is preferred."""
        for name, tokens in (("chosen", pair.tokens.chosen), ("rejected", pair.tokens.rejected)):
            self._refuse_longer(len(tokens), f"{pair.row.where}: field '{name}': prompt and answer have")
        return pair

    def _refuse_longer(self, length: int, said: str) -> None:
        if self.tokens is not None and length > self.tokens:
            raise DataError(
                f"{said} {length} tokens, and the model's context {self.tokens} (max_position_embeddings); shorten the "
                f"answer, or leave such rows out by data.on_bad_row=skip"
            )
