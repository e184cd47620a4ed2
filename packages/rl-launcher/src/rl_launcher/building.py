"""The parts of a run, from a recipe, in this process: policy, engine, refit, environment, data. Nothing runs yet.

What can be refused cheaply is refused first: the reward and the data are read before any model is loaded.
"""

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rl_algorithms.chat import Chat, Demonstration, Prompt
from rl_algorithms.data import DataError, Dataset, read_jsonl, split_held_out
from rl_algorithms.environments import RewardFunctionEnvironment
from rl_backends import (
    BackendSelection,
    MissingDependencyError,
    check_generation_config,
    check_vocabulary,
    load_causal_lm,
    load_tokenizer,
    select_backend,
)
from rl_backends.selection import Backend
from rl_generation import Sampling, TransformersEngine
from rl_launcher.errors import LauncherError
from rl_launcher.recipe import load_object
from rl_launcher.recipe_schema import DataConfig, GenerationConfig, PolicyConfig, Recipe
from rl_launcher.weight_source import weight_source
from rl_launcher.weight_sync import WeightSync
from rl_refit import ModuleSink, Refit

__all__ = ["Parts", "build"]

HELD_OUT_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """All that a run is made of."""

    policy: Backend
    selection: BackendSelection
    """Which backend trains, and why."""
    engine: TransformersEngine
    weight_sync: WeightSync
    environment: RewardFunctionEnvironment
    chat: Chat
    tokenizer: Any
    prompts: list[Prompt]
    """To learn from."""
    held_out: list[Prompt]
    demonstrations: list[Demonstration]
    """Empty without an sft stage."""


def build(recipe: Recipe) -> Parts:
    """Make every part, or refuse with the one reason.

    Raises:
        ValueError: whatever a part refuses: see `ModelError`, `PlanError`, `DataError`, `ImportStringError`.
    """
    selection = _installed_backend(recipe.policy)
    reward = _load_function(recipe.env.reward, wanted="a reward function (env.reward)")
    environment = RewardFunctionEnvironment(reward=reward, on_error=recipe.env.on_error)
    dataset = load_dataset(recipe.data, seed=recipe.seed)
    environment.check({name for row in dataset.train for name in row.columns})
    model, tokenizer = load_policy(recipe.policy, seed=recipe.seed)
    chat = Chat(tokenizer, prompt_format=recipe.data.prompt_format, stop_token_ids=stop_token_ids(model, tokenizer))
    prompts = [chat.prompt(row) for row in dataset.train]
    held_out = [chat.prompt(row) for row in dataset.held_out]
    demonstrations = [] if recipe.sft is None else [chat.demonstration(row) for row in dataset.demonstrations]
    _check_lengths(model, [*prompts, *held_out], demonstrations, max_new_tokens=recipe.policy.generation.max_new_tokens)
    own = copy.deepcopy(model)  # weights of the engine's own, refitted like those of any other
    policy = selection.make(model)
    engine = TransformersEngine(
        _in_dtypes_of(policy, own).to(selection.config.device),
        stop_token_ids=chat.stop_token_ids,
        pad_token_id=chat.stop_token_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        max_batch_size=recipe.policy.generation.max_batch_size,
        seed=recipe.seed,
        # No answer from weights that a refit has left torn; the sink is made of the engine, below.
        ready=lambda: sink.check(),  # noqa: PLW0108
    )
    sink = ModuleSink(engine.model, on_commit=engine.commit_version)
    refit = Refit(weight_source(policy), sink, **asdict(recipe.policy.refit))
    return Parts(
        policy=policy,
        selection=selection,
        engine=engine,
        weight_sync=WeightSync(refit),
        environment=environment,
        chat=chat,
        tokenizer=tokenizer,
        prompts=prompts,
        held_out=held_out,
        demonstrations=demonstrations,
    )


def _installed_backend(config: PolicyConfig) -> BackendSelection:
    selection = select_backend(config)
    try:
        selection.require_installed()
    except MissingDependencyError as error:
        raise LauncherError(f"policy.megatron_cfg.enabled=true: {error}") from error
    return selection


def _in_dtypes_of(policy: Backend, model: Any) -> Any:
    """`model` with its parameters in the dtypes that `policy` sends them in; buffers stay as they are."""
    dtypes = {shard.name: shard.local.dtype for shard in policy.shards()}
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes.get(name, parameter.dtype))
    return model


