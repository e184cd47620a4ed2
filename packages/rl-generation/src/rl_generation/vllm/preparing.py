"""What must hold before a vLLM engine starts, and what vLLM is made with. Starts nothing.

Which vLLM is installed, what environment variables say, what the checkpoint says of itself, whether vLLM takes the
options, and whether this machine can place the workers.
"""

import contextlib
import importlib
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rl_generation.checkpoints import TOKENIZER_FILES, load_from, place_of, said, stop_token_ids_of
from rl_generation.errors import EngineOptionError, ModelError
from rl_generation.model_flags import ModelFlag, ModelQuirk, flags_for, installed_version
from rl_generation.requests import Limits, check_token_ids
from rl_generation.rollout import LogpOf
from rl_generation.vllm.options import DUMMY, VllmOptions, engine_arguments, nearest

TESTED = ("0.30", "0.31", "0.32")
"""The minor releases of vLLM that this package was tested with, oldest first."""

NO_WEIGHTS = (
    "the engine holds no weights to sample from: it began with random ones, for_training=True or load_format='dummy', "
    "or slept at level 2, and no refit has been committed since; refit it, or commit_version(…) after a transport of "
    "your own, or to sample from random weights all the same"
)
"""What is said instead of sampling from noise."""

_CALLED = (
    "abort",
    "collective_rpc",
    "generate",
    "get_supported_tasks",
    "is_paused",
    "is_sleeping",
    "pause_generation",
    "reset_encoder_cache",
    "reset_prefix_cache",
    "resume_generation",
    "shutdown",
    "sleep",
    "update_weight_version",
    "wake_up",
)
"""Methods of `AsyncLLM`."""

_changing = threading.RLock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An engine that may be started."""

    options: VllmOptions
    """The caller's, with `model` and `tokenizer` as vLLM takes them."""

    arguments: Mapping[str, Any]
    """Of `vllm.EngineArgs`, which has accepted them."""

    quirks: tuple[ModelQuirk, ...]
    """Of the model's type under this vLLM."""

    stop_token_ids: tuple[int, ...]
    """Tokens that the checkpoint says end an answer."""

    checkpoint_dtype: str | None = None
    """Of the weights, as the checkpoint says; None where it does not."""

    @property
    def unfed(self) -> bool:
        """Whether the engine starts with weights that nobody shall sample from."""
        return bool(self.arguments["load_format"] == DUMMY)


def prepare(options: VllmOptions, *, logp_of: LogpOf) -> Prepared:
    """Check the options against this machine, the checkpoint and vLLM; imports vLLM, starts nothing.

    Raises:
        EngineOptionError: vLLM is missing or too old; `vllm_kwargs` holds a key that vLLM does not know; or workers
            cannot be placed.
        ModelError: There is no such model or tokenizer.
    """
    version = check_runtime()
    model, tokenizer = (
        str(path) if name and (path := Path(name).expanduser()).is_dir() else name
        for name in (options.model, options.tokenizer)
    )
    options = replace(options, model=str(model), tokenizer=tokenizer)
    config = read_config(options)
    quirks = flags_for(str(config.get("model_type", "")), version=version)
    load_format = load_format_of(options, quirks)
    skip = not has_tokenizer(options)
    needing = [quirk for quirk in quirks if quirk.flag is ModelFlag.VLLM_TOKENIZER_REQUIRED]
    if skip and needing:
        raise EngineOptionError(
            f"model={options.model!r} has no tokenizer beside it, and vLLM does not start without one; give "
            f"tokenizer=…. {needing[0].reason}"
        )
    arguments = engine_arguments(options, logp_of=logp_of, load_format=load_format, skip_tokenizer_init=skip)
    from vllm import EngineArgs
    from vllm.platforms import current_platform

    try:
        EngineArgs(**arguments)
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        hint = nearest(unknown.group(1), [each.name for each in fields(EngineArgs)]) if unknown else ""
        raise EngineOptionError(f"vLLM refuses vllm_kwargs: {error}{hint}") from error
    except ValueError as error:
        raise refusal(error) from error
    # On a CPU, vLLM binds each worker to a NUMA node of its own, and where it cannot, dies without saying so.
    workers = options.tensor_parallel_size * options.pipeline_parallel_size * options.data_parallel_size
    bound = current_platform.is_cpu() and os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto") == "auto"
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    if bound and nodes < workers:
        raise EngineOptionError(
            f"{workers} workers (tensor × pipeline × data parallel) need as many NUMA nodes on a CPU, and this machine "
            f"has {nodes}; set VLLM_CPU_OMP_THREADS_BIND=nobind before the engine is made, and OMP_NUM_THREADS"
        )
    if arguments.get("speculative_config") and current_platform.is_cpu() and version.startswith("0.30."):
        raise EngineOptionError(
            f"speculative_config needs vLLM 0.31 or later on a CPU: the rejection sampler of {version} is a Triton "
            f"kernel, which ends the engine at its first step; leave speculative_config out, or upgrade vLLM"
        )
    if (name := options.worker_extension_cls) is not None:  # each worker would die of one that is not there
        module, _, attribute = name.rpartition(".")
        try:
            getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise EngineOptionError(f"worker_extension_cls={name!r} cannot be imported: {error}") from error
    dtypes = [str(found).removeprefix("torch.") for found in said(config, "dtype", "torch_dtype")]
    return Prepared(
        options=options,
        arguments=arguments,
        quirks=quirks,
        stop_token_ids=stop_token_ids_of(options.model, config, revision=options.revision),
        checkpoint_dtype=dtypes[0] if dtypes else None,
    )


