"""What is known of a model before it is loaded: its configuration, and how many parameters it has."""

from dataclasses import dataclass, replace
from typing import Any

from rl_backends import ModelError
from rl_backends.loading import open_model
from rl_backends.loading.files import local_folder
from rl_backends.lora import AdapterSize
from rl_launcher.adapters import adapters_of
from rl_launcher.loading_policy import NamedModel
from rl_launcher.recipe_schema import PolicyConfig
from rl_launcher.user_code import is_import_string

__all__ = ["KnownModel", "known_model", "known_policy", "open_known"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model without its weights."""

    name: str
    """As the recipe has it."""

    config: Any
    """Of transformers."""

    parameters: int
    """Of the whole model, tied ones once."""

    adapters: AdapterSize | None = None
    """What trains in the place of the whole model; None where that does."""


def known_model(named: NamedModel) -> KnownModel | None:
    """What the model's configuration says; None where a function makes it, or the hub does not answer.

    Raises:
        ModelError: the folder that is named holds no configuration of a language model.
    """
    if is_import_string(named.model_name):
        return None
    try:
        return open_known(named)
    except ModelError:
        if local_folder(named.model_name) is not None:
            raise
        return None  # loading will say why the hub has no answer; nothing can be predicted meanwhile


def known_policy(policy: PolicyConfig) -> KnownModel | None:
    """As `known_model`, with the adapters that the policy trains.

    Raises:
        ModelError: as `known_model`.
        LauncherError: it cannot be adapted as asked.
    """
    model = known_model(policy)
    if model is None or policy.dtensor_cfg.lora_cfg is None:
        return model
    source = open_model(policy.model_name, revision=policy.revision, trust_remote_code=policy.trust_remote_code)
    return replace(model, adapters=adapters_of(policy, source.skeleton()))


def open_known(named: NamedModel) -> KnownModel:
    """As `known_model`, of a folder or hub id.

    Raises:
        ModelError: there is no such model, or it is not that of a language model.
    """
    from rl_generation import estimate_memory

    source = open_model(named.model_name, revision=named.revision, trust_remote_code=named.trust_remote_code)
    parameters = estimate_memory(source.config, dtype="float32", max_model_len=1).parameters
    return KnownModel(name=named.model_name, config=source.config, parameters=parameters)
