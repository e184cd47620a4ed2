"""The model and the tokenizer that a recipe names, proved to belong together. Shards nothing, starts nothing."""

from typing import Any, Protocol

from rl_backends import check_generation_config, check_vocabulary, load_causal_lm, load_tokenizer
from rl_launcher.errors import LauncherError
from rl_launcher.recipe_schema import PolicyConfig
from rl_launcher.user_code import call, is_import_string

__all__ = ["NamedModel", "load_model", "load_policy", "stop_token_ids"]


class NamedModel(Protocol):
    """What names a model: a recipe's `policy`, or its `distill.teacher`."""

    @property
    def model_name(self) -> str:
        """A folder, a hub id, or a function."""

    @property
    def revision(self) -> str | None:
        """Of a hub id."""

    @property
    def trust_remote_code(self) -> bool:
        """Whether code that comes with it is run."""


def load_policy(config: PolicyConfig, *, seed: int) -> tuple[Any, Any]:
    """The model and the tokenizer that `model_name` names, whole, in this process.

    Raises:
        ValueError: there is no such model, its function fails, or the tokenizer is of another vocabulary.
    """
    return load_model(config, seed=seed, key="policy.model_name", padded_vocabulary=config.padded_vocabulary)


def load_model(named: NamedModel, *, seed: int, key: str, padded_vocabulary: bool) -> tuple[Any, Any]:
    """As `load_policy`, of any model that a recipe names under `key`.

    Raises:
        ValueError: as there.
    """
    if is_import_string(named.model_name):
        model, tokenizer = _built(named.model_name, seed, key)
    else:
        origin, trust = named.revision, named.trust_remote_code
        tokenizer = load_tokenizer(named.model_name, revision=origin, trust_remote_code=trust)
        model = load_causal_lm(named.model_name, revision=origin, trust_remote_code=trust)
    check_vocabulary(
        model_vocab_size=model.get_input_embeddings().num_embeddings,
        tokenizer_size=len(tokenizer),
        allow_padded=padded_vocabulary,
    )
    return model, tokenizer


def stop_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end an answer: the tokenizer's end of sequence, then those of the model's generation config."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    several = configured if isinstance(configured, list) else [configured]
    return tuple(dict.fromkeys(token for token in (tokenizer.eos_token_id, *several) if token is not None))


def _built(text: str, seed: int, key: str) -> tuple[Any, Any]:
    built = call(text, seed, wanted=f"a function that builds a model ({key})")
    if not isinstance(built, tuple) or len(built) != 2:
        raise LauncherError(f"{key}={text} returned {type(built).__name__}; it must return (model, tokenizer)")
    check_generation_config(built[0])
    return built
