"""A (sharded) model as a Hugging Face folder: streamed, written beside its place and renamed into it.

All ranks gather one tensor after the other. Each file belongs to one rank, which holds its tensors and writes it while
the others go on gathering. The folder looks like those on the Hub, whatever layout transformers has in memory:
transformers keeps some weights in another layout than files do, and its own reverse conversions run here, first on
meta tensors to plan names, shapes and dtypes, then on the weights, group by group.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_backends.checkpoints.folders import atomic_folder, probe_file, sees, unfinished_name, write_safetensors
from rl_backends.checkpoints.shards import this_rank
from rl_backends.errors import ModelError
from rl_backends.loading.skeleton import in_dtype, twin_of
from rl_backends.loading.source import dtype_of_config
from rl_backends.loading.weights import first_names
from rl_backends.rank_agreement import gather_text, on_every_rank, on_rank_0
from rl_parallel_plans import export_state_dict, named_shards


def export_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    dtype: torch.dtype | Literal["auto"] | None = None,
    max_shard_bytes: int = 5 * 2**30,
    tokenizer: Any = None,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
    every_rank: bool = False,
) -> None:
    """Write configuration, weights and generation configuration into `folder`, completely or not at all.

    A collective: every rank calls it, and every rank raises if one fails. What `from_pretrained` makes of the folder
    has bit for bit the weights of the model, in `dtype`. Ranks that see the folder of rank 0 share the writing of its
    files; the others only take part in gathering.

    Args:
        model: a model of transformers, plain or sharded.
        folder: where to; it must not exist.
        dtype: of floating-point tensors. "auto" takes for each tensor the dtype that it has in the files that the
            model was loaded from, or else the dtype of the model's configuration; None keeps each tensor's own, which
            is float32 for what this package trains.
        max_shard_bytes: of a file, unless a single tensor is larger. A writing rank holds one file in host memory.
        tokenizer: saved beside the model if it is given.
        tensors: what to write instead of the model's own weights, under the names of the model without adapters and
            in its order; on rank 0, or on every rank with `every_rank`. On other ranks it takes part in gathering.
        every_rank: `tensors` yields on every rank.

    Raises:
        FileExistsError: `folder` exists already; nothing is overwritten.
        ModelError: the model has adapters or other parameters that its class does not have, or transformers'
            conversions cannot be undone tensor by tensor.
        OSError: the disk is full or read-only; `folder` does not exist afterwards.
        RankError: on the ranks that did not fail.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} must be >= 1")
    target = Path(folder)
    unfinished = target.with_name(unfinished_name(target))
    skeleton: Any = twin_of(model)
    transforms = getattr(model, "_weight_conversions", None)
    if transforms is None:  # not loaded from files: those that can be undone without knowing the files
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        mapping = get_model_conversion_mapping(skeleton, add_legacy=False)
        transforms = [each for each in mapping if not isinstance(each, PrefixChange)]
    skeleton._weight_conversions = transforms  # noqa: SLF001
    groups = plan_groups(skeleton, _planned_tensors(model, skeleton, dtype=dtype, adapted=tensors is not None))
    outputs = {name: tensor for group in groups for name, tensor in group.outputs.items()}

    with ExitStack() as made:  # on rank 0: renamed to its place at the end, and removed by what raises
        on_rank_0(lambda: made.enter_context(atomic_folder(target, replace=False)))
        writers = [0]
        if (tensors is None or every_rank) and dist.is_initialized() and dist.get_world_size() > 1:
            # The ranks to which this is the same folder: without a shared file system, those of rank 0's node.
            with probe_file(unfinished.parent) if this_rank() == 0 else nullcontext(("", "")) as probe:
                path, token = json.loads(gather_text(json.dumps(probe))[0])
                seen = gather_text("yes" if sees(path, token) else "")
            writers = [rank for rank, answer in enumerate(seen) if answer]
        files = _ShardFiles(unfinished, outputs, max_shard_bytes=max_shard_bytes, writers=writers)
        stream = export_state_dict(model, every_rank=True, device=None) if tensors is None else tensors
        failure = _write_stream(stream, groups, files=files, skeleton=skeleton)
        try:
            on_every_rank(lambda: files.finish(failure))
        except BaseException:  # when all ranks have stopped writing, and before any of them returns
            on_rank_0(lambda: shutil.rmtree(unfinished, ignore_errors=True))
            raise

        def finish() -> None:
            files.write_index()
            floats = [tensor.dtype for tensor in outputs.values() if tensor.is_floating_point()]
            _write_configuration(model, skeleton, unfinished, dtype=floats[0] if floats else torch.float32)
            if tokenizer is not None:
                tokenizer.save_pretrained(unfinished)
            made.close()

        on_rank_0(finish)


