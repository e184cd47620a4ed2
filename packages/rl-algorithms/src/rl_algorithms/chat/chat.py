"""Rows to prompts and demonstrations, tokens to answers: what the loops use. The two formats are its neighbours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rl_algorithms.chat.plain import Plain
from rl_algorithms.chat.templated import Templated
from rl_algorithms.chat.tokenizer import SpecialTokens, Tokenizer
from rl_algorithms.chat.transcript import Source, TrainOn, Transcript, learnt_messages
from rl_algorithms.choices import check_choice
from rl_algorithms.contracts import EpisodeStart, Message
from rl_algorithms.rows import DataError, Row

__all__ = ["Chat", "Demonstration", "Prompt", "PromptFormat", "TokenizedConversation"]

PromptFormat: TypeAlias = Literal["chat", "plain"]

OWN_OPTIONS = {"add_generation_prompt", "tokenize", "tools", "return_dict", "return_assistant_tokens_mask"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The start of an episode, made ready for an engine."""

    tokens: tuple[int, ...]
    """Token ids, up to where the answer begins."""

    row: Row
    """Where it comes from."""

    messages: tuple[Message, ...]
    """What `tokens` say: the row's messages, or those that an environment began with."""

    tools: tuple[Mapping[str, object], ...] = ()
    """JSON schemas of the tools that `tokens` tell of."""

    state: object = None
    """What the environment wants back with the first answer."""

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError(
                f"{self.row.where}: a prompt without tokens; the first token of an answer needs one before it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A row with its answer, made ready for SFT."""

    tokens: tuple[int, ...]
    """Prompt and answer, the stop token included."""

    prompt_length: int
    """How many of `tokens` are the prompt."""

    row: Row
    """Where it comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedConversation:
    """A conversation with the tokens that are learnt, made ready for SFT."""

    tokens: tuple[int, ...]
    """Token ids, up to the last that is learnt."""

    trainable: tuple[bool, ...]
    """For each of `tokens`, whether it is learnt; never the first."""

    row: Source
    """Where it comes from."""


class Chat:
    """Turns rows into token ids and token ids into answers, in one prompt format. May be used by several threads.

    Args:
        tokenizer: of the policy's vocabulary.
        prompt_format: `"chat"` renders messages with the tokenizer's chat template; `"plain"` concatenates their text.
        stop_token_ids: the tokens that end an answer; the first is what a demonstration in plain format ends with.
        template_options: variables of the chat template's own, as `{"enable_thinking": False}`; for every rendering.

    Raises:
        ValueError: `"chat"` without a chat template; no stop token, or one that the tokenizer does not have; a template
            option in plain format, or one that the template never reads.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_format: PromptFormat,
        stop_token_ids: Sequence[int],
        template_options: Mapping[str, object] | None = None,
    ) -> None:
        check_choice("prompt_format", prompt_format, PromptFormat)
        if prompt_format == "chat" and not tokenizer.chat_template:
            raise ValueError(
                "prompt_format='chat' needs a tokenizer with a chat template, and this one has none; "
                "set it to 'plain' (text as it is, no roles), or give the tokenizer a template"
            )
        if not stop_token_ids:
            raise ValueError("answers need a stop token, and the tokenizer has no end-of-sequence token; set eos_token")
        for token in stop_token_ids:
            if not isinstance(token, int) or not 0 <= token < len(tokenizer):
                raise ValueError(
                    f"stop_token_ids={list(stop_token_ids)} has {token!r}, which is no token of the tokenizer's "
                    f"{len(tokenizer)}; a rollout would never end with it"
                )
        options = dict(template_options or {})
        if taken := OWN_OPTIONS & options.keys():
            raise ValueError(
                f"template_options has {', '.join(sorted(taken))}, which each call sets by itself; remove it"
            )
        if options and prompt_format == "plain":
            raise ValueError(f"template_options={options} are for a chat template, and prompt_format='plain' has none")
        self._tokenizer = tokenizer
        self._special = SpecialTokens(tokenizer)
        self.stop_token_ids = tuple(stop_token_ids)
        self._format: Plain | Templated = (
            Plain(tokenizer, special=self._special, stop_token_ids=self.stop_token_ids)
            if prompt_format == "plain"
            else Templated(
                tokenizer, special=self._special, stop_token_ids=self.stop_token_ids, template_options=options
            )
        )

    def prompt(self, row: Row) -> Prompt:
        """The row's messages as token ids, ready for the answer to be sampled.

        Raises:
            DataError: the tokenizer has no token for a part of it, or the template no place.
        """
        return self._begin(Transcript.of(row), row, state=None)

    def start(self, start: EpisodeStart, *, row: Row) -> Prompt:
        """As `prompt`, for an environment that says itself how an episode on `row` begins.

        Raises:
            DataError: as `prompt`; it names the row.
        """
        said = Transcript(messages=start.messages, tools=start.tools, where=row.where)
        return self._begin(said, row, state=start.state)

    def observation(
        self,
        messages: Sequence[Message],
        answer: Sequence[int],
        observations: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        where: str = "this conversation",
    ) -> tuple[int, ...]:
        """The token ids between a sampled answer and the next: the observations, and what a template puts around them.

        Prompt, answer as sampled, these tokens, next answer: that is the whole row. `answer` (the sampled ids, after
        `messages`) is looked at only for whether a stop token ended it: where none did, the template's comes first.

        Observations say text, whoever wrote it: where it spells a special token it is tokenised in pieces that hold
        none, so that it ends no turn and begins none. (Prompts and demonstrations are taken at their word.)

        Raises:
            TextError: the tokenizer has no tokens for what the observations say; with other words they could be said.
            DataError: the template writes no such thing: it drops, moves or repeats earlier turns, leaves an
                observation out, or ends an answer without a stop token.
        """
        said = Transcript(messages=tuple(messages), tools=tuple(tools), where=where)
        return self._format.between(said, observations, stopped=bool(answer) and answer[-1] in self.stop_token_ids)

    def demonstration(self, row: Row) -> Demonstration:
        """The row's messages and its answer, ended by a stop token.

        Raises:
            DataError: the row has no answer; or the template renders a conversation with the answer as something else
                than the prompt followed by the answer and a stop token, so that the answer's tokens are not known.
        """
        if row.answer is None:
            raise DataError(
                f"{row.where}: field 'answer' is missing, and SFT needs it as the demonstration; "
                f"add it to every row, or switch SFT off"
            )
        said = Transcript.of(row).then({"role": "assistant", "content": row.answer})
        tokens, [(start, end)] = self._format.continued(said, [len(row.messages)])
        return Demonstration(tokens=tokens[:end], prompt_length=start, row=row)

    def conversation(
        self, row: Source, *, messages: Sequence[Message] | None = None, train_on: TrainOn = "assistant"
    ) -> TokenizedConversation:
        """A conversation with its answers, and which tokens are learnt: the answers, each with its stop token.

        `messages` stand for the row's own where given, as the two continuations of a preference do. A message's
        `train` (true or false) overrules `train_on`, and no template sees it. Messages after the last that is learnt
        are left out before rendering, so that the last is rendered as what it will be when sampled: an end.

        Where the template has `{% generation %}` marks they say which tokens are the answers'; a mark that ends just
        before the stop token is stretched over it, one that goes on behind it cut. Otherwise each answer is found by
        comparing renderings with and without it.

        Raises:
            ValueError: `train_on` is none of its values.
            DataError: nothing is to be learnt; `train` is misused; the tokens of an answer cannot be told from
                others; or an answer does not end with a stop token. It names the row, and the message where it can.
        """
        turns = tuple(row.messages if messages is None else messages)
        if isinstance(self._format, Templated) and [turn["role"] for turn in turns] == ["assistant"]:
            raise DataError(
                f"{row.where}: the row is one text that answers nothing, as a field 'text' is, and a template would "
                f"make a turn of it; use prompt_format='plain', or give it 'messages'"
            )
        said = Transcript.of(row, turns)
        if train_on == "all":
            return self._everything(row, said, turns)
        learnt = learnt_messages(turns, train_on=train_on, where=row.where)
        tokens, spans = self._format.answered(said.upto(learnt[-1] + 1), learnt)
        end = spans[-1][1]
        learnt_tokens = {place for span in spans for place in range(*span)} - {0}
        return TokenizedConversation(
            tokens=tokens[:end], trainable=tuple(place in learnt_tokens for place in range(end)), row=row
        )

    def text(self, tokens: Sequence[int]) -> str:
        """An answer as text, without the stop token that ends it.

        Other special tokens stay visible, and ids beyond the tokenizer's, which a padded embedding may give: leaving
        them out would make an answer that is wrong look right.
        """
        answer = tokens[:-1] if tokens and tokens[-1] in self.stop_token_ids else tokens
        if not answer or max(answer) < len(self._tokenizer):
            return self._tokenizer.decode(answer, skip_special_tokens=False)
        return "".join(
            self._tokenizer.decode([token], skip_special_tokens=False) if token < len(self._tokenizer) else f"<{token}>"
            for token in answer
        )

    def special_tokens_in(self, text: str) -> tuple[str, ...]:
        """The special tokens that `text` spells, in its order: put into a prompt, they would be more than text."""
        return self._special.found_in(text)

    def _begin(self, said: Transcript, row: Row, *, state: object) -> Prompt:
        tokens = self._format.prompt(said)
        return Prompt(tokens=tokens, row=row, messages=said.messages, tools=said.tools, state=state)

    def _everything(self, row: Source, said: Transcript, turns: Sequence[Message]) -> TokenizedConversation:
        if marked := [index for index, message in enumerate(turns) if "train" in message]:
            raise DataError(
                f"{row.where}: field 'messages[{marked[0]}].train' says what is learnt, and so does train_on='all'; "
                f"remove the one or the other"
            )
        tokens, _ = self._format.answered(said, ())
        return TokenizedConversation(tokens=tokens, trainable=(False, *[True] * (len(tokens) - 1)), row=row)
