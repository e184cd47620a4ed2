"""A Hugging Face model as a distributed checkpoint of Megatron-LM.

Training needs no conversion: `MegatronBackend.from_pretrained` reads Hugging Face files. This is an export for people
who go on with Megatron-LM.

    <directory>/<model>-<key>/conversion.json                    what it is of, and the SHA-256 of every other file
                              latest_checkpointed_iteration.txt  by which Megatron-LM finds `release`
                              release/                           what `megatron.core.dist_checkpointing.load` reads

The key in the folder's name is a digest of the model's files, so a changed model gets a folder of its own. A conversion
is written under a hidden name and renamed when it is complete: a kill leaves a complete one or none. Where there is one
already, every byte of it is checked.

`release/.metadata` and `common.pt` are pickle, as megatron-core writes and reads them; nothing here reads them. The
digests find damage, not malice: keep conversions where only people write whom you would let run code.
"""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from torch.distributed.checkpoint.api import CheckpointException

from rl_backends.checkpoints.folders import (
    atomic_folder,
    digest_of,
    in_threads,
    read_marker,
    records_of,
    text_digest,
    write_marker,
)
from rl_backends.errors import CheckpointError
from rl_backends.loading.source import ModelSource, local_folder
from rl_backends.megatron.config import (
    VARIABLE,
    MegatronConfig,
    explain_megatron_checkpoint_dir,
    megatron_checkpoint_dir,
)
from rl_backends.megatron.cpu_compat import cpu_compat
from rl_backends.megatron.model import MegatronModel
from rl_backends.megatron.weights import from_files