def _planned_tensors(
    model: nn.Module, skeleton: Any, *, dtype: torch.dtype | Literal["auto"] | None, adapted: bool
) -> dict[str, Tensor]:
    """The tensors to be written, as meta tensors under the names of the model; the same on every rank."""
    shapes = skeleton.state_dict()
    # What has an adapter around it is X.base_layer, and X again once that is merged.
    own = {shard.name.replace(".base_layer.", "."): shard.tensor.dtype for shard in named_shards(model)}
    if not adapted and (foreign := sorted(own.keys() - shapes.keys())):
        raise ModelError(
            f"{type(skeleton).__name__} has no {', '.join(foreign[:3])}: merge adapters into the weights first, or "
            f"save them by themselves"
        )
    in_files: Mapping[str, torch.dtype] = getattr(model, "_file_dtypes", {})
    of_config = next(iter(in_files.values()), None) or dtype_of_config(model.config)
    tensors = {}
    for name in dict.fromkeys(first_names(skeleton).values()):
        if name in (skeleton._keys_to_ignore_on_save or ()):  # noqa: SLF001 - no public one
            continue
        kept = own.get(name, shapes[name].dtype)
        if kept.is_floating_point and dtype is not None:
            kept = dtype if isinstance(dtype, torch.dtype) else in_files.get(name, of_config) or kept
        tensors[name] = torch.empty(shapes[name].shape, dtype=kept, device="meta")
    return tensors


def _write_stream(
    stream: Iterable[tuple[str, Tensor]], groups: "list[Group]", *, files: "_ShardFiles", skeleton: nn.Module
) -> BaseException | None:
    """Take every tensor as it comes, and write those of this rank's files. Returns a failure: others still gather."""
    failure: BaseException | None = None
    mine = [group for group in groups if any(files.is_mine(name) for name in group.outputs)]
    group_of = {name: group for group in mine for name in group.names}
    waiting: dict[str, Tensor] = {}
    for name, tensor in stream:
        if failure is not None or name not in group_of:
            continue
        try:
            group = group_of[name]
            waiting[name] = tensor.to(device="cpu", dtype=group.dtypes[name])
            if waiting.keys() >= set(group.names):
                converted = as_in_files(skeleton, {each: waiting.pop(each) for each in group.names})
                for output in group.outputs:
                    files.add(output, converted.pop(output))
        except BaseException as caught:  # noqa: BLE001 - raised once the others know
            failure = caught
    return failure


