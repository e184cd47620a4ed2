"""Weights of a sharded Megatron model to and from a distributed checkpoint (`torch_dist`), and nothing beside them.

Writing happens in the process itself. megatron-core's own writer starts processes of its own, one of which outlives
the save and may outlive its parent; files, names and metadata are the same.

A checkpoint has one file that is pickle, `.metadata`: it is first read here with nothing allowed but the classes of
torch's metadata, then by megatron-core. `common.pt` is read by torch without pickle's powers (`weights_only`).
"""

import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol, final, runtime_checkable

import torch

from rl_backends.checkpoints.dcp import describe_failure
from rl_backends.errors import CheckpointError
from rl_backends.rank_agreement import on_rank_0

__all__ = ["ShardedModel", "load_tensors", "save_tensors", "stored_dtypes"]

METADATA = ".metadata"
COMMON = {"checkpoint_version": 3.0, "iteration": 0}
"""What Megatron-LM looks for beside tensors."""
AGAINST_ITS_OWN = ("`load_state_dict` is deprecated", "Please use DTensor instead")
"""What torch says of how megatron-core 0.16.1 loads."""
ALLOWED = frozenset(
    {
        ("pathlib", "PosixPath"),
        ("torch", "Size"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "StorageMeta"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.serialization", "_get_layout"),
    }
)


@runtime_checkable
class ShardedModel(Protocol):
    """A MegatronModule."""

    def sharded_state_dict(self) -> dict[str, Any]:
        """This rank's part of every weight, as megatron-core describes parts."""
        ...


def save_tensors(model: ShardedModel, folder: Path) -> None:
    """Write the weights of a model into a folder that is there and empty; a collective of all ranks.

    Replicas are written once. Every file is on disk when it returns.

    Raises:
        Exception: of torch's Distributed Checkpoint or megatron-core; on every rank.
    """
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy

    sharded, _ = save_preprocess(_weights(model))  # that every number is written exactly once is checked here
    on_rank_0(lambda: TorchCommonSaveStrategy("torch", 1).save_common(dict(COMMON), folder))
    _write(sharded, folder)
    on_rank_0(lambda: save_config(CheckpointingConfig("torch_dist", 1), str(folder)))


def load_tensors(model: ShardedModel, folder: Path) -> None:
    """Fill a model, in whatever layout, from a folder of `save_tensors`; a collective of all ranks.

    Numbers are cast to the model's dtype. Parameters are written in place. Rows that pad a vocabulary become 0; that
    the vocabulary itself is the same cannot be seen here, because every layout pads it otherwise.

    Raises:
        CheckpointError: tensors are missing, left over, or of another shape; the model is unusable afterwards.
    """
    from megatron.core.dist_checkpointing import load
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.mapping import apply_factories
    from megatron.core.dist_checkpointing.validation import StrictHandling
    from torch.distributed.checkpoint.api import CheckpointException

    sharded = _weights(model)
    apply_factories(sharded)  # here and not by `load`, which would join what they cut in memory of its own
    parts = dict(_flat(sharded))
    targets = {name: part.data.detach() for name, part in parts.items()}
    try:
        with warnings.catch_warnings():
            for message in AGAINST_ITS_OWN:
                warnings.filterwarnings("ignore", message=message, category=FutureWarning)
            loaded = load(parts, str(folder), strict=StrictHandling.RAISE_ALL)
    except (CheckpointingException, CheckpointException, KeyError, OSError) as error:
        raise CheckpointError(
            f"{folder} does not hold this model, or cannot be read: {describe_failure(error)}"
        ) from error
    for name, target in targets.items():
        if loaded[name].data_ptr() != target.data_ptr():
            target.copy_(loaded[name].view(target.shape))


def stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """Dtype of each tensor of a checkpoint, by Megatron's name; whatever else its metadata would have done is refused.

    Raises:
        CheckpointError: the metadata is damaged, or names what is none of a checkpoint's.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata: Any = _MetadataUnpickler(file).load()
        return {name: each.properties.dtype for name, each in metadata.state_dict_metadata.items()}
    except Exception as error:  # of many kinds: whatever a damaged pickle raises
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _weights(model: ShardedModel) -> dict[str, Any]:
    """Parts of weights alone: states of kernels (`_extra_state`) are no weights, and differ from spec to spec."""
    from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    weights: dict[str, Any] = extract_matching_values(
        model.sharded_state_dict(), lambda value: isinstance(value, ShardedTensor | ShardedTensorFactory)
    )[0]
    return weights


def _write(sharded: dict[str, Any], folder: Path) -> None:
    from megatron.core.dist_checkpointing.strategies.torch import (
        MCoreSavePlanner,
        _replace_state_dict_keys_with_sharded_keys,
        mcore_to_pyt_state_dict,
    )
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    by_key = _replace_state_dict_keys_with_sharded_keys(sharded, True)[0]
    save(
        mcore_to_pyt_state_dict(by_key, False),
        storage_writer=FileSystemWriter(folder, single_file_per_rank=True, sync_files=True),
        planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
    )


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every part under a name of its own."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _flat(each, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _flat(each, f"{path}/{index}")
    else:
        yield path, value


@final
class _MetadataUnpickler(pickle.Unpickler):
    """Makes what torch's metadata is made of, and refuses everything else by its name."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no metadata of tensors has")
