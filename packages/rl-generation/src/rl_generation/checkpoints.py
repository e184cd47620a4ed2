"""Models, configs and tokenizers from a folder or a hub id.

Refuses what would only fail later or silently: folders without a model, checkpoints that lack weights (transformers
would draw them at random), and tokenizers that are missing (it would make an empty one).
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_generation.errors import EngineOptionError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
"""Without one of them transformers may make an empty tokenizer of the model's family, and say nothing."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where a model is, which every description of an engine says alike."""

    model: str
    """A folder that `save_pretrained` wrote, or a hub id."""

    revision: str | None = None
    """Branch, tag or commit of a hub id; None is its main branch, which may move under you."""

    trust_remote_code: bool = False
    """True runs Python code that comes with the model, as you."""


def load_config(source: ModelSource) -> Any:
    """Load a model's configuration, a `transformers.PretrainedConfig`.

    Raises:
        ModelError: There is none, or transformers cannot load it.
    """
    from transformers import AutoConfig

    return load_from(AutoConfig.from_pretrained, place_of(source.model), what="config", **_how(source))


def load_model(source: ModelSource, *, dtype: str = "auto", device: str | None = None) -> "PreTrainedModel":
    """Load a causal language model in eval mode, whole or not at all.

    Raises:
        ModelError: There is none, it lacks weights, or transformers cannot load it.
        EngineOptionError: The dtype or the device is unknown.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=target)
    except (AssertionError, RuntimeError) as error:
        raise EngineOptionError(f"device={device!r} cannot be used here: {error}") from None
    weights = dtype if dtype == "auto" else getattr(torch, dtype, None)
    if weights != "auto" and not (isinstance(weights, torch.dtype) and weights.is_floating_point):
        raise EngineOptionError(f"dtype must be 'auto' or a float of torch, such as 'bfloat16'; got dtype={dtype!r}")
    how = _how(source) | {"dtype": weights, "output_loading_info": True}
    model, report = load_from(AutoModelForCausalLM.from_pretrained, place_of(source.model), what="model", **how)
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        if lacking := sorted(map(str, report.get(kind) or [])):
            some = ", ".join(lacking[:3]) + (f" and {len(lacking) - 3} more" if len(lacking) > 3 else "")
            raise ModelError(
                f"{source.model}: {kind.replace('_', ' ')}: {some}. Weights there would be random; give the folder of "
                f"the whole causal language model"
            )
    try:
        loaded: PreTrainedModel = model.to(target).eval()
    except RuntimeError as error:
        raise ModelError(f"{source.model} does not fit on {target}: {error}") from error
    return loaded


def load_tokenizer(source: ModelSource) -> Any:
    """Load the tokenizer of a folder or hub id.

    Raises:
        ModelError: There is none, it is empty, or transformers cannot load it.
    """
    from transformers import AutoTokenizer

    place = place_of(source.model, TOKENIZER_FILES, what="tokenizer")
    tokenizer = load_from(AutoTokenizer.from_pretrained, place, what="tokenizer", **_how(source))
    if not len(tokenizer):
        raise ModelError(f"{source.model}: transformers makes an empty tokenizer of it; give another one")
    return tokenizer


def _how(source: ModelSource) -> dict[str, Any]:
    return {"revision": source.revision, "trust_remote_code": source.trust_remote_code}


def said(config: Mapping[str, Any], *names: str) -> list[Any]:
    """What a config says under one of these names, itself or of its text model."""
    both = (config, config.get("text_config") or {})
    return [source[name] for source in both for name in names if source.get(name) is not None]


def stop_token_ids_of(
    model_name: str, config: Mapping[str, Any], *, tokenizer: Any = None, revision: str | None = None
) -> tuple[int, ...]:
    """Return the tokens that end an answer: of the generation config, or else of the config; and the tokenizer's eos.

    Raises:
        ModelError: There is a generation config that cannot be read.
    """
    from transformers import GenerationConfig
    from transformers.utils.hub import cached_file

    folder, eos = Path(model_name).expanduser(), None
    file = cached_file(
        str(folder) if folder.is_dir() else model_name,
        "generation_config.json",
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
    )
    if file is not None:
        place = str(Path(file).parent)
        eos = load_from(GenerationConfig.from_pretrained, place, what="generation config").eos_token_id
    if eos is None:
        eos = next(iter(said(config, "eos_token_id")), None)
    found = [*(eos if isinstance(eos, list | tuple) else [eos]), getattr(tokenizer, "eos_token_id", None)]
    return tuple(dict.fromkeys(each for each in found if each is not None))


IDENTIFYING = {".bin", ".jinja", ".json", ".model", ".py", ".safetensors", ".txt"}
"""Suffixes of the files that make a model what it is."""

WHOLE_BYTES = 64 << 20
PIECES, PIECE_BYTES = 64, 1 << 20


def model_identity(model_name: str, config: Any) -> str:
    """Return which model this is, without trusting its name: the commit of a hub id, or a digest of a folder's files.

    Files up to 64 MiB are read whole, larger ones at 64 places, 1 MiB each: enough to tell two checkpoints of a run
    from each other in a second, since training moves weights everywhere. It is no protection against forgery.
    """
    folder = Path(model_name).expanduser()
    if not folder.is_dir():
        return f"{model_name}@{getattr(config, '_commit_hash', None)}"
    total = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if not path.is_file() or path.suffix not in IDENTIFYING:
            continue
        size = path.stat().st_size
        total.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if size <= WHOLE_BYTES:
                total.update(file.read())
                continue
            for piece in range(PIECES):
                file.seek((size - PIECE_BYTES) * piece // (PIECES - 1))
                total.update(file.read(PIECE_BYTES))
    return f"sha256:{total.hexdigest()}"


def place_of(name: str, wanted: tuple[str, ...] = ("config.json",), *, what: str = "model") -> str:
    """Return a hub id as it is, and of a folder its path; refuse a folder that holds nothing of what is wanted."""
    folder = Path(name).expanduser()
    if not name.startswith((".", "/", "~")) and not folder.exists():
        return name
    if not any((folder / each).is_file() for each in wanted):
        state = f"has no {' or '.join(wanted)}" if folder.is_dir() else "is no folder"
        raise ModelError(
            f"{name} {state}, so there is no {what} to load; give a folder that save_pretrained wrote, or a hub id"
        )
    return str(folder)


def load_from(load: Callable[..., Any], source: Any, *, what: str, **options: Any) -> Any:
    """Call a loader of transformers, and raise ModelError for whatever it raises."""
    from safetensors import SafetensorError

    name = source if isinstance(source, str) else type(source).__name__
    try:
        return load(source, **options)
    except (
        SafetensorError,
        OSError,
        ValueError,
        KeyError,
        ImportError,
        RuntimeError,
        AttributeError,
        TypeError,
    ) as error:
        if "trust_remote_code" in str(error) and not options.get("trust_remote_code"):
            raise ModelError(
                f"{name}: its {what} needs Python code that comes with it. Read that code; then, to run it as you, "
                f"pass trust_remote_code=True (--trust-remote-code)"
            ) from error
        raise ModelError(f"{name}: transformers cannot load the {what}: {type(error).__name__}: {error}") from error