def stop_tokens(given: Sequence[int] | None, prepared: Prepared, limits: Limits) -> tuple[int, ...]:
    """Return the engine's own stop tokens: those given, or the checkpoint's and its tokenizer's eos token.

    Raises:
        PromptError: One is outside the vocabulary.
    """
    if given is None:
        eos = getattr(limits.tokenizer, "eos_token_id", None)
        given = [*prepared.stop_token_ids, *([] if eos is None else [eos])]
    check_token_ids(given, vocab_size=limits.vocab_size, name="the engine's stop_token_ids")
    return tuple(dict.fromkeys(given))


def refusal(error: ValueError) -> EngineOptionError:
    """Return what to raise where vLLM refuses its arguments: what it said, without its dump of all of them."""
    long = re.search(r"User-specified max_model_len \((\d+)\).*?\((\w+)=([\d.]+)", str(error), re.DOTALL)
    if long is None:
        return EngineOptionError(f"vLLM refuses these options: {error}")
    asked, name, most = long.groups()
    return EngineOptionError(
        f"max_model_len={asked} is more than the model was made for ({name}={float(most):.0f}); give at most that, or "
        f"set VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 where you know that its positions go further"
    )


# -- The vLLM that is installed ---------------------------------------------------------------------------------------


def check_runtime() -> str:
    """Return the version of vLLM that is installed.

    A release after those that this package was tested with is warned of, and used; see `check_interface`.

    Raises:
        EngineOptionError: It is missing or too old, or `NRL_VLLM_USE_V1` asks for what it does not have.
    """
    version, asked = installed_version(), os.environ.get("NRL_VLLM_USE_V1", "1")
    if asked not in ("0", "1"):
        raise EngineOptionError(f"NRL_VLLM_USE_V1 must be 0 or 1, or not set (which is 1); got {asked!r}")
    if asked == "0":
        raise EngineOptionError(
            f"NRL_VLLM_USE_V1=0 asks for vLLM's V0 runtime, which vLLM {version or TESTED[-1]} does not have any more; "
            f"unset NRL_VLLM_USE_V1"
        )
    if version is None:
        raise EngineOptionError(
            f"vLLM is not installed in this environment; `pip install rl-generation[vllm]` brings {TESTED[-1]}"
        )
    minor = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    oldest, newest = (tuple(map(int, each.split("."))) for each in (TESTED[0], TESTED[-1]))
    if minor < oldest:
        raise EngineOptionError(
            f"vLLM {version} is installed, and this package needs {TESTED[0]} or later; `pip install "
            f"rl-generation[vllm]` brings {TESTED[-1]}"
        )
    if minor > newest:
        warnings.warn(
            f"vLLM {version} is later than {TESTED[-1]}, the last release that this package was tested with; "
            f"verify the engine before training on it",
            stacklevel=2,
        )
    return version


def check_interface(llm: type) -> None:
    """Refuse a vLLM whose `AsyncLLM` has lost a method that the engine calls."""
    if missing := [name for name in _CALLED if not callable(getattr(llm, name, None))]:
        raise EngineOptionError(
            f"vLLM {installed_version()} has no {', '.join(f'AsyncLLM.{name}' for name in missing)}, which this engine "
            f"calls; `pip install rl-generation[vllm]` brings {TESTED[-1]}, which does"
        )


def device_memory_bytes() -> int:
    """Of the first GPU, as the driver says: without a CUDA context, which vLLM could not fork."""
    from vllm.platforms import current_platform

    return int(current_platform.get_device_total_memory())


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for as long as an engine is being made, then put everything back as it was.

    Processes that start meanwhile inherit them. What vLLM sets itself in this process (LD_PRELOAD, among others) is put
    back too: the engine's processes have inherited it, and yours shall not. One engine at a time is made in a process.
    """
    with _changing:
        before = dict(os.environ)
        os.environ.update(values)
        try:
            yield
        finally:
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)


def main_guard_hint() -> str:
    """Return what to add where an engine's processes did not start, if the program's script lacks its guard."""
    file = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    if not file.is_file() or "__main__" in file.read_text(encoding="utf-8", errors="replace"):
        return ""
    return (
        f". The processes of an engine import the script that makes it, {file.name}: make it under "
        f'`if __name__ == "__main__":` there'
    )


# -- What a checkpoint says of itself, in its folder or in the hub's cache --------------------------------------------


def read_config(options: VllmOptions) -> Mapping[str, Any]:
    """Return the model's `config.json`; ModelError where it is neither in a folder nor to be found on the hub."""
    from transformers import PretrainedConfig

    place = place_of(options.model)
    found, _ = load_from(PretrainedConfig.get_config_dict, place, what="config", revision=options.revision)
    if not isinstance(found, dict):
        raise ModelError(f"{place}/config.json holds no JSON object, but {type(found).__name__}")
    return found


def has_tokenizer(options: VllmOptions) -> bool:
    """Whether there is a tokenizer beside the model, or the given one; ModelError where the given one is not there."""
    if options.vllm_kwargs.get("skip_tokenizer_init"):
        return False
    if options.tokenizer is not None:
        place_of(options.tokenizer, TOKENIZER_FILES, what="tokenizer")
        return True
    folder = Path(options.model).expanduser()
    return not folder.is_dir() or any((folder / name).is_file() for name in TOKENIZER_FILES)


def load_format_of(options: VllmOptions, quirks: Sequence[ModelQuirk]) -> str:
    """Return how vLLM reads the weights: as the caller said, or "dummy" for training where the model admits it."""
    if options.load_format is not None:
        return options.load_format
    real = any(quirk.flag is ModelFlag.VLLM_LOAD_FORMAT_AUTO for quirk in quirks)
    return DUMMY if options.for_training and not real else "auto"
