"""What a checkpoint says before anything is loaded: its config, its stop tokens, whether it has a tokenizer.

Reads JSON files of a folder or of the hub's cache. Does not import vLLM.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_generation.errors import EngineOptionError
from rl_generation.model_flags import load_format_for
from rl_generation.vllm.options import VllmOptions

__all__ = ["dtype_of", "has_tokenizer", "load_format_of", "read_config", "stop_token_ids_of"]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json", "vocab.json")


def read_config(options: VllmOptions) -> Mapping[str, Any]:
    """Return the model's `config.json`.

    Raises:
        EngineOptionError: The model is neither a folder with one nor to be found on the hub.
    """
    found = _read(options, "config.json", required=True)
    if found is None:
        raise EngineOptionError(f"model={options.model!r} is a folder without config.json: nothing that vLLM can serve")
    return found


def stop_token_ids_of(options: VllmOptions, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the eos tokens of the generation config, or where that has none, of the config."""
    for source in (
        _read(options, "generation_config.json", required=False) or {},
        config,
        config.get("text_config") or {},
    ):
        eos = source.get("eos_token_id")
        if eos is not None:
            return tuple(eos) if isinstance(eos, list) else (eos,)
    return ()


def dtype_of(config: Mapping[str, Any]) -> str | None:
    """Return what the config says that the weights are; None where it says nothing."""
    for source in (config, config.get("text_config") or {}):
        found = source.get("dtype") or source.get("torch_dtype")
        if found is not None:
            return str(found).removeprefix("torch.")
    return None


def has_tokenizer(options: VllmOptions) -> bool:
    """Whether there is a tokenizer, the given one or one beside the model.

    Raises:
        EngineOptionError: `options.tokenizer` names a folder that does not exist or holds none.
    """
    if options.vllm_kwargs.get("skip_tokenizer_init"):
        return False
    folder = Path(options.tokenizer or options.model).expanduser()
    if folder.is_dir():
        found = any((folder / name).is_file() for name in TOKENIZER_FILES)
        if options.tokenizer is not None and not found:
            raise EngineOptionError(f"tokenizer={options.tokenizer!r} is a folder that holds no tokenizer")
        return found
    if options.tokenizer is not None and _is_path(options.tokenizer):
        raise EngineOptionError(f"tokenizer={options.tokenizer!r} is no folder")
    return True


def load_format_of(options: VllmOptions, config: Mapping[str, Any], *, version: str) -> str:
    """Return how vLLM reads the weights: as the caller said, or else "dummy" for training and "auto" otherwise.

    Args:
        options: The caller's.
        config: See `read_config`.
        version: Of vLLM: some of its releases need more than dummy weights for some models.
    """
    if options.load_format is not None:
        return options.load_format
    model_type = str(config.get("model_type", ""))
    return load_format_for(model_type, refit_follows=options.for_training, versions={"vllm": version})


def _read(options: VllmOptions, name: str, *, required: bool) -> Mapping[str, Any] | None:
    folder = Path(options.model).expanduser()
    path: Path | None
    if folder.is_dir():
        path = folder / name
    elif _is_path(options.model):
        raise EngineOptionError(f"model={options.model!r} is no folder")
    else:
        path = _from_hub(options, name, required=required)
    if path is None or not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EngineOptionError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise EngineOptionError(f"{path} holds no JSON object, but {type(found).__name__}")
    return found


def _from_hub(options: VllmOptions, name: str, *, required: bool) -> Path | None:
    from transformers.utils.hub import cached_file

    kept = {"revision": options.revision, "_raise_exceptions_for_missing_entries": required}
    try:
        found = cached_file(options.model, name, **kept)
    except OSError as error:
        raise EngineOptionError(
            f"model={options.model!r} is no folder here, and the hub does not give it: {error}"
        ) from error
    return None if found is None else Path(found)


def _is_path(name: str) -> bool:
    """Whether it can only be meant as a folder: ids on the hub are `name` or `owner/name`."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1
