"""Weights from files into a model that may be sharded: each rank reads what it holds, and nothing else.

Nothing is gathered and nothing sent. A weight is cast to the model's dtype piece by piece, on its way from the file
into its place. The files must hold the whole model and nothing else, except what transformers itself ignores.

transformers 5 keeps some weights in another layout than files do: experts stacked, projections joined or split, other
names. Its own conversions run here on tensors that are not read yet. transformers 4 only renames.
"""

import copy
import importlib.util
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from rl_backends.errors import ModelError
from rl_backends.loading.lazy_tensors import LazyTensor, UnknownConversionError, open_tensors
from rl_backends.loading.skeleton import initial_value, twin_of
from rl_parallel_plans import Box, NamedShard, named_shards, stage_info

# ---- Which part of which tensor a rank holds.

ADAPTER = re.compile(r"(^|[._])lora_")
"""In the names of what adapters add to a model."""

WRAPPED = re.compile(r"(\.(base_layer|original_module|modules_to_save\.[^.]+))+(?=\.)")
"""What adapters put into the names of the parameters that they wrap or copy."""


@runtime_checkable
class Shard(Protocol):
    """This rank's part of one tensor, whatever has cut it."""

    @property
    def name(self) -> str:
        """In the Hugging Face model."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the unsharded tensor."""

    @property
    def local(self) -> Tensor:
        """This rank's memory."""

    def boxes(self) -> list[Box]:
        """The parts of the whole that it consists of."""


def first_names(skeleton: nn.Module) -> dict[str, str]:
    """Each name of a parameter or persistent buffer to the first name of that tensor: itself, if it is not tied."""
    first: dict[int, str] = {}
    tensors = skeleton.state_dict(keep_vars=True)
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}


def shards_by_name(model: nn.Module, skeleton: nn.Module) -> dict[str, list[NamedShard]]:
    """What this rank holds of each tensor of `skeleton`, by its first name; adapters are left out.

    Several shards are of one tensor where an adapter keeps a copy of it. A pipeline stage has some of the tensors.
    """
    first = first_names(skeleton)
    shapes = {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}
    found: dict[str, list[NamedShard]] = {}
    for shard in named_shards(model):
        if ADAPTER.search(shard.name):
            continue
        name = WRAPPED.sub("", shard.name.removeprefix("base_model.model."))
        if shapes.get(name) != tuple(shard.shape):
            known = f"is {list(shapes[name])} there" if name in shapes else "is unknown there"
            raise ModelError(
                f"{shard.name} {list(shard.shape)} {known}: the model is no {type(skeleton).__name__} of this source"
            )
        if shard.local.is_meta:
            raise ModelError(f"{shard.name} lies on the meta device: call materialize(model, device) first")
        found.setdefault(first[name], []).append(shard)
    if (absent := sorted(set(first.values()) - found.keys())) and stage_info(model) is None:
        raise ModelError(f"the model has no {_some(absent)}, which {type(skeleton).__name__} has")
    return found


@torch.no_grad()
def write_whole(whole: Tensor, shards: Iterable[Shard]) -> None:
    """Copy this rank's parts of `whole` into its shards."""
    for shard in shards:
        local = shard.local
        for box in shard.boxes():
            box.of_local(local).copy_(box.of_whole(whole))


# ---- From the layout of files to that of the model.


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """Tensors of files under the names and in the layouts of a model."""

    tensors: dict[str, LazyTensor]
    """By name in the model; a tied tensor under as many names as files have it."""
    unexpected: dict[str, str]
    """Name in the files to the name that it would have in the model, which has none of that name."""
    transforms: list[Any]
    """Conversions of transformers that were used, by which a folder is written as this one was."""


def has_conversions() -> bool:
    """Whether this release of transformers keeps weights otherwise than files do."""
    return importlib.util.find_spec("transformers.core_model_loading") is not None


def as_in_model(skeleton: nn.Module, found: Mapping[str, LazyTensor]) -> Converted:
    """The tensors of files as `skeleton` has them; nothing is read."""
    return _converted(skeleton, found) if has_conversions() else _renamed(skeleton, found)


