"""What the vLLM engine does before anything starts: refuse what cannot work, and settle what vLLM is made with."""

import importlib
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, final

from rl_generation.errors import EngineOptionError
from rl_generation.model_flags import ModelFlag, ModelQuirk, flags_for
from rl_generation.requests import Limits, check_token_ids
from rl_generation.rollout import LogpOf
from rl_generation.vllm.checkpoint import dtype_of, has_tokenizer, load_format_of, read_config, stop_token_ids_of
from rl_generation.vllm.options import DUMMY, VllmOptions, engine_arguments, nearest
from rl_generation.vllm.runtime import check_runtime

__all__ = ["NO_WEIGHTS", "Prepared", "limits_of", "prepare", "refusal", "stop_tokens", "warn_of_dtype"]

NO_WEIGHTS = (
    "the engine holds no weights to sample from: it began with random ones, for_training=True or load_format='dummy', "
    "or slept at level 2, and no refit has been committed since; refit it, or commit_version(…) after a transport of "
    "your own, or to sample from random weights all the same"
)
"""What is said instead of sampling from noise."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An engine that may be started."""

    options: VllmOptions
    """The caller's, with `model` and `tokenizer` as vLLM takes them."""

    arguments: Mapping[str, Any]
    """Of `vllm.EngineArgs`, which has accepted them."""

    vllm_version: str

    load_format: str
    """What `options.load_format` came to."""

    quirks: tuple[ModelQuirk, ...]
    """Of the model's type under this vLLM."""

    stop_token_ids: tuple[int, ...]
    """Tokens that the checkpoint says end an answer."""

    checkpoint_dtype: str | None = None
    """Of the weights, as the checkpoint says; None where it does not."""

    @property
    def unfed(self) -> bool:
        """Whether the engine starts with weights that nobody shall sample from."""
        return self.load_format == DUMMY

    @property
    def world_size(self) -> int:
        """Worker processes, or devices."""
        sizes = self.options
        return sizes.tensor_parallel_size * sizes.pipeline_parallel_size * sizes.data_parallel_size

    def check_sleep(self, level: int) -> None:
        """Raise EngineOptionError where this engine cannot sleep at `level`; on a CPU it can, and frees nothing."""
        from vllm.platforms import current_platform

        able = self.options.enable_sleep_mode or not current_platform.is_sleep_mode_available()
        if level not in (1, 2) or not able:
            raise EngineOptionError(
                f"sleep needs an engine made with enable_sleep_mode=True, and level 1 or 2; got level={level!r}, "
                f"enable_sleep_mode={self.options.enable_sleep_mode}"
            )


def prepare(options: VllmOptions, *, logp_of: LogpOf) -> Prepared:
    """Check the options against this machine, the checkpoint and vLLM; imports vLLM, starts nothing.

    Raises:
        EngineOptionError: vLLM is missing, too old or too new; there is no such model or tokenizer; `vllm_kwargs` holds
            a key that vLLM does not know; or workers cannot be placed.
    """
    version = check_runtime()
    options = _with_paths(options)
    config = read_config(options)
    load_format = load_format_of(options, config, version=version)
    quirks = flags_for(str(config.get("model_type", "")), versions={"vllm": version})
    skip = not has_tokenizer(options)
    if skip:
        _check_tokenizer(options, quirks)
    arguments = engine_arguments(options, logp_of=logp_of, load_format=load_format, skip_tokenizer_init=skip)
    _check_arguments(arguments)
    _check_workers(options)
    _check_extension(options)
    return Prepared(
        options=options,
        arguments=arguments,
        vllm_version=version,
        load_format=load_format,
        quirks=quirks,
        stop_token_ids=stop_token_ids_of(options, config),
        checkpoint_dtype=dtype_of(config),
    )


def limits_of(vllm_config: Any, tokenizer: Any) -> Limits:
    """Return what an engine with this `VllmConfig` can be asked for."""
    model = vllm_config.model_config
    return Limits(
        vocab_size=model.get_vocab_size(),
        max_length=model.max_model_len,
        max_length_name="max_model_len",
        tokenizer=tokenizer,
        prefill_chunk=vllm_config.scheduler_config.max_num_batched_tokens,
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


def warn_of_dtype(prepared: Prepared, vllm_config: Any) -> None:
    """Warn where "auto" came to another dtype than the checkpoint's: vLLM only logs that."""
    given, served = prepared.checkpoint_dtype, str(vllm_config.model_config.dtype).removeprefix("torch.")
    if prepared.options.dtype == "auto" and given not in (None, served):
        warnings.warn(
            f"dtype='auto' serves in {served} a checkpoint whose weights are {given}, so its log-probabilities are "
            f"not those of a trainer in {given}; give dtype={given!r}, or dtype={served!r} where that is meant",
            UserWarning,
            stacklevel=3,
        )


def _with_paths(options: VllmOptions) -> VllmOptions:
    tokenizer = None if options.tokenizer is None else _expanded(options.tokenizer)
    return replace(options, model=_expanded(options.model), tokenizer=tokenizer)


def _expanded(name: str) -> str:
    folder = Path(name).expanduser()
    return str(folder) if folder.is_dir() else name


def _check_tokenizer(options: VllmOptions, quirks: Sequence[ModelQuirk]) -> None:
    for quirk in quirks:
        if quirk.flag is ModelFlag.VLLM_TOKENIZER_REQUIRED:
            raise EngineOptionError(
                f"model={options.model!r} has no tokenizer beside it, and vLLM does not start without one; give "
                f"tokenizer=…. {quirk.reason}"
            )


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    from vllm import EngineArgs

    try:
        EngineArgs(**arguments)
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        name = unknown.group(1) if unknown else ""
        hint = nearest(name, [each.name for each in fields(EngineArgs)]) if name else ""
        raise EngineOptionError(f"vLLM refuses vllm_kwargs: {error}{hint}") from error
    except ValueError as error:
        raise refusal(error) from error


def _check_workers(options: VllmOptions) -> None:
    """On a CPU, vLLM binds each worker to a NUMA node of its own, and where it cannot, dies without saying so."""
    from vllm.platforms import current_platform

    workers = options.tensor_parallel_size * options.pipeline_parallel_size * options.data_parallel_size
    if workers == 1 or not current_platform.is_cpu() or os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto") != "auto":
        return
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    if nodes < workers:
        raise EngineOptionError(
            f"{workers} workers (tensor × pipeline × data parallel) need as many NUMA nodes on a CPU, and this machine "
            f"has {nodes}; set VLLM_CPU_OMP_THREADS_BIND=nobind before the engine is made, and OMP_NUM_THREADS"
        )


def _check_extension(options: VllmOptions) -> None:
    """Each worker would die of it."""
    name = options.worker_extension_cls
    if name is None:
        return
    module, _, attribute = name.rpartition(".")
    try:
        getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise EngineOptionError(f"worker_extension_cls={name!r} cannot be imported: {error}") from error