def sampling(config: GenerationConfig, *, greedy: bool = False, seed: int | None = None) -> Sampling:
    """How the engine chooses tokens: as in training, or the likeliest ones."""
    temperature = 0.0 if greedy else config.temperature
    return Sampling(max_new_tokens=config.max_new_tokens, temperature=temperature, seed=seed)


def load_dataset(config: DataConfig, *, seed: int) -> Dataset:
    """The data set that `source` names: a JSONL file, cut here, or a function's, cut by itself."""
    if not _is_import_string(config.source):
        rows = read_jsonl(config.source)
        train, held_out = split_held_out(rows, share=config.held_out_share or HELD_OUT_SHARE, seed=seed)
        return Dataset(train=train, held_out=held_out, demonstrations=train)
    if config.held_out_share is not None:
        raise LauncherError(
            f"data.held_out_share={config.held_out_share} cuts a JSONL file, and data.source={config.source} is a "
            f"function, which holds out its own rows; leave data.held_out_share out"
        )
    dataset = _call(config.source, wanted="a function that returns a Dataset (data.source)")
    if not isinstance(dataset, Dataset):
        raise LauncherError(
            f"data.source={config.source} returned {type(dataset).__name__}, and must return a "
            f"rl_algorithms.data.Dataset"
        )
    return dataset


def load_policy(config: PolicyConfig, *, seed: int) -> tuple[Any, Any]:
    """The model and the tokenizer that `model_name` names, proved to belong together."""
    if _is_import_string(config.model_name):
        model, tokenizer = _built(config.model_name, seed)
    else:
        origin, trust = config.revision, config.trust_remote_code
        tokenizer = load_tokenizer(config.model_name, revision=origin, trust_remote_code=trust)
        model = load_causal_lm(config.model_name, revision=origin, trust_remote_code=trust)
    check_vocabulary(
        model_vocab_size=model.get_input_embeddings().num_embeddings,
        tokenizer_size=len(tokenizer),
        allow_padded=config.padded_vocabulary,
    )
    return model, tokenizer


def stop_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end an answer: the tokenizer's end of sequence, then those of the model's generation config."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    several = configured if isinstance(configured, list) else [configured]
    return tuple(dict.fromkeys(token for token in (tokenizer.eos_token_id, *several) if token is not None))


def _is_import_string(source: str) -> bool:
    """`package.module:name` or `file.py:name`, as against a path or a hub id, neither of which ends in `:name`."""
    location, colon, name = source.rpartition(":")
    return bool(colon and location) and name.isidentifier()


def _load_function(text: str, *, wanted: str) -> Callable[..., Any]:
    function = load_object(text, wanted=wanted)
    if not callable(function):
        raise LauncherError(f"{text} is {function!r:.80}, and {wanted} must be callable")
    return function


def _call(text: str, *arguments: object, wanted: str) -> Any:
    """Call the user's function; what it raises is an error of the recipe key that names it."""
    function = _load_function(text, wanted=wanted)
    try:
        return function(*arguments)
    except Exception as error:
        raise LauncherError(f"{text}, {wanted}, raised {type(error).__name__}: {error}") from error


def _built(text: str, seed: int) -> tuple[Any, Any]:
    built = _call(text, seed, wanted="a function that builds a model (policy.model_name)")
    if not isinstance(built, tuple) or len(built) != 2:
        raise LauncherError(
            f"policy.model_name={text} returned {type(built).__name__}; it must return (model, tokenizer)"
        )
    check_generation_config(built[0])
    return built


def _check_lengths(
    model: Any, prompts: list[Prompt], demonstrations: list[Demonstration], *, max_new_tokens: int
) -> None:
    """Refuse now what would fail, or be wrong, in the middle of a run."""
    context = getattr(model.config, "max_position_embeddings", None)
    if context is None:
        return
    longest = max(prompts, key=lambda prompt: len(prompt.tokens))
    if len(longest.tokens) + max_new_tokens > context:
        raise DataError(
            f"{longest.row.where}: the prompt has {len(longest.tokens)} tokens, and with "
            f"policy.generation.max_new_tokens={max_new_tokens} it does not fit into the model's context of {context} "
            f"(max_position_embeddings); shorten it, or lower max_new_tokens"
        )
    for demonstration in demonstrations:
        if len(demonstration.tokens) > context:
            raise DataError(
                f"{demonstration.row.where}: prompt and answer have {len(demonstration.tokens)} tokens, and the "
                f"model's context {context} (max_position_embeddings); shorten the answer"
            )