def _renamed(skeleton: Any, found: Mapping[str, LazyTensor]) -> Converted:
    """The names of transformers 4: the first pattern of the class that matches, and the prefix of the base model."""
    expected = skeleton.state_dict()
    tensors: dict[str, LazyTensor] = {}
    unexpected: dict[str, str] = {}
    for name, tensor in found.items():
        renamed = name
        for pattern, replacement in skeleton._checkpoint_conversion_mapping.items():  # noqa: SLF001 - no public one
            renamed, matches = re.subn(pattern, replacement, name)
            if matches:
                break
        if renamed not in expected and f"{skeleton.base_model_prefix}.{renamed}" in expected:
            renamed = f"{skeleton.base_model_prefix}.{renamed}"
        _add({renamed: tensor}, tensors) if renamed in expected else unexpected.update({name: renamed})
    return Converted(tensors=tensors, unexpected=unexpected, transforms=[])


def _converted(skeleton: Any, found: Mapping[str, LazyTensor]) -> Converted:
    """As transformers 5 does it in `convert_and_load_state_dict_in_model`, with tensors that are not read."""
    from transformers import core_model_loading as core
    from transformers.conversion_mapping import get_model_conversion_mapping

    expected = skeleton.state_dict()
    prefix = skeleton.base_model_prefix
    transforms = get_model_conversion_mapping(skeleton)
    renamings = [each for each in transforms if isinstance(each, core.WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, core.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    tensors: dict[str, LazyTensor] = {}
    unexpected: dict[str, str] = {}
    collected: dict[str, Any] = {}
    for name in sorted(found, key=core.dot_natural_key):
        renamed, pattern = core.rename_source_key(name, renamings, converters, prefix, expected)
        if renamed not in expected and name in expected:
            renamed, pattern = core.rename_source_key(name, [], [], prefix, expected)
        if renamed not in expected:
            unexpected[name] = renamed
        elif pattern is None:
            _add({renamed: found[name]}, tensors)
        else:
            converter = collected.setdefault(renamed, copy.deepcopy(by_pattern[pattern]))
            converter.add_tensor(renamed, name, pattern, found[name])
    for renamed, converter in collected.items():
        _add(_run(converter, renamed, skeleton), tensors)
    used = [each for each in transforms if each.was_used()]
    return Converted(tensors=tensors, unexpected=unexpected, transforms=used)


def _run(converter: Any, name: str, skeleton: Any) -> dict[str, LazyTensor]:
    try:
        converted = converter.convert(name, model=skeleton, config=skeleton.config)
    except UnknownConversionError as error:
        raise ModelError(
            f"transformers makes {name} from the files by {converter.operations}, and {error} cannot be done shard by "
            f"shard; load the model whole with load_causal_lm"
        ) from error
    except (ValueError, RuntimeError, IndexError) as error:
        raise ModelError(f"the files do not hold what {name} is made of: {error}") from error
    return {name: each[0] if isinstance(each, list) else each for name, each in converted.items()}


def _add(new: Mapping[str, LazyTensor], tensors: dict[str, LazyTensor]) -> None:
    if twice := sorted(tensors.keys() & new.keys()):
        raise ModelError(f"the files hold {', '.join(twice[:3])} twice, under different names")
    tensors.update(new)


# ---- Reading.


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What this rank read."""

    tensors: int
    """How many tensors of the model were filled; a tied one counts once."""
    bytes_read: int
    """Bytes of this rank's parts in the files."""
    seconds: float
    """How long all of it took."""
    ignored: tuple[str, ...]
    """Tensors of the files that the model has no use for."""
    new: tuple[str, ...]
    """Parameters of a new head, which no file holds and which were drawn at random."""
    dtypes: Mapping[str, torch.dtype]
    """In the files, of each floating-point tensor of the model."""


@torch.no_grad()
def load_weights(
    shards: Mapping[str, Sequence[Shard]], files: Sequence[Path], *, skeleton: nn.Module, new_head: bool, seed: int
) -> LoadReport:
    """Fill `shards`, which have memory, from `files`; the rest as `ModelSource.load_into`.

    shards: what this rank holds of each tensor, by its first name; a rank may hold nothing of some.
    skeleton: the model before it was sharded; it learns what transformers has converted in reading.
    """
    start = time.monotonic()
    with open_tensors(files) as found:
        converted = as_in_model(skeleton, found)
        feeds = _feeds(converted, skeleton)
        new = sorted(_head(skeleton) - feeds.keys()) if new_head else []
        ignored = sorted(_ignored(converted, skeleton, other_heads=bool(new)))
        if problems := _problems(converted, skeleton, fed={*feeds, *new}, ignored=ignored):
            raise ModelError(
                f"the files in {files[0].parent} are not those of {type(skeleton).__name__}: {'; '.join(problems)}"
            )
        bytes_read = sum(_read(each, shards.get(name, ())) for name, each in feeds.items())
    for name in new:
        write_whole(initial_value(skeleton, name, seed=seed), shards.get(name, ()))
    skeleton._weight_conversions = converted.transforms  # type: ignore[assignment]  # noqa: SLF001 - as from_pretrained
    return LoadReport(
        tensors=len(shards),
        bytes_read=bytes_read,
        seconds=time.monotonic() - start,
        ignored=tuple(ignored),
        new=tuple(new),
        dtypes={name: each[0][1].dtype for name, each in feeds.items() if each[0][1].dtype.is_floating_point},
    )


def _feeds(converted: Converted, skeleton: nn.Module) -> dict[str, list[tuple[str, LazyTensor]]]:
    """What files hold of each tensor, by its first name: more than one where they hold both ends of a tie."""
    feeds: dict[str, list[tuple[str, LazyTensor]]] = {}
    for name, first in first_names(skeleton).items():
        if name in converted.tensors:
            feeds.setdefault(first, []).append((name, converted.tensors[name]))
    return feeds


def _head(skeleton: nn.Module) -> set[str]:
    """Names of what a model has beside its base model."""
    return {first for first in first_names(skeleton).values() if not _in_base_model(first, skeleton)}


def _in_base_model(name: str, skeleton: Any) -> bool:
    return name.startswith(f"{skeleton.base_model_prefix}.")


def _ignored(converted: Converted, skeleton: Any, *, other_heads: bool) -> Iterator[str]:
    """What the class says that files may hold; where a new head is made, the heads of other classes too."""
    patterns = [*(skeleton._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]  # noqa: SLF001
    for name, renamed in converted.unexpected.items():
        if any(re.search(pattern, each) for pattern in patterns for each in (name, renamed)) or (
            other_heads and not _in_base_model(renamed, skeleton)
        ):
            yield name


def _problems(
    converted: Converted, skeleton: nn.Module, *, fed: Collection[str], ignored: Collection[str]
) -> list[str]:
    missing = [first for first in dict.fromkeys(first_names(skeleton).values()) if first not in fed]
    unexpected = [name for name in converted.unexpected if name not in ignored]
    shapes = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
    misshaped = [
        f"{name} ({list(tensor.shape)} in the files, {list(shapes[name])} in the model)"
        for name, tensor in converted.tensors.items()
        if tensor.shape != shapes[name]
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": misshaped}
    problems = [f"{kind}: {_some(names)}" for kind, names in kinds.items() if names]
    if missing and all(not _in_base_model(name, skeleton) for name in missing):
        problems.append("the head alone is missing, which new_head=True draws at random")
    return problems


def _read(feeds: Sequence[tuple[str, LazyTensor]], shards: Sequence[Shard]) -> int:
    """Fill this rank's parts of one tensor; return how many bytes of files they are."""
    (name, tensor), *others = feeds
    total = 0
    for shard in shards:
        local = shard.local
        for box in shard.boxes():
            place = box.of_local(local)
            tensor.read_into(place, box.offsets)
            total += place.numel() * tensor.dtype.itemsize
            for other, lazy in others:
                again = torch.empty_like(place)
                lazy.read_into(again, box.offsets)
                if not torch.equal(again, place):
                    raise ModelError(
                        f"the configuration ties {name} and {other}, and the files hold two different tensors; set "
                        f"tie_word_embeddings to false in config.json"
                    )
    return total


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def initialise(model: nn.Module, *, seed: int) -> None:
    """Draw every parameter of a (sharded) model anew; one that is tied once, and adapters not at all.

    Raises:
        ModelError: it is no model of transformers, its parameters lie on the meta device, or one has no rule.
    """
    skeleton = twin_of(model)
    for name, shards in shards_by_name(model, skeleton).items():
        write_whole(initial_value(skeleton, name, seed=seed), shards)
