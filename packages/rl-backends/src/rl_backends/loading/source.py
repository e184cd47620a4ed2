"""A model that is in a folder or on the Hub: its configuration now, its skeleton and its weights when asked.

Between `ModelSource.skeleton` and `ModelSource.load_into` the caller may shard the model in any way. A folder on this
machine is read as it is, and the network is never asked. Any other name is a model of the Hub, whose configuration and
safetensors files come into the Hub's cache, all of one commit.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from rl_backends.errors import ModelError, RankError, some
from rl_backends.loading.skeleton import in_dtype, make_skeleton
from rl_backends.loading.weights import LoadReport, Shard, load_weights, shards_by_name
from rl_backends.rank_agreement import gather_text, on_every_rank

Head = Literal["causal_lm", "sequence_classification"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model that is not loaded yet; `open_model` makes it."""

    model_name: str
    """The folder or the id of the Hub that was asked for."""
    folder: Path
    """Where the configuration lies: that folder, or the one of a commit in the Hub's cache."""
    config: Any
    """The configuration, a `PretrainedConfig`."""
    head: Head
    trust_remote_code: bool

    def skeleton(self) -> nn.Module:
        """The model in float32 and eval mode without weights: parameters on the meta device, other buffers real.

        Ties are made, and the folder's generation configuration is attached and checked.

        Raises:
            ModelError: transformers has no such class or cannot make it, or generation_config.json is contradictory.
        """
        from transformers import GenerationConfig

        model: Any = self._bare()
        if (self.folder / "generation_config.json").is_file() and model.can_generate():
            try:
                model.generation_config = GenerationConfig.from_pretrained(str(self.folder))
            except (OSError, ValueError) as error:
                raise ModelError(f"{self.folder / 'generation_config.json'} cannot be read: {error}") from error
        check_generation_config(model)
        model._file_dtypes = dtypes_in_files(model, self.config)  # noqa: SLF001
        skeleton: nn.Module = model
        return skeleton

    def load_into(self, model: nn.Module, *, new_head: bool = False, seed: int = 0) -> LoadReport:
        """Fill a skeleton, which may be sharded and has memory (`materialize`), from the safetensors files.

        Each rank reads its own parts alone, straight into its shards, cast to their dtype. Adapters keep their weights.

        Args:
            model: what became of `skeleton()`; the same on every rank but for its shards.
            new_head: draw the head at random where the files have none, as for a reward model from a language model.
            seed: of that head.

        Raises:
            ModelError: a tensor is missing, unexpected, of another shape or dtype, or made in a way that cannot be done
                shard by shard; a file is damaged; ranks have opened different commits. The model is unusable
                afterwards.
        """
        self._require_one_commit()
        bare = self._bare()
        shards = shards_by_name(model, bare)
        report = load_weights(shards, self.weight_files(), skeleton=bare, new_head=new_head, seed=seed)
        model._weight_conversions = bare._weight_conversions  # noqa: SLF001 - as from_pretrained leaves it
        model._file_dtypes = report.dtypes  # type: ignore[assignment]  # noqa: SLF001 - for `export_pretrained(dtype="auto")`
        return report

    def load_shards(
        self, shards: Mapping[str, Sequence[Shard]], skeleton: nn.Module, *, new_head: bool = False, seed: int = 0
    ) -> LoadReport:
        """As `load_into`, into whatever holds parts of the tensors of `skeleton()`, by their first names."""
        self._require_one_commit()
        return load_weights(shards, self.weight_files(), skeleton=skeleton, new_head=new_head, seed=seed)

    def weight_files(self) -> list[Path]:
        """The safetensors files, fetched where they are not in the Hub's cache.

        Raises:
            ModelError: there are none, or not all that the index names.
        """
        folder = self.folder
        names = ["model.safetensors"]
        if (index := folder / INDEX).is_file():
            try:
                names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()), key=str)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ModelError(
                    f"{index} is no index of safetensors files: {type(error).__name__}: {error}"
                ) from error
        for name in names:
            if not isinstance(name, str) or PurePosixPath(name).name != name or name in {"", ".."}:
                raise ModelError(
                    f"{index}: weight_map names {name!r}, which is no file of its own folder; only files of {folder} "
                    f"are read"
                )
        if local_folder(self.model_name) is None:
            folder = _download(self.model_name, revision=folder.name, patterns=names)
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise ModelError(
                f"{self.model_name}: no file {', '.join(missing[:3])}; weights are read from safetensors alone, so "
                f"give the whole folder, or convert other formats with transformers' save_pretrained"
            )
        return [folder / name for name in names]

    def _require_one_commit(self) -> None:
        if local_folder(self.model_name) is None and len(commits := set(gather_text(self.folder.name))) > 1:
            raise ModelError(
                f"the ranks have opened {len(commits)} commits of {self.model_name}: {', '.join(sorted(commits))}; "
                f"give one of them as revision"
            )

    def _bare(self) -> nn.Module:
        auto = _auto_class(self.config, self.head)

        def make() -> nn.Module:
            model: nn.Module = auto.from_config(
                in_dtype(self.config, torch.float32), dtype=torch.float32, trust_remote_code=self.trust_remote_code
            )
            return model

        try:
            return make_skeleton(make)
        except ModelError:
            raise
        except Exception as error:  # of many kinds: whatever a model's code raises on a configuration
            raise ModelError(
                f"{self.model_name}: transformers cannot make a model of config.json: {type(error).__name__}: {error}"
            ) from error