MANIFEST = "conversion.json"
FORMAT = ("rl-backends conversion", 4)
WEIGHTS = "release"
"""The name that Megatron-LM has for a checkpoint that no training step made."""
TRACKER = "latest_checkpointed_iteration.txt"
COMMON = {"checkpoint_version": 3.0, "iteration": 0}
"""What Megatron-LM looks for beside the tensors."""
HUB_BLOB = re.compile(r"[0-9a-f]{64}")
"""Name of a file in the Hub's cache, which is the SHA-256 of what it holds."""
DAMAGED = "delete the folder, and run `rl-backends convert` again"
ELSEWHERE = f"make room, or name another folder in {VARIABLE}"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A complete conversion; `convert` and `read_conversion` give it once every byte has been checked."""

    folder: Path
    about: Mapping[str, Any]
    """What the manifest says: the model's name, commit and class, key (SHA-256 of its files), dtype, the releases that
    wrote it and how long it took, and `files`: bytes and SHA-256 of every other file, by its path in the folder."""
    found: bool
    """True if it was there already, False if this run wrote it."""

    @property
    def num_bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(size for size, _ in self.about["files"].values())

    def explain(self) -> str:
        """Where it is, of what, how large, and whether this run made it."""
        about = self.about
        model = about["model_name"] + (f" at {about['revision'][:8]}" if about["revision"] else "")
        return (
            f"{self.folder}: {model} ({about['architecture']}) as a Megatron checkpoint in {about['dtype']}, "
            f"{self.num_bytes / 2**20:,.2f} MiB, made {about['written_at']} in {about['seconds']:.1f} s; "
            f"{'found, every byte checked' if self.found else 'written now'}"
        )


def convert(source: ModelSource, *, directory: str | Path | None = None, progress: Say | None = None) -> Conversion:
    """Write the conversion of a model, or find the one that is there, in this process, which holds the whole model.

    Args:
        source: the model.
        directory: of all conversions; None for `megatron_checkpoint_dir()`.
        progress: called with a line of text now and then.
    """
    parent = (megatron_checkpoint_dir() if directory is None else Path(directory)).expanduser().absolute()
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where = explain_megatron_checkpoint_dir() if directory is None else str(directory)
        raise CheckpointError(f"conversions cannot lie in {where}: {error}; {ELSEWHERE}") from error
    own = local_folder(source.model_name)
    key, dtype = _content_of(source)
    plain = source.model_name.replace("/", "--") if own is None else own.resolve().name
    safe = re.sub(r"[^A-Za-z0-9._]+", "-", plain).strip("-._")[:80] or "model"
    target = parent / f"{safe}-{key[:16]}"
    if target.is_dir():
        return read_conversion(target)

    started = time.monotonic()
    if progress is not None:
        progress(f"converting {source.model_name} to {target}")
    try:
        with atomic_folder(target) as unfinished:
            (unfinished / WEIGHTS).mkdir()
            skeleton, config = source.skeleton(), MegatronConfig(precision=dtype)
            model = MegatronModel(skeleton, config, fill=partial(from_files, source, skeleton), trainable=False)
            try:
                with cpu_compat():
                    _save(model.chunks[0], unfinished / WEIGHTS)
            finally:
                model.close(collect=False)
            (unfinished / TRACKER).write_text(WEIGHTS, encoding="utf-8")
            if _content_of(source)[0] != key:
                raise CheckpointError(  # noqa: TRY301
                    f"the files of {source.model_name} changed while they were converted; start again"
                )
            about = {
                "model_name": source.model_name if own is None else str(own.resolve()),
                "revision": source.folder.name if own is None else None,
                "key": key,
                "architecture": next(iter(source.config.architectures or [source.config.model_type])),
                "dtype": dtype,
                "seconds": round(time.monotonic() - started, 3),
                "written_at": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
                "libraries": {name: version(name) for name in ("megatron-core", "torch", "transformers")},
            }
            files = sorted(path for path in unfinished.rglob("*") if path.is_file())
            write_marker(unfinished / MANIFEST, about, format=FORMAT, files=records_of(unfinished, files))
    except CheckpointError:
        raise
    except (OSError, RuntimeError, CheckpointException) as error:
        told = error.failures[0][0] if isinstance(error, CheckpointException) else error  # without its traceback
        raise CheckpointError(f"{target} cannot be written: {type(told).__name__}: {told}; {ELSEWHERE}") from error
    return read_conversion(target, found=False)


def read_conversion(folder: str | Path, *, found: bool = True) -> Conversion:
    """Read the manifest of a conversion, and compare every byte of every file with it."""
    about = read_marker(Path(folder) / MANIFEST, format=FORMAT, remedy=DAMAGED)
    return Conversion(folder=Path(folder), about=about, found=found)


def _content_of(source: ModelSource) -> tuple[str, Literal["bfloat16", "float32"]]:
    """A key of the model's files, and the dtype of a conversion of them."""
    from safetensors import SafetensorError, safe_open

    def digest(file: Path) -> str:
        blob = file.resolve().name
        return blob if file.is_symlink() and HUB_BLOB.fullmatch(blob) else digest_of(file)

    files = source.weight_files()
    digests = dict(zip([file.name for file in files], in_threads(digest, files), strict=True))
    dtypes: set[str] = set()
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                dtypes |= {opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise CheckpointError(f"{file} is no safetensors file: {error}; fetch it again") from error
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if dtypes == {"BF16"} else "float32"  # which holds float16
    config = digest_of(source.folder / "config.json")
    return text_digest({"head": source.head, "config": config, "files": digests}), dtype


def _save(gpt: Any, folder: Path) -> None:
    """Write the weights as `torch_dist`, without the states of kernels (`_extra_state`).

    megatron-core's own writer starts processes that may outlive the run. torch's writes the same files, names and
    metadata from this one.
    """
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
    from megatron.core.dist_checkpointing.strategies.torch import (
        MCoreSavePlanner,
        _replace_state_dict_keys_with_sharded_keys,
        mcore_to_pyt_state_dict,
    )
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    weights, _ = extract_matching_values(
        gpt.sharded_state_dict(), lambda value: isinstance(value, ShardedTensor | ShardedTensorFactory)
    )
    sharded, _ = save_preprocess(weights)  # which also checks that every element is written exactly once
    TorchCommonSaveStrategy("torch", 1).save_common(dict(COMMON), folder)
    save(
        mcore_to_pyt_state_dict(_replace_state_dict_keys_with_sharded_keys(sharded, True)[0], False),
        storage_writer=FileSystemWriter(folder, single_file_per_rank=True, sync_files=True),
        planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
    )
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))