def _write_configuration(model: Any, skeleton: Any, folder: Path, *, dtype: torch.dtype) -> None:
    """What transformers' own `save_pretrained` writes beside the weights."""
    config = in_dtype(model.config, dtype)
    config.architectures = [type(skeleton).__name__]
    if skeleton._auto_class is not None:  # noqa: SLF001 - code that came with the model goes with it
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(skeleton, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


class _ShardFiles:
    """The safetensors files of a model in one folder, dealt to the ranks that write, in turn.

    outputs: every tensor that will be added, as meta tensors, about in the order in which it will be: a file is held
        from its first tensor to its last.
    """

    def __init__(
        self, folder: Path, outputs: Mapping[str, Tensor], *, max_shard_bytes: int, writers: list[int]
    ) -> None:
        from huggingface_hub import split_torch_state_dict_into_shards

        self._folder, self._outputs = folder, outputs
        alone = {
            name: torch.empty_like(each) for name, each in outputs.items()
        }  # a view counts as what it is a view of
        self._split = split_torch_state_dict_into_shards(
            alone, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_bytes
        )
        self._file_of = self._split.tensor_to_filename
        self._missing = {
            file: set(names)
            for number, (file, names) in enumerate(self._split.filename_to_tensors.items())
            if writers[number % len(writers)] == this_rank()
        }
        self._held: dict[str, dict[str, Tensor]] = {}
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    def is_mine(self, name: str) -> bool:
        """Whether this rank writes the file of this tensor."""
        return self._file_of[name] in self._missing

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor, if it is in one of this rank's files; write the file that it completes, in the background."""
        if not self.is_mine(name):
            return
        planned = self._outputs[name]
        if tensor.shape != planned.shape:
            raise ModelError(f"{name} is {list(tensor.shape)}, and {list(planned.shape)} was to be written")
        tensor = tensor.to(planned.dtype)
        file = self._file_of[name]
        if file not in self._held and self._writing is not None:
            self._writing.result()  # so that one file is in memory, and not two
        # Memory of its own: safetensors refuses views, and a view keeps all of what it is a part of.
        alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        self._held.setdefault(file, {})[name] = tensor if alone else tensor.contiguous().clone()
        self._missing[file].remove(name)
        if not self._missing[file]:
            self._writing = self._thread.submit(
                write_safetensors, self._folder / file, self._held.pop(file), metadata={"format": "pt"}
            )

    def finish(self, failure: BaseException | None) -> None:
        """Wait until this rank's files are on disk."""
        self._thread.shutdown()
        if failure is not None:
            raise failure
        if self._writing is not None:
            self._writing.result()
        if missing := sorted(set().union(*self._missing.values())):
            raise ModelError(f"{len(missing)} tensors were not given to be written, the first is {missing[0]}")

    def write_index(self) -> None:
        """Write the index, if there are several files."""
        if self._split.is_sharded:
            index = {"metadata": self._split.metadata, "weight_map": self._file_of}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self._folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


# ---- From the layout of the model to that of files.


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tensors of the model that are written together, since one conversion needs all of them."""

    names: tuple[str, ...]
    """In the model, in its order; mostly one."""
    dtypes: dict[str, torch.dtype]
    """Of each of them, as it is to be written."""
    outputs: dict[str, Tensor]
    """What the files hold instead, by name: meta tensors."""


def plan_groups(skeleton: Any, tensors: Mapping[str, Tensor]) -> list[Group]:
    """The groups of `tensors`, in the order in which the last of each comes.

    skeleton: the unsharded model on the meta device, with `_weight_conversions` if it was loaded from files.
    tensors: meta tensors of what is to be written, by name in the model, in its order.
    """
    expected = as_in_files(skeleton, tensors)
    made = {name: as_in_files(skeleton, {name: tensor}) for name, tensor in tensors.items()}
    made_by: dict[str, list[str]] = {}
    for name, outputs in made.items():
        for output in outputs:
            made_by.setdefault(output, []).append(name)
    groups = []
    for names in _joined(tensors, made_by):
        outputs = made[names[0]] if len(names) == 1 else as_in_files(skeleton, {name: tensors[name] for name in names})
        groups.append(Group(names=names, dtypes={name: tensors[name].dtype for name in names}, outputs=outputs))
    planned = {name: tensor.shape for group in groups for name, tensor in group.outputs.items()}
    wanted = {name: tensor.shape for name, tensor in expected.items()}
    if different := sorted(name for name in planned.keys() | wanted.keys() if planned.get(name) != wanted.get(name)):
        raise ModelError(
            f"transformers makes {', '.join(different[:3])} of the files from all tensors of the model together, which "
            f"cannot be done one by one; gather the weights and use transformers' save_pretrained"
        )
    return groups


def _joined(tensors: Mapping[str, Tensor], made_by: Mapping[str, list[str]]) -> Iterator[tuple[str, ...]]:
    """Names that have an output in common, transitively; in the order of the last name of each."""
    group_of = {name: {name} for name in tensors}
    for names in made_by.values():
        merged = set().union(*(group_of[name] for name in names))
        for name in merged:
            group_of[name] = merged
    order = {name: at for at, name in enumerate(tensors)}
    for name in tensors:
        ordered = sorted(group_of[name], key=order.__getitem__)
        if name == ordered[-1]:
            yield tuple(ordered)


def as_in_files(skeleton: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the model as files have them, by the conversions of the installed transformers."""
    from transformers.core_model_loading import revert_weight_conversion

    try:
        converted: dict[str, Tensor] = revert_weight_conversion(skeleton, dict(tensors))
    except (ValueError, RuntimeError, IndexError, KeyError) as error:
        raise ModelError(
            f"transformers cannot write {', '.join(list(tensors)[:3])} as files have it: {error}"
        ) from error
    return converted
