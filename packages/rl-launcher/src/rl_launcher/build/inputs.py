"""What a run reads before it loads a model: the backend selection, the environment and the data.

`read_inputs` is cheap and refuses early; `tokenize` needs the tokenizer and the model's configuration. Reading and
tokenizing themselves are `rl_algorithms.data` and `rl_algorithms.tokenized_data`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from rl_algorithms.chat import Chat, Prompt
from rl_algorithms.data import (
    DataError,
    Dataset,
    LabelledData,
    PreferenceData,
    Row,
    SkippedRows,
    Source,
    read_rows,
)
from rl_algorithms.data import held_out_demonstrations as held_out_responses
from rl_algorithms.data.config import read_configured
from rl_algorithms.data.datasets import check_rows
from rl_algorithms.environments.counted_environment import Judge
from rl_algorithms.tokenized_data import PreferenceExamples, TokenizedData
from rl_algorithms.tokenized_data import tokenize as tokenize_dataset
from rl_backends import BackendSelection, MissingDependencyError, ModelError, select_backend
from rl_backends.loading.source import stop_token_ids
from rl_launcher.build.environments import NoEnvironment, load_environment
from rl_launcher.build.models import lora_key
from rl_launcher.errors import Refusal
from rl_launcher.schema import HOW_TO_JUDGE, DataConfig, Recipe
from rl_launcher.user_code import NO_OBJECTS, Objects, call, is_import_string


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What is read before any model."""

    selection: BackendSelection
    """Which backend trains, and why."""

    environment: Judge
    """What scores responses."""

    dataset: Dataset
    """The rows."""

    skipped: SkippedRows
    """Which rows were left out."""

    reward_data: PreferenceData | None = None
    """The pairs of `reward_model.data`; None where there is no such section."""

    reward_skipped: SkippedRows | None = None
    """Which of them were left out."""

    validation: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    """The rows of `evaluation.sets`, by name."""


def read_inputs(recipe: Recipe, objects: Objects = NO_OBJECTS) -> Inputs:
    """Read what costs little, or refuse; objects take precedence over what the recipe names.

    Raises:
        ValueError: the backend is not installed, the reward is not a function, the data are bad, or they lack a column
            that the reward needs.
    """
    selection = select_backend(recipe.policy)
    try:
        selection.require_installed()
    except MissingDependencyError as error:
        raise Refusal(f"policy.megatron_cfg.enabled=true: {error}") from error
    except ModelError as error:
        raise Refusal(f"{lora_key(recipe.policy)}: {error}") from error
    in_process = recipe.cluster.runtime == "in_process"
    if in_process and selection.config.device == "cuda" and not torch.cuda.is_available():
        section = "megatron_cfg" if recipe.policy.megatron_cfg.enabled else "dtensor_cfg"
        raise Refusal(f"policy.{section}.device=cuda, and torch sees no GPU here; set device=cpu")
    # On a running cluster the GPUs and vLLM may be on other nodes; one that the run starts is on this machine.
    is_here = in_process or recipe.cluster.address is None
    wants_vllm = recipe.has_local_engine and recipe.policy.generation.backend == "vllm"
    if is_here and wants_vllm and find_spec("vllm") is None:
        raise Refusal(
            "policy.generation.backend=vllm, and vLLM is not installed: pip install 'rl-launcher[vllm]', or set "
            "backend=transformers"
        )
    environment = load_environment(recipe.env, objects)
    dataset, skipped = load_dataset(recipe, objects)
    environment.check(dataset.columns)
    reward_data, reward_skipped = load_reward_data(recipe)
    return Inputs(
        selection=selection,
        environment=environment,
        dataset=dataset,
        skipped=skipped,
        reward_data=reward_data,
        reward_skipped=reward_skipped,
        validation=load_validation(recipe, dataset, environment),
    )


def tokenize(recipe: Recipe, inputs: Inputs, *, model: Any, tokenizer: Any) -> TokenizedData:
    """Tokenize the rows that the recipe's stages need. Of `model` only the configuration is used.

    Raises:
        DataError: a row cannot be tokenized or is too long, and `data.on_bad_row` is stop; or no row is left.
    """
    return tokenize_dataset(
        inputs.dataset,
        Chat(
            tokenizer,
            prompt_format=recipe.data.prompt_format,
            stop_token_ids=ending_token_ids(recipe, model, tokenizer),
            template_options=recipe.data.chat_template_kwargs,
        ),
        context_length=getattr(model.config, "max_position_embeddings", None),
        max_new_tokens=max(recipe.policy.generation.max_new_tokens, recipe.evaluation.max_new_tokens or 0),
        sample=[*recipe.stages] != ["sft"],
        score=not isinstance(inputs.environment, NoEnvironment),
        imitate=None if recipe.sft is None else recipe.sft.train_on,
        max_held_out_demonstrations=recipe.evaluation.max_prompts_while_training,
        skipped=inputs.skipped,
        skip_bad_rows=recipe.data.on_bad_row == "skip",
    )


