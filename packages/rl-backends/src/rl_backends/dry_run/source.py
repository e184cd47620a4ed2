"""The model of a dry run, without its weights: from a folder, a hub id, a config.json or a type of model.

A folder or hub id is opened as the backend opens it; of the others there is nothing but a configuration.
"""

import json
from pathlib import Path
from typing import Any

from torch import nn

from rl_backends.errors import ModelError
from rl_backends.loading.source import ModelSource, open_model

__all__ = ["config_of_module", "skeleton_of"]


def skeleton_of(
    source: str | None, *, revision: str | None, trust_remote_code: bool, model_config: dict[str, Any] | None = None
) -> nn.Module:
    """In float32, its parameters on the meta device.

    Args:
        source: where it lies; None where `model_config` says it all.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: run code that comes with the model.
        model_config: what `config_of_module` has returned.

    Raises:
        ModelError: there is no such model, or transformers cannot make it.
        PlanError: the same, of a file or a type of model.
    """
    import transformers

    if model_config is not None:
        given = {key: value for key, value in model_config.items() if key != "model_type"}
        return _of_config(
            transformers.AutoConfig.for_model(model_config["model_type"], **given),
            name=model_config["model_type"],
            trust_remote_code=trust_remote_code,
        )
    assert source is not None
    if Path(source).expanduser().is_file() or (source in transformers.CONFIG_MAPPING and not Path(source).exists()):
        from rl_parallel_plans.model_source import read_config

        config = read_config(source, trust_remote_code=trust_remote_code)
        return _of_config(config, name=source, trust_remote_code=trust_remote_code)
    return open_model(source, revision=revision, trust_remote_code=trust_remote_code).skeleton()


def config_of_module(model: nn.Module) -> dict[str, Any]:
    """The configuration of a model of transformers in plain values.

    Raises:
        ModelError: it has none.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        raise ModelError(
            f"this process has a process group, so a dry run happens in another one, and {type(model).__qualname__} "
            f"has no configuration from which to make it there; call it before init_process_group"
        )
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values


def _of_config(config: Any, *, name: str, trust_remote_code: bool) -> nn.Module:
    source = ModelSource(
        model_name=name, folder=Path(), config=config, head="causal_lm", trust_remote_code=trust_remote_code
    )
    return source._bare()  # noqa: SLF001 - ours; a folder's generation configuration is not there
