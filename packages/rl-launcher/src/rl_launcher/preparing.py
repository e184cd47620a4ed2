"""What a run needs before it has a model that computes: judge, data, prompts. The same wherever the run runs.

In two steps, since the first costs little, and should refuse before a model is loaded. Starts nothing.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch

from rl_algorithms.chat import Chat, Demonstration, Prompt, TokenizedConversation, TrainOn
from rl_algorithms.data import ConversationRow, DataError, Dataset, Row, SkippedRows
from rl_backends import BackendSelection, MissingDependencyError, ModelError, select_backend
from rl_launcher.environments import load_environment
from rl_launcher.errors import LauncherError
from rl_launcher.loading_conversations import held_out_demonstrations
from rl_launcher.loading_data import columns_of, load_dataset
from rl_launcher.loading_policy import stop_token_ids
from rl_launcher.loading_preferences import DataPairs, PreferenceData, tokenize_pairs
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
        DataError: a row does not fit into the model's context.
    """
    chat = Chat(tokenizer, prompt_format=recipe.data.prompt_format, stop_token_ids=stop_token_ids(model, tokenizer))
    pairs = None
    if isinstance(inputs.dataset, PreferenceData):
        pairs = tokenize_pairs(inputs.dataset, chat, context=_context(model))
    # Where answers are given, nobody answers the prompts that are trained on.
    is_given = pairs is not None or [*recipe.stages] == ["sft"]
    prompts = [] if is_given else [chat.prompt(row) for row in inputs.dataset.train]
    held_out = [chat.prompt(row) for row in inputs.dataset.held_out]
    demonstrations, measured = _demonstrations(recipe, inputs.dataset, chat)
    room = _room(model, max_new_tokens=recipe.policy.generation.max_new_tokens)
    asked = held_out
    if recipe.env is None:  # then answers are only looked at, and nothing hangs on any of them
        asked = [prompt for prompt in held_out if len(prompt.tokens) <= room]
    _check_lengths(model, [*prompts, *asked], [*demonstrations, *measured], recipe=recipe)
    return Lessons(
        chat=chat,
        prompts=prompts,
        held_out=asked,
        unasked=len(held_out) - len(asked),
        demonstrations=demonstrations,
        held_out_demonstrations=measured,
        pairs=pairs,
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


TokenizedRows: TypeAlias = list[Demonstration | TokenizedConversation]


def _demonstrations(recipe: Recipe, dataset: Dataset, chat: Chat) -> tuple[TokenizedRows, TokenizedRows]:
    """To learn from, and to measure by; both empty without an sft stage."""
    if recipe.sft is None:
        return [], []
    train_on = recipe.sft.train_on
    learnt, measured = dataset.demonstrations, held_out_demonstrations(dataset)
    measured = measured[: recipe.evaluation.max_prompts_while_training]
    return [_lesson(row, chat, train_on) for row in learnt], [_lesson(row, chat, train_on) for row in measured]


def _lesson(row: Row | ConversationRow, chat: Chat, train_on: TrainOn) -> Demonstration | TokenizedConversation:
    if isinstance(row, ConversationRow):
        return chat.conversation(row, train_on=train_on)
    if train_on != "all" or row.answer is None:
        return chat.demonstration(row)
    answered = (*row.messages, {"role": "assistant", "content": row.answer})
    return chat.conversation(row, messages=answered, train_on=train_on)


def _context(model: Any) -> int | None:
    context: int | None = getattr(model.config, "max_position_embeddings", None)
    return context


def _room(model: Any, *, max_new_tokens: int) -> float:
    """Tokens that a prompt may have."""
    context = _context(model)
    return math.inf if context is None else context - max_new_tokens


def _check_lengths(model: Any, prompts: list[Prompt], demonstrations: TokenizedRows, *, recipe: Recipe) -> None:
    """Refuse now what would fail, or be wrong, in the middle of a run."""
    context, max_new_tokens = _context(model), recipe.policy.generation.max_new_tokens
    if context is None:
        return
    longest = max(prompts, key=lambda prompt: len(prompt.tokens), default=None)
    if longest is not None and len(longest.tokens) > _room(model, max_new_tokens=max_new_tokens):
        raise DataError(
            f"{longest.row.where}: the prompt has {len(longest.tokens)} tokens, and with "
            f"policy.generation.max_new_tokens={max_new_tokens} it does not fit into the model's context of {context} "
            f"(max_position_embeddings); shorten it, or lower max_new_tokens"
        )
    for demonstration in demonstrations:
        if len(demonstration.tokens) > context:
            said = "prompt and answer have" if isinstance(demonstration, Demonstration) else "the conversation has"
            raise DataError(
                f"{demonstration.row.where}: {said} {len(demonstration.tokens)} tokens, and the model's context "
                f"{context} (max_position_embeddings); shorten the answer"
            )
