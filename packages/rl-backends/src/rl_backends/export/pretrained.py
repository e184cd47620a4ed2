"""A (sharded) model as a Hugging Face folder: streamed, written beside its place and renamed into it.

All ranks gather one tensor after the other, and rank 0 writes: it holds the tensors of one file and never the model.
The folder looks as those on the Hub do, whatever layout transformers has in memory.
"""

import copy
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_backends.errors import ModelError
from rl_backends.export.files import ShardFiles, sync
from rl_backends.export.layout import Group, as_in_files, plan_groups
from rl_backends.loading.conversions import has_conversions
from rl_backends.loading.shards_by_name import first_names
from rl_backends.loading.skeleton import twin_of
from rl_backends.rank_agreement import on_rank_0
from rl_parallel_plans import export_state_dict, named_shards

__all__ = ["export_pretrained"]


def export_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 2**30,
    tokenizer: Any = None,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
) -> None:
    """Write configuration, weights and generation configuration into `folder`, whole or not at all.

    A collective: every rank calls it, and every rank raises if one fails. What `from_pretrained` makes of the folder
    has bit for bit the weights of the model, in `dtype`.

    Args:
        model: a model of transformers, plain or sharded.
        folder: where to; it must not exist.
        dtype: of floating-point tensors; None keeps each one's own, float32 for what this package trains.
        max_shard_bytes: of a file, unless a single tensor is larger. What rank 0 holds at once.
        tokenizer: saved beside the model where it is given.
        tensors: on rank 0, what to write instead of the model's own weights, under the names of the model without
            adapters and in its order; on the others what takes part in gathering them.

    Raises:
        FileExistsError: `folder` is there already; nothing is overwritten.
        ModelError: the model has adapters or other parameters that its class does not have, or transformers'
            conversions cannot be undone tensor by tensor.
        OSError: the disk is full or read-only; `folder` does not exist afterwards.
        RankError: on the ranks that did not fail.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} must be >= 1")
    target = Path(folder)
    unfinished = target.with_name(target.name + ".unfinished")
    skeleton = _skeleton(model)
    groups = _plan(model, skeleton, dtype=dtype, adapted=tensors is not None)
    on_rank_0(lambda: _begin(target, unfinished))
    files = ShardFiles(unfinished, _outputs(groups), max_shard_bytes=max_shard_bytes)
    stream = export_state_dict(model, dtype=dtype) if tensors is None else tensors
    with _removed_on_failure(unfinished):
        failure = _stream(stream, groups, files=files, skeleton=skeleton)

    def finish() -> None:
        with _removed_on_failure(unfinished):
            _raise(failure)
            files.finish()
            _write_configuration(model, skeleton, unfinished, dtype=_common_dtype(groups))
            if tokenizer is not None:
                tokenizer.save_pretrained(unfinished)
            _rename(unfinished, target)

    on_rank_0(finish)


def _skeleton(model: Any) -> nn.Module:
    """The unsharded model on the meta device, with the conversions by which the model was loaded."""
    skeleton: Any = twin_of(model)
    if has_conversions():
        transforms = getattr(model, "_weight_conversions", None)
        skeleton._weight_conversions = _default_transforms(skeleton) if transforms is None else transforms  # noqa: SLF001
    return skeleton  # type: ignore[no-any-return]


def _default_transforms(skeleton: Any) -> list[Any]:
    """Of a model that was not loaded from files: those that can be undone without knowing what files it had."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    mapping = get_model_conversion_mapping(skeleton, add_legacy=False)
    return [each for each in mapping if not isinstance(each, PrefixChange)]


def _plan(model: nn.Module, skeleton: Any, *, dtype: torch.dtype | None, adapted: bool) -> list[Group]:
    """What will be written, from shapes alone; the same on every rank."""
    whole = skeleton.state_dict()
    # What has an adapter around it is X.base_layer, and X again once that is merged.
    own = {shard.name.replace(".base_layer.", "."): shard.tensor.dtype for shard in named_shards(model)}
    if not adapted and (foreign := sorted(own.keys() - whole.keys())):
        raise ModelError(
            f"{type(skeleton).__name__} has no {', '.join(foreign[:3])}: merge adapters into the weights first, or "
            f"save them by themselves"
        )
    tensors = {}
    for name in dict.fromkeys(first_names(skeleton).values()):
        if name not in (skeleton._keys_to_ignore_on_save or ()):  # noqa: SLF001 - no public one
            kept = own.get(name, whole[name].dtype)
            asked = dtype if dtype is not None and kept.is_floating_point else kept
            tensors[name] = torch.empty(whole[name].shape, dtype=asked, device="meta")
    return plan_groups(skeleton, tensors)


def _begin(target: Path, unfinished: Path) -> None:
    if target.exists():
        raise FileExistsError(f"{target} exists already; a saved model is never overwritten, choose another folder")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)


def _stream(
    stream: Iterable[tuple[str, Tensor]], groups: list[Group], *, files: ShardFiles, skeleton: nn.Module
) -> BaseException | None:
    """Take every tensor as it comes, and write on rank 0; its failure, after the others have gathered to the end."""
    failure: BaseException | None = None
    group_of = {name: group for group in groups for name in group.names}
    waiting: dict[str, Tensor] = {}
    for name, tensor in stream:
        if failure is not None or name not in group_of or not _is_first_rank():
            continue
        try:
            waiting[name] = tensor
            group = group_of[name]
            if waiting.keys() >= set(group.names):
                _write(group, {each: waiting.pop(each) for each in group.names}, files=files, skeleton=skeleton)
        except BaseException as caught:  # noqa: BLE001 - raised once the others know
            failure = caught
    return failure


def _write(group: Group, tensors: dict[str, Tensor], *, files: ShardFiles, skeleton: nn.Module) -> None:
    converted = as_in_files(skeleton, tensors)
    tensors.clear()
    for name, planned in group.outputs.items():
        tensor = converted.pop(name)
        if tensor.shape != planned.shape:
            raise ModelError(f"{name} is {list(tensor.shape)}, and {list(planned.shape)} was to be written")
        files.add(name, tensor.to(planned.dtype))


def _write_configuration(model: Any, skeleton: Any, folder: Path, *, dtype: torch.dtype) -> None:
    """What transformers' own `save_pretrained` writes beside the weights."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(skeleton).__name__]
    sub_configs = [getattr(config, name, None) for name in config.sub_configs]
    for each in (config, *sub_configs):
        if each is not None:
            each.dtype = str(dtype).removeprefix("torch.")
    if skeleton._auto_class is not None:  # noqa: SLF001 - code that came with the model goes with it
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(skeleton, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _common_dtype(groups: list[Group]) -> torch.dtype:
    """Of the floating-point tensor that is written first, as transformers has it."""
    return next((each.dtype for each in _outputs(groups).values() if each.is_floating_point()), torch.float32)


def _outputs(groups: list[Group]) -> dict[str, Tensor]:
    return {name: tensor for group in groups for name, tensor in group.outputs.items()}


def _rename(unfinished: Path, target: Path) -> None:
    sync([*unfinished.iterdir(), unfinished])
    if target.exists():  # an empty one would be replaced without a word
        raise FileExistsError(f"{target} was made while the model was written; choose another folder")
    unfinished.rename(target)
    sync([target.parent])


@contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if _is_first_rank():
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _raise(failure: BaseException | None) -> None:
    if failure is not None:
        raise failure


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
