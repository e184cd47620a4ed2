"""Whole models and tokenizers by transformers, and what is checked of them before a run and not after it."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rl_backends.errors import ModelError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Without one of them transformers may make an empty tokenizer of the model's family, and say nothing."""


def load_causal_lm(model_name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> nn.Module:
    """Load a Hugging Face causal language model in float32, whole: for what one process holds.

    Args:
        model_name: a folder with `config.json` and safetensors weights, or a hub id.
        revision: branch, tag or commit of a hub id; pin it to make a run repeatable.
        trust_remote_code: run the model's own Python code. Only for code that you have read.

    Raises:
        ModelError: the folder is missing, lacks weights or contradicts itself, or transformers cannot load it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model, report = _load(
        AutoModelForCausalLM,
        model_name,
        what="model",
        revision=revision,
        trust_remote_code=trust_remote_code,
        dtype=torch.float32,
        use_safetensors=True,
        output_loading_info=True,
    )
    _require_whole(model_name, report)
    check_generation_config(model)
    config = AutoConfig.from_pretrained(model_name, revision=revision, trust_remote_code=trust_remote_code)
    model._file_dtypes = dtypes_in_files(model, config)  # noqa: SLF001
    loaded: nn.Module = model
    return loaded


def dtype_of_config(config: Any) -> torch.dtype | None:
    """The dtype that a configuration of transformers names, which may be text; None if it names none."""
    dtype: torch.dtype | str | None = getattr(config, "dtype", None)
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def dtypes_in_files(model: nn.Module, config: Any) -> dict[str, torch.dtype]:
    """Name -> the dtype that the configuration of a folder gives its floating-point tensors.

    The model itself is loaded in float32. `export_pretrained(dtype="auto")` finds this as `model._file_dtypes`.
    """
    dtype = dtype_of_config(config)
    if dtype is None:
        return {}
    return {name: dtype for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


def load_tokenizer(model_name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer that lies beside a model; arguments and errors as `load_causal_lm`."""
    from transformers import AutoTokenizer

    return _load(AutoTokenizer, model_name, what="tokenizer", revision=revision, trust_remote_code=trust_remote_code)


def _load(auto_class: Any, model_name: str, *, what: str, **options: Any) -> Any:
    folder = Path(model_name)
    if model_name.startswith((".", "/", "~")) or folder.exists():
        folder = folder.expanduser()
        wanted = ("config.json",) if what == "model" else TOKENIZER_FILES
        if not any((folder / name).is_file() for name in wanted):
            state = f"has no {' or '.join(wanted)}" if folder.is_dir() else "does not exist"
            raise ModelError(
                f"{model_name}: {state}, so transformers cannot load the {what}; give a folder that save_pretrained "
                f"wrote, or a hub id"
            )
        model_name = str(folder)
    try:
        return auto_class.from_pretrained(model_name, **options)
    except Exception as error:  # of many kinds: of the operating system, transformers, safetensors, jinja
        raise ModelError(
            f"{model_name}: transformers cannot load the {what}: {type(error).__name__}: {error}"
        ) from error


def _require_whole(model_name: str, report: dict[str, Any]) -> None:
    """Refuse a checkpoint from which transformers would fill in tensors at random."""
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        if found := sorted(map(str, report.get(kind) or [])):
            some = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
            raise ModelError(
                f"{model_name}: {kind.replace('_', ' ')}: {some}. Training would go on from random weights there; "
                f"give the folder of the whole causal language model"
            )


def check_generation_config(model: Any) -> None:
    """Refuse a generation configuration that transformers would refuse to save, before a run and not after it.

    Raises:
        ModelError: it contradicts itself.
    """
    config = getattr(model, "generation_config", None)
    if config is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            config.save_pretrained(folder)
        except ValueError as error:
            raise ModelError(
                f"the model's generation_config.json contradicts itself, so it could not be saved again: {error}"
            ) from error


def check_vocabulary(*, model_vocab_size: int, tokenizer_size: int, allow_padded: bool = False) -> None:
    """Refuse a model whose vocabulary is not the tokenizer's.

    Raises:
        ModelError: the sizes differ; a larger model is accepted with `allow_padded`, a smaller one never.
    """
    if model_vocab_size == tokenizer_size or (allow_padded and model_vocab_size > tokenizer_size):
        return
    if model_vocab_size < tokenizer_size:
        raise ModelError(
            f"the tokenizer has {tokenizer_size} tokens and the model only {model_vocab_size} embeddings, so they do "
            f"not belong together; use the model's own tokenizer, or resize the model's embeddings"
        )
    raise ModelError(
        f"the model has {model_vocab_size} embeddings and the tokenizer only {tokenizer_size} tokens; if the "
        f"{model_vocab_size - tokenizer_size} rows beyond are padding, as in Qwen models, accept "
        f"them by allow_padded=True (policy.padded_vocabulary=true in a recipe), or use the model's own tokenizer"
    )


def stop_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a response: the tokenizer's end of sequence, then those of the model's generation config."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    several = configured if isinstance(configured, list) else [configured]
    return tuple(dict.fromkeys(token for token in (tokenizer.eos_token_id, *several) if token is not None))


def pad_token_id(tokenizer: Any, stop: Sequence[int]) -> int:
    """The tokenizer's padding token; without one, the first stop token, since padding is never attended to."""
    return int(stop[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id)
