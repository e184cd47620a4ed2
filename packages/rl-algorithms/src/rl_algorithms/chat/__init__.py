"""Between text and token ids: prompts, demonstrations and observations in, answers out.

Imports no tokenizer library: `Tokenizer` says what is used of one. Sampled tokens are trained on as they are; nothing
here ever re-tokenises them.
"""

from rl_algorithms.chat.chat import Chat, Demonstration, Prompt, PromptFormat, TokenizedConversation
from rl_algorithms.chat.tokenizer import TextError, Tokenizer
from rl_algorithms.chat.transcript import TrainOn

__all__ = [
    "Chat",
    "Demonstration",
    "Prompt",
    "PromptFormat",
    "TextError",
    "TokenizedConversation",
    "Tokenizer",
    "TrainOn",
]
