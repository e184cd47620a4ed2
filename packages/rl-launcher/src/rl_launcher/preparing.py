"""What a run needs before it has a model that computes: judge, data, prompts. The same wherever the run runs.

In two steps, since the first costs little, and should refuse before a model is loaded. Starts nothing.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from rl_algorithms import dpo
from rl_algorithms.chat import Chat, Demonstration, Prompt, TokenizedConversation, TrainOn
from rl_algorithms.data import ConversationRow, Dataset, PreferenceRow, Row, SkippedRows
from rl_backends import BackendSelection, MissingDependencyError, ModelError, select_backend
from rl_launcher.bad_rows import BadRows
from rl_launcher.context_length import ContextLength
from rl_launcher.environments import load_environment
from rl_launcher.errors import LauncherError
from rl_launcher.loading_conversations import held_out_demonstrations
from rl_launcher.loading_data import columns_of, load_dataset
from rl_launcher.loading_policy import stop_token_ids
from rl_launcher.loading_preferences import DataPairs, PreferenceData, TokenizedPair, tokenize_pair
from rl_launcher.parts import Judge
from rl_launcher.recipe_schema import Recipe

__all__ = ["Inputs", "Lessons", "closing", "read_inputs", "tokenize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What is read before any model."""

    selection: BackendSelection
    """Which backend trains, and why."""

    environment: Judge
    """What judges answers."""

    dataset: Dataset
    """The rows."""

    skipped: SkippedRows
    """Which were left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """The rows as tokens."""

    chat: Chat
    prompts: list[Prompt]
    held_out: list[Prompt]
    unasked: int
    """Further ones, that are too long to be answered where nobody would judge it."""

    demonstrations: list[Demonstration | TokenizedConversation]
    """Empty without an sft stage."""

    held_out_demonstrations: list[Demonstration | TokenizedConversation]
    """What its loss is measured by; as empty, and where held-out rows have no answer."""

    pairs: DataPairs | None
    """Of data that prefer one answer to another."""

    skipped: SkippedRows
    """Which rows were left out, when they were read or since."""

    pad_token_id: int
    """A token for places that nobody sees."""


def read_inputs(recipe: Recipe) -> Inputs:
    """Read what costs little, or refuse.

    Raises:
        ValueError: the backend is not installed, the reward is none, the data are bad, or lack what the reward needs.
    """
    selection = select_backend(recipe.policy)
    try:
        selection.require_installed()
    except MissingDependencyError as error:
        raise LauncherError(f"policy.megatron_cfg.enabled=true: {error}") from error
    except ModelError as error:
        raise LauncherError(f"policy.dtensor_cfg.lora_cfg: {error}") from error
    if recipe.cluster.runtime == "in_process":
        _refuse_what_is_not_here(recipe, device=selection.config.device)
    environment = load_environment(recipe.env)
    dataset, skipped = load_dataset(recipe)
    environment.check(columns_of(dataset))
    return Inputs(selection=selection, environment=environment, dataset=dataset, skipped=skipped)


def _refuse_what_is_not_here(recipe: Recipe, *, device: str) -> None:
    """What a model would be loaded for in vain."""
    if device == "cuda" and not torch.cuda.is_available():
        section = "megatron_cfg" if recipe.policy.megatron_cfg.enabled else "dtensor_cfg"
        raise LauncherError(f"policy.{section}.device=cuda, and torch sees no GPU here; say device=cpu")
    if recipe.policy.generation.backend == "vllm" and find_spec("vllm") is None:
        raise LauncherError(
            "policy.generation.backend=vllm, and vLLM is not installed: pip install 'rl-launcher[vllm]', or say "
            "backend=transformers"
        )


def tokenize(recipe: Recipe, inputs: Inputs, *, model: Any, tokenizer: Any) -> Lessons:
    """The rows as the model will read them. Of `model` only its configurations are looked at.

    Raises:
        DataError: a row cannot be read by the model, and `data.on_bad_row` is stop; or none can be.
    """
    chat = Chat(tokenizer, prompt_format=recipe.data.prompt_format, stop_token_ids=stop_token_ids(model, tokenizer))
    context = ContextLength.of(model, max_new_tokens=recipe.policy.generation.max_new_tokens)
    bad = BadRows.after(inputs.skipped, skip=recipe.data.on_bad_row == "skip")
    plan = _Plan.of(recipe, inputs.dataset)

    def asked(row: Row) -> Prompt:
        return context.prompt(chat.prompt(row))

    def imitated(row: Row | ConversationRow) -> Demonstration | TokenizedConversation:
        return context.lesson(_lesson(row, chat, plan.train_on))

    def preferred(row: PreferenceRow) -> TokenizedPair:
        return context.pair(tokenize_pair(row, chat))

    prompts = bad.each(plan.prompts, asked, what="prompts")
    # Without a judge, answers to held-out prompts are only looked at, and nothing hangs on any of them.
    held_out = bad.each(inputs.dataset.held_out, chat.prompt if recipe.env is None else asked, what="held-out prompts")
    demonstrations = bad.each(plan.demonstrations, imitated, what="answers to imitate")
    measured = bad.each(plan.held_out_demonstrations, imitated, what="held-out answers to imitate")
    pairs = bad.each(plan.pairs, preferred, what="pairs")
    held_out_pairs = bad.each(plan.held_out_pairs, preferred, what="held-out pairs")
    readable = bad.without(held_out)
    askable = [prompt for prompt in readable if context.leaves_room_for_an_answer(prompt)]
    return Lessons(
        chat=chat,
        prompts=bad.without(prompts),
        held_out=askable,
        unasked=len(readable) - len(askable),
        demonstrations=bad.without(demonstrations),
        held_out_demonstrations=bad.without(measured),
        pairs=_examples(bad.without(pairs), bad.without(held_out_pairs)) if plan.pairs else None,
        skipped=bad.skipped,
        pad_token_id=chat.stop_token_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
    )


def closing(*parts: object) -> Callable[[], None]:
    """A function that closes what has a `close`, in this order, and only once; an error of one keeps no other open."""
    with ExitStack() as stack:
        for part in reversed(parts):
            close = getattr(part, "close", None)
            if callable(close):
                stack.callback(close)
        return stack.pop_all().close


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Which rows are read in which way."""

    prompts: Sequence[Row]
    demonstrations: Sequence[Row | ConversationRow]
    held_out_demonstrations: Sequence[Row | ConversationRow]
    pairs: Sequence[PreferenceRow]
    held_out_pairs: Sequence[PreferenceRow]
    train_on: TrainOn

    @classmethod
    def of(cls, recipe: Recipe, dataset: Dataset) -> "_Plan":
        pairs, held_out_pairs = (
            (dataset.pairs, dataset.held_out_pairs) if isinstance(dataset, PreferenceData) else ((), ())
        )
        # Where answers are given, nobody answers the prompts that are trained on.
        is_given = bool(pairs) or [*recipe.stages] == ["sft"]
        learns = recipe.sft is not None
        measured = held_out_demonstrations(dataset)[: recipe.evaluation.max_prompts_while_training] if learns else ()
        return cls(
            prompts=() if is_given else dataset.train,
            demonstrations=dataset.demonstrations if learns else (),
            held_out_demonstrations=measured,
            pairs=pairs,
            held_out_pairs=held_out_pairs,
            train_on="all" if recipe.sft is None else recipe.sft.train_on,
        )


def _examples(pairs: Sequence[TokenizedPair], held_out: Sequence[TokenizedPair]) -> DataPairs:
    train, measured = (dpo.prepare([each.tokens for each in part]) for part in (pairs, held_out))
    return DataPairs(train=train, held_out=measured)


def _lesson(row: Row | ConversationRow, chat: Chat, train_on: TrainOn) -> Demonstration | TokenizedConversation:
    if isinstance(row, ConversationRow):
        return chat.conversation(row, train_on=train_on)
    if train_on != "all" or row.answer is None:
        return chat.demonstration(row)
    answered = (*row.messages, {"role": "assistant", "content": row.answer})
    return chat.conversation(row, messages=answered, train_on=train_on)
