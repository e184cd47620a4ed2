"""Read a model's configuration with transformers, and build a model of it without its weights.

transformers is imported when a function is called, and never before: it may not be installed. Only `config.json` is
read, and code that comes with a model runs only where the caller says so.
"""

import copy
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from rl_parallel_plans.errors import PlanError, UnusableModelError

# The first that knows the configuration builds the model; what generates text comes first.
AUTO_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForMultimodalLM",
    "AutoModelForVision2Seq",
    "AutoModelForSeq2SeqLM",
    "AutoModel",
)


def read_config(source: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The configuration (a `PretrainedConfig`) that `source` names; reads no weights.

    source: a folder that holds a `config.json`, the path of such a file, a type of model that transformers knows
        (`"qwen3"`: its default configuration), or the name of a model on the Hub.
    revision: branch, tag or commit, for a model on the Hub.
    trust_remote_code: run the configuration code that comes with the model, where there is any.

    Raises PlanError where transformers is not installed, nothing lies at `source`, it is no configuration, or this
    release of transformers does not know its type.
    """
    transformers = _transformers()
    path, name = Path(source).expanduser(), str(source)
    options = {"revision": revision} if revision is not None else {}
    if path.is_dir() and not (path / "config.json").is_file():
        found = sorted(entry.name for entry in path.iterdir())
        shown = ", ".join(found[:8]) + (", ..." if len(found) > 8 else "")
        raise PlanError(f"folder {path} holds no config.json, but {shown or 'nothing'}: pass the folder that does")
    if path.exists():
        name, options = str(path), {}
    elif name in transformers.CONFIG_MAPPING:
        return transformers.AutoConfig.for_model(name)
    elif name.startswith(("/", ".", "~")) or path.suffix == ".json" or name.count("/") > 1:
        raise PlanError(f"{name} does not exist: pass a folder with a config.json, a Hub name or a type of model")
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **options)
    except Exception as error:
        raise PlanError(_unreadable(transformers, name, error)) from error


def build(
    config: Any,
    *,
    device: str | torch.device = "meta",
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """A model of `config` with random weights, or with none on the meta device; its ties made.

    The class is the one that `config.architectures` names first, else the one that transformers' auto classes give to
    this type of configuration, text before images. Attention is SDPA where the class has it and eager elsewhere.
    `config` itself is not changed.

    dtype: of the parameters; None takes the configuration's, and float32 where it has none.
    trust_remote_code: run the modelling code that comes with the model, where its configuration names any.

    Raises PlanError where this release of transformers has no such class, UnusableModelError (a PlanError) where the
    class refuses the configuration.
    """
    transformers = _transformers()
    config = copy.deepcopy(config)
    factory = _factory(transformers, config, trust_remote_code=trust_remote_code)
    with torch.device(device):
        try:
            model: nn.Module = _attending(factory, config, dtype or _dtype(config))
        except PlanError:
            raise
        except Exception as error:
            raise UnusableModelError(
                f"{_described(config)} cannot be built by transformers {transformers.__version__}: "
                f"{type(error).__name__}: {' '.join(str(error).split())}"
            ) from error
    tie: Callable[[], None] | None = getattr(model, "tie_weights", None)
    if tie is not None:  # code that comes with a model need not have it
        tie()
    return model


def _transformers() -> ModuleType:
    try:
        return import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise PlanError(
            "reading a model's configuration needs transformers, which is not installed: pip install transformers"
        ) from error


def _unreadable(transformers: ModuleType, name: str, error: Exception) -> str:
    """Why `name` gave no configuration, in one sentence, and what to do."""
    release, said = f"transformers {transformers.__version__}", str(error)
    if "trust_remote_code" in said:
        return f"{name} comes with code of its own: read it, then pass --trust-remote-code (trust_remote_code=True)"
    if "model type `" in said:
        unknown = said.split("model type `")[1].split("`", maxsplit=1)[0]
        return (
            f"{release} knows no model type {unknown!r}{_nearest(transformers, unknown)}; install a release that does"
        )
    first = next((line.strip() for line in said.splitlines() if line.strip()), type(error).__name__)
    if Path(name).exists() or "/" in name:
        return f"{name} gave no configuration to {release}: {first}"
    return (
        f"{name} is no folder, no type of model that {release} knows{_nearest(transformers, name)}, and on the Hub it "
        f"gave no configuration: {first}"
    )


def _nearest(transformers: ModuleType, model_type: str) -> str:
    near = get_close_matches(model_type, list(transformers.CONFIG_MAPPING), n=3)
    return f" (the nearest: {', '.join(near)})" if near else ""


def _factory(transformers: ModuleType, config: Any, *, trust_remote_code: bool) -> Any:
    """What builds a model of `config`: a class of transformers, an auto class, or a class of the model's own code."""
    release, remote = f"transformers {transformers.__version__}", getattr(config, "auto_map", None) or {}
    for auto in AUTO_CLASSES:
        if trust_remote_code and auto in remote:
            return _Remote(getattr(transformers, auto))
    architecture = next(iter(getattr(config, "architectures", None) or ()), None)
    if architecture is None:
        for auto in AUTO_CLASSES:
            mapping = getattr(getattr(transformers, auto, None), "_model_mapping", {})
            found = mapping.get(type(config), ())
            # A class of the language model alone may stand beside the configuration of the whole (Llama 4).
            for factory in found if isinstance(found, tuple) else (found,):
                if factory.config_class is type(config):
                    return factory
        raise PlanError(f"{release} has no model class for {_described(config)}: name one in config.architectures")
    try:
        factory = getattr(transformers, architecture)
    except (AttributeError, ImportError, RuntimeError) as error:
        if remote:
            advice = "its code comes with the model: read it, then pass --trust-remote-code (trust_remote_code=True)"
        else:
            near = get_close_matches(architecture, [name for name in dir(transformers) if "For" in name], n=3)
            nearest = f"the nearest of its classes: {', '.join(near)}; " if near else ""
            advice = f"{nearest}install a release that has it"
        raise PlanError(
            f"config.architectures names {architecture}, which {release} does not have: {advice}"
        ) from error
    if not (isinstance(factory, type) and issubclass(factory, nn.Module)):
        raise PlanError(f"config.architectures names {architecture}, which is no torch model")
    return factory


class _Remote:
    """An auto class that may run the code of the model, with the constructor of a model class."""

    _supports_sdpa = True

    def __init__(self, auto: Any) -> None:
        self._auto = auto

    def _from_config(self, config: Any, **options: Any) -> nn.Module:
        model: nn.Module = self._auto.from_config(config, trust_remote_code=True, **options)
        return model


def _attending(factory: Any, config: Any, dtype: torch.dtype) -> Any:
    """Build with SDPA where it is there: a class may say that it is and have a part that refuses it."""
    construct = factory._from_config  # noqa: SLF001 - what the auto classes call; the constructor ignores dtype
    if getattr(factory, "_supports_sdpa", False):
        try:
            return construct(copy.deepcopy(config), dtype=dtype, attn_implementation="sdpa")
        except (ValueError, ImportError) as error:
            if "attention" not in str(error):
                raise
    return construct(config, dtype=dtype, attn_implementation="eager")


def _dtype(config: Any) -> torch.dtype:
    for owner in (config, getattr(config, "text_config", None)):
        found = getattr(owner, "dtype", None)
        if isinstance(found, str):
            found = getattr(torch, found.removeprefix("torch."), None)
        if isinstance(found, torch.dtype):
            return found
    return torch.float32


def _described(config: Any) -> str:
    return f"{type(config).__name__} (model_type {getattr(config, 'model_type', None)!r})"