def open_model(
    model_name: str,
    *,
    head: Head = "causal_lm",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> ModelSource:
    """Find a model and read its configuration; weights are not read, nor fetched, before `load_into`.

    Every rank must call it where there is a process group and `model_name` is an id of the Hub: what a branch means is
    asked by rank 0 alone, and its commit is told to all.

    Args:
        model_name: a folder with `config.json`, for which the network is never asked, or an id of the Hub.
        head: a language model's, or one number (reward and value models). A model of images and text is opened as such
            where its configuration is not that of a language model.
        revision: branch, tag or commit on the Hub; pin it to make a run repeatable. All files are of one commit.
        trust_remote_code: run the model's own Python code. Only for code that you have read.

    Raises:
        ModelError: there is no such model, its configuration cannot be read, or it is quantized.
    """
    from transformers import AutoConfig

    folder = _folder_of_one_commit(model_name, revision=revision, trust_remote_code=trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as error:  # of many kinds: of the operating system, transformers, json, the model's own code
        raise ModelError(
            f"{model_name}: transformers cannot load the model: config.json: {type(error).__name__}: {error}"
        ) from error
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{model_name} is quantized, and quantized weights cannot be trained; give the original model")
    if head == "sequence_classification":
        config.num_labels = 1
    return ModelSource(
        model_name=model_name, folder=folder, config=config, head=head, trust_remote_code=trust_remote_code
    )


def _folder_of_one_commit(model_name: str, *, revision: str | None, trust_remote_code: bool) -> Path:
    """The folder of the configuration, of the same commit on every rank that shares a process group."""

    def find(revision: str | None) -> Path:
        patterns = ["config.json", "generation_config.json", INDEX, *(["*.py"] if trust_remote_code else [])]
        folder = _download(model_name, revision=revision, patterns=patterns)
        if not (folder / "config.json").is_file():
            raise ModelError(f"{model_name}: the repository on the Hub has no config.json, so it is not a model")
        return folder

    if (own := local_folder(model_name)) is not None:
        return own
    if not dist.is_initialized():
        return find(revision)
    first = dist.get_rank() == 0
    try:
        found = on_every_rank(lambda: find(revision) if first else None)
        commit = gather_text("" if found is None else found.name)[0]
        return on_every_rank(lambda: find(commit) if found is None else found)
    except RankError as error:
        raise ModelError(f"{model_name} was not found by all ranks: {error}") from error


def _auto_class(config: Any, head: Head) -> Any:
    import transformers

    if head == "sequence_classification":
        return transformers.AutoModelForSequenceClassification
    text, images = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
    of_text = type(config) in text._model_mapping or "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})  # noqa: SLF001
    return images if not of_text and type(config) in images._model_mapping else text  # noqa: SLF001 - no public one


# ---- Whole models and tokenizers by transformers, and what is checked of them before a run and not after it.

CONFIG = ("config.json",)
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
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):  # which transformers would fill in at random
        if found := sorted(map(str, report.get(kind) or [])):
            raise ModelError(
                f"{model_name}: {kind.replace('_', ' ')}: {some(found)}. Training would go on from random weights "
                f"there; give the folder of the whole causal language model"
            )
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
    if (folder := local_folder(model_name, holding=CONFIG if what == "model" else TOKENIZER_FILES)) is not None:
        model_name = str(folder)
    try:
        return auto_class.from_pretrained(model_name, **options)
    except Exception as error:  # of many kinds: of the operating system, transformers, safetensors, jinja
        raise ModelError(
            f"{model_name}: transformers cannot load the {what}: {type(error).__name__}: {error}"
        ) from error


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


# ---- Folders and the Hub.

INDEX = "model.safetensors.index.json"


def local_folder(model_name: str, *, holding: Sequence[str] = CONFIG) -> Path | None:
    """The folder that `model_name` means, with one of the files `holding`; None where it is an id of the Hub."""
    folder = Path(model_name).expanduser()
    if not (model_name.startswith((".", "/", "~")) or folder.exists()):
        return None
    if not any((folder / name).is_file() for name in holding):
        state = f"has no {' or '.join(holding)}" if folder.is_dir() else "does not exist"
        raise ModelError(f"{model_name}: {state}; give a folder that save_pretrained wrote, or an id of the Hub")
    return folder


def _download(model_name: str, *, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_name, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # the Hub's errors are both
        raise ModelError(
            f"{model_name} is not a local folder, and the Hub has no model of this name"
            f"{'' if revision is None else f' at revision {revision}'}: {type(error).__name__}: {error}"
        ) from error