def ending_token_ids(recipe: Recipe, model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a response: the model's, and those of the recipe.

    Raises:
        Refusal: the recipe names a token that the tokenizer does not have.
    """
    others = recipe.policy.generation.stop_token_ids
    if unknown := [token for token in others if not 0 <= token < len(tokenizer)]:
        raise Refusal(
            f"policy.generation.stop_token_ids has {unknown[0]}, and the tokenizer of policy.model_name="
            f"{recipe.policy.model_name} has the tokens 0 to {len(tokenizer) - 1}"
        )
    return tuple(dict.fromkeys((*stop_token_ids(model, tokenizer), *others)))


def tokenize_reward_pairs(
    recipe: Recipe, inputs: Inputs, tokenized: TokenizedData, *, model: Any
) -> PreferenceExamples | None:
    """Tokenize what the stage `reward_model` learns from: `reward_model.data`, or else the pairs of `data`.

    Raises:
        DataError: as `tokenize`.
    """
    stage = recipe.reward_model
    if stage is None or stage.data is None:
        return None if stage is None else tokenized.pairs
    assert inputs.reward_data is not None  # read_inputs has read it
    return tokenize_dataset(
        inputs.reward_data,
        tokenized.chat,
        context_length=getattr(model.config, "max_position_embeddings", None),
        max_new_tokens=0,
        score=False,
        skipped=inputs.reward_skipped,
        skip_bad_rows=stage.data.on_bad_row == "skip",
    ).pairs


def load_dataset(recipe: Recipe, objects: Objects = NO_OBJECTS) -> tuple[Dataset, SkippedRows]:
    """Read the data set in the form that the recipe's stages need; also return which of its rows were left out.

    Args:
        recipe: names the data by `data.source`, unless `objects.data` is given.
        objects: `data` and `held_out` may each be a list of dicts, a `datasets.Dataset` or a path. Rows replace
            `data.source` and what selects a part of it (`split`, `name`, `revision`); held-out ones replace
            `data.held_out_share`.

    Raises:
        DataError: the data cannot be read, or one of the rows is bad; the message names file, line and field.
            Or an object is of no kind that can be read.
        Refusal: the function of `data.source` fails; a package is missing that reads the format; or nothing that is
            held out could measure the run.
    """
    config = recipe.data
    if isinstance(objects.data, str | Path):
        config = replace(config, source=str(objects.data))
    given = None if objects.data is None or isinstance(objects.data, str | Path) else objects.data
    held_out = objects.held_out
    if isinstance(held_out, str | Path):
        held_out = Source(path=str(held_out))
    elif held_out is not None:
        held_out = check_rows("held_out", held_out)
    skipped = SkippedRows()
    if isinstance(given, Dataset):
        dataset = given
    elif given is None and is_import_string(config.source):
        if held_out is not None:
            raise Refusal(f"data.source={config.source} is a function, which holds out its own rows; omit held_out")
        dataset = _made_by_function(config, form=recipe.form, stage=recipe.headline if recipe.stages else "")
    else:
        try:
            dataset = read_configured(
                config,
                rows=None if given is None else check_rows("data", given),
                held_out=held_out,
                form=recipe.form,
                imitates=recipe.sft is not None,
                sampled_by=recipe.sampled_by,
                seed=recipe.seed,
                skipped=skipped,
            )
        except ImportError as error:
            raise Refusal(f"data.source={error}") from error
    judged = recipe.env is not None or objects.reward is not None or objects.environment is not None
    if not judged and [*recipe.stages] == ["sft"] and not held_out_responses(dataset):
        raise Refusal(
            f"env is missing, and no held-out row of data.source={config.source} has an answer that counts, so that "
            f"nothing would be measured; give them answers, or {HOW_TO_JUDGE}"
        )
    return dataset, skipped


def load_validation(recipe: Recipe, dataset: Dataset, environment: Judge) -> dict[str, list[Row]]:
    """Read `evaluation.sets`.

    Raises:
        DataError: a set cannot be read, a row is bad, or its prompt is also trained on.
        Refusal: nothing scores responses; or a package is missing that reads the format.
    """
    found: dict[str, list[Row]] = {}
    if recipe.evaluation.sets and recipe.env is None and not recipe.is_judged_by_model:
        names = ", ".join(recipe.evaluation.sets)
        raise Refusal(
            f"evaluation.sets names {names}, whose responses need a reward, and env is missing; {HOW_TO_JUDGE}"
        )
    trained_on = {row.question for row in dataset.train} if recipe.evaluation.sets else set()
    for name, config in recipe.evaluation.sets.items():
        try:
            rows = read_rows(
                config.rows,
                kind=Row,
                columns=config.columns,
                name=f"evaluation.sets.{name}",
                prompts=recipe.data.prompts,
            )
        except ImportError as error:
            raise Refusal(f"evaluation.sets.{name}.source={error}") from error
        for row in rows:
            if row.question in trained_on:
                raise DataError(
                    f"{row.where}: the prompt {row.prompt!r:.200} of evaluation.sets.{name} is also trained on; its "
                    f"accuracy would measure memory. Remove it from one of the two"
                )
        if recipe.env is not None:
            environment.check({column for row in rows for column in row.columns})
        found[name] = rows
    return found


def tokenize_validation(
    recipe: Recipe, inputs: Inputs, tokenized: TokenizedData, *, model: Any
) -> dict[str, list[Prompt]]:
    """Tokenize the rows of `evaluation.sets`.

    Raises:
        DataError: a prompt leaves no room for a response.
    """
    context = getattr(model.config, "max_position_embeddings", None)
    length = recipe.evaluation.max_new_tokens or recipe.policy.generation.max_new_tokens
    found = {name: [tokenized.chat.prompt(row) for row in rows] for name, rows in inputs.validation.items()}
    for name, prompts in found.items():
        for prompt in prompts:
            if context is not None and len(prompt.tokens) + length > context:
                raise DataError(
                    f"{prompt.row.where}: the prompt has {len(prompt.tokens)} tokens, and with a response of {length} "
                    f"(evaluation.max_new_tokens) it does not fit into the model's context of {context}; leave it out "
                    f"of evaluation.sets.{name}, or lower evaluation.max_new_tokens"
                )
    return found


def load_reward_data(recipe: Recipe) -> tuple[PreferenceData | None, SkippedRows | None]:
    """Read the pairs of `reward_model.data`; also return which of its rows were left out. None without the section.

    Raises:
        DataError: the data cannot be read, or one of the rows is bad; the message names file, line and field.
        Refusal: a function returns something else than pairs, or a package is missing that reads the format.
    """
    config = None if recipe.reward_model is None else recipe.reward_model.data
    if config is None:
        return None, None
    skipped = SkippedRows()
    if is_import_string(config.source):
        dataset = _made_by_function(config, form="preferences", stage="reward_model", key="reward_model.data")
    else:
        try:
            dataset = read_configured(config, form="preferences", seed=recipe.seed, skipped=skipped)
        except ImportError as error:
            raise Refusal(f"reward_model.data.source={error}") from error
    assert isinstance(dataset, PreferenceData)
    return dataset, skipped


def _made_by_function(config: DataConfig, *, form: str | None = None, stage: str = "", key: str = "data") -> Dataset:
    defaults = DataConfig(source=config.source)
    of_rows = ("held_out_share", "held_out", "held_out_split", "mix", "mix_splits", "mix_weights", "system_prompt")
    for name in (*of_rows, "prompt_template", "columns", "on_bad_row", "split", "name", "revision"):
        if (value := getattr(config, name)) != getattr(defaults, name):
            raise Refusal(
                f"{key}.{name}={value} is for rows that are read from a file or a data set, and {key}.source="
                f"{config.source} is a function, which reads, checks and holds out its own; leave {key}.{name} out"
            )
    kinds: dict[str, type[Dataset]] = {"preferences": PreferenceData, "labelled": LabelledData}
    kind = kinds.get(form or "", Dataset)
    dataset = call(config.source, wanted=f"a function that returns a {kind.__name__} ({key}.source)")
    if not isinstance(dataset, kind):
        needed = f", which {stage} learns from" if kind is not Dataset else ""
        raise Refusal(
            f"{key}.source={config.source} returned {type(dataset).__name__}, and must return a "
            f"rl_algorithms.data.{kind.__name__}{needed}"
        )
    return dataset


def closing(*parts: object) -> Callable[[], None]:
    """A function that closes what has a `close`, in this order, and only once; an error of one keeps no other open."""
    with ExitStack() as stack:
        for part in reversed(parts):
            close = getattr(part, "close", None)
            if callable(close):
                stack.callback(close)
        return stack.pop_all().close
