"""Weights from files into a model that may be sharded: each rank reads what it holds, and nothing else.

Nothing is gathered and nothing sent. A weight is cast to the model's dtype piece by piece, on its way from the file
into its place. The files must hold the whole model and nothing else, except what transformers itself ignores.

transformers keeps some weights in another layout than files do: experts stacked, projections joined or split, other
names. Its own conversions run here on tensors that are not read yet.
"""

import copy
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from rl_backends.errors import ModelError, some
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
        raise ModelError(f"the model has no {some(absent)}, which {type(skeleton).__name__} has")
    return found


@torch.no_grad()
def write_whole(whole: Tensor, shards: Iterable[Shard]) -> None:
    """Copy this rank's parts of `whole` into its shards."""
    for shard in shards:
        local = shard.local
        for box in shard.boxes():
            box.of_local(local).copy_(box.of_whole(whole))


# ---- Tensors in files, read when asked, and what stacking, splitting and transposing make of them.
#
# The conversions that transformers runs on tensors (`torch.stack`, `torch.cat`, ...) run on a `LazyTensor` too, and
# return another one. A conversion that needs the elements, or another view of them, is refused by its name.

PIECE_BYTES = 32 * 2**20
"""Most bytes that are read at once, where a row of a tensor is not larger."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Under the names of safetensors. Floats of 8 bits and fewer are absent: their scales lie in other tensors."""


class UnknownConversionError(TypeError):
    """A function of torch that is not done on slices of files; the message is its name."""


class LazyTensor:
    """A tensor whose numbers lie in files.

    `read_into(out, offsets)` copies into `out`, cast to its dtype, the box of its shape that begins at `offsets`.
    """

    def __init__(
        self, shape: Iterable[int], dtype: torch.dtype, read_into: Callable[[Tensor, Sequence[int]], None]
    ) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.read_into = read_into

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], _types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What torch's functions do to tensors, where it is known."""
        if (known := _FUNCTIONS.get(function)) is None:
            raise UnknownConversionError(getattr(function, "__name__", str(function)))
        return known(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        """Refuse by name what a tensor can do and this cannot."""
        raise UnknownConversionError(name) if hasattr(Tensor, name) else AttributeError(name)

    @property
    def ndim(self) -> int:
        """How many dims."""
        return len(self.shape)

    def size(self, dim: int) -> int:
        """Of one dim."""
        return self.shape[dim]

    def contiguous(self) -> "LazyTensor":
        """Itself: it has no memory that could be laid out."""
        return self

    def squeeze(self, dim: int | None = None) -> "LazyTensor":
        """Without `dim`, or without every dim, where the size is 1."""
        if dim is None:
            ones = [each for each in range(self.ndim) if self.shape[each] == 1]
            return self.squeeze(ones[-1]).squeeze() if ones else self
        dim %= self.ndim
        if self.shape[dim] != 1:
            return self

        def read_into(out: Tensor, offsets: Sequence[int]) -> None:
            self.read_into(out.unsqueeze(dim), [*offsets[:dim], 0, *offsets[dim:]])

        return LazyTensor((*self.shape[:dim], *self.shape[dim + 1 :]), self.dtype, read_into)


def _stack(parts: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    first = parts[0].shape
    _same([part.shape for part in parts])
    dim %= len(first) + 1

    def read_into(out: Tensor, offsets: Sequence[int]) -> None:
        for index, piece in enumerate(out.unbind(dim), start=offsets[dim]):
            parts[index].read_into(piece, [*offsets[:dim], *offsets[dim + 1 :]])

    return LazyTensor((*first[:dim], len(parts), *first[dim:]), parts[0].dtype, read_into)


def _cat(parts: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    first = parts[0].shape
    dim %= len(first)
    _same([[*part.shape[:dim], *part.shape[dim + 1 :]] for part in parts])
    starts = [0, *accumulate(part.shape[dim] for part in parts)]

    def read_into(out: Tensor, offsets: Sequence[int]) -> None:
        wanted, end = offsets[dim], offsets[dim] + out.shape[dim]
        for part, start, stop in zip(parts, starts, starts[1:], strict=False):
            low, high = max(wanted, start), min(end, stop)
            if low < high:
                piece = out.narrow(dim, low - wanted, high - low)
                part.read_into(piece, [*offsets[:dim], low - start, *offsets[dim + 1 :]])

    return LazyTensor((*first[:dim], starts[-1], *first[dim + 1 :]), parts[0].dtype, read_into)


def _transpose(tensor: LazyTensor, dim0: int, dim1: int) -> LazyTensor:
    def swapped(sizes: Sequence[int]) -> list[int]:
        swapped = list(sizes)
        swapped[dim0], swapped[dim1] = swapped[dim1], swapped[dim0]
        return swapped

    def read_into(out: Tensor, offsets: Sequence[int]) -> None:
        tensor.read_into(out.transpose(dim0, dim1), swapped(offsets))

    return LazyTensor(swapped(tensor.shape), tensor.dtype, read_into)


def _split(tensor: LazyTensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[LazyTensor, ...]:
    whole = tensor.shape[dim]
    dim %= tensor.ndim
    if isinstance(sizes, int):
        sizes = [min(sizes, whole - start) for start in range(0, whole, sizes)]
    if sum(sizes) != whole:
        raise ValueError(f"{list(sizes)} do not add up to the {whole} of dim {dim}")

    def part(start: int, size: int) -> LazyTensor:
        def read_into(out: Tensor, offsets: Sequence[int]) -> None:
            tensor.read_into(out, [*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]])

        return LazyTensor((*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]), tensor.dtype, read_into)

    return tuple(part(sum(sizes[:at]), size) for at, size in enumerate(sizes))


def _same(shapes: Sequence[Sequence[int]]) -> None:
    if different := [list(shape) for shape in shapes if list(shape) != list(shapes[0])]:
        raise ValueError(f"shapes that do not fit together: {list(shapes[0])} and {different[0]}")


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.transpose: _transpose,
    torch.chunk: lambda tensor, chunks, dim=0: _split(tensor, -(-tensor.shape[dim] // chunks), dim),
    torch.split: _split,
}


def _file_tensor(handle: Any, name: str, *, file: Path) -> LazyTensor:
    """One tensor of an open safetensors file."""
    stored = handle.get_slice(name)
    if (dtype := DTYPES.get(stored.get_dtype())) is None:
        raise ModelError(
            f"{file}: {name} is stored as {stored.get_dtype()}; quantized weights cannot be trained, give the "
            f"folder of the model in bfloat16, float16 or float32"
        )

    def read_into(out: Tensor, offsets: Sequence[int]) -> None:
        if not offsets:
            out.copy_(handle.get_tensor(name))
            return
        # Some rows at a time, so that what is read and not yet cast stays small.
        row_bytes = max(1, out[:1].numel() * dtype.itemsize)
        rows = max(1, PIECE_BYTES // row_bytes)
        inner = tuple(slice(at, at + size) for at, size in zip(offsets[1:], out.shape[1:], strict=True))
        for first in range(0, out.shape[0], rows):
            piece = out[first : first + rows]
            piece.copy_(stored[(slice(offsets[0] + first, offsets[0] + first + piece.shape[0]), *inner)])

    return LazyTensor(stored.get_shape(), dtype, read_into)


@contextmanager
def open_tensors(files: Sequence[Path]) -> Iterator[dict[str, LazyTensor]]:
    """Every tensor of safetensors files under its name there, to be read until the end of the context."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, LazyTensor] = {}
    with ExitStack() as stack:
        for file in files:
            try:
                handle = stack.enter_context(safe_open(str(file), framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} cannot be read: {type(error).__name__}: {error}; fetch it again") from error
            found |= {name: _file_tensor(handle, name, file=file) for name in handle.keys()}  # noqa: SIM118 - no mapping
        yield found


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


def as_in_model(skeleton: Any, found: Mapping[str, LazyTensor]) -> Converted:
    """The tensors of files as `skeleton` has them; nothing is read.

    As transformers does it in `convert_and_load_state_dict_in_model`.
    """
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
    ignored: tuple[str, ...]
    """Tensors of the files that the model has no use for."""
    new: tuple[str, ...]
    """Parameters of a new head, which no file holds and which were drawn at random."""
    dtypes: Mapping[str, torch.dtype]
    """In the files, of each floating-point tensor of the model."""


@torch.no_grad()
def load_weights(
    shards: Mapping[str, Sequence[Shard]], files: Sequence[Path], *, skeleton: Any, new_head: bool, seed: int
) -> LoadReport:
    """Fill `shards`, which have memory, from `files`; the rest as `ModelSource.load_into`.

    shards: what this rank holds of each tensor, by its first name; a rank may hold nothing of some.
    skeleton: the model before it was sharded; it learns what transformers has converted in reading.
    """
    with open_tensors(files) as found:
        converted = as_in_model(skeleton, found)
        names = first_names(skeleton)
        # Of each tensor, by its first name: more than one where the files hold both ends of a tie.
        feeds: dict[str, list[tuple[str, LazyTensor]]] = {}
        for name, first in names.items():
            if name in converted.tensors:
                feeds.setdefault(first, []).append((name, converted.tensors[name]))
        head = {first for first in names.values() if not _in_base_model(first, skeleton)}
        new = sorted(head - feeds.keys()) if new_head else []
        # What the class says that files may hold; where a new head is made, the heads of other classes too.
        patterns = [*(skeleton._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]  # noqa: SLF001
        ignored = sorted(
            name
            for name, renamed in converted.unexpected.items()
            if any(re.search(pattern, each) for pattern in patterns for each in (name, renamed))
            or (new and not _in_base_model(renamed, skeleton))
        )
        if problems := _problems(converted, skeleton, fed={*feeds, *new}, ignored=ignored):
            raise ModelError(
                f"the files in {files[0].parent} are not those of {type(skeleton).__name__}: {'; '.join(problems)}"
            )
        bytes_read = sum(_read(each, shards.get(name, ())) for name, each in feeds.items())
    for name in new:
        write_whole(initial_value(skeleton, name, seed=seed), shards.get(name, ()))
    skeleton._weight_conversions = converted.transforms  # noqa: SLF001 - as from_pretrained
    return LoadReport(
        tensors=len(shards),
        bytes_read=bytes_read,
        ignored=tuple(ignored),
        new=tuple(new),
        dtypes={name: each[0][1].dtype for name, each in feeds.items() if each[0][1].dtype.is_floating_point},
    )


def _in_base_model(name: str, skeleton: Any) -> bool:
    return name.startswith(f"{skeleton.base_model_prefix}.")


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
    problems = [f"{kind}: {some(names)}" for kind, names in kinds.items() if names]
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


def initialise(model: nn.Module, *, seed: int) -> None:
    """Draw every parameter of a (sharded) model anew; one that is tied once, and adapters not at all.

    Raises:
        ModelError: it is no model of transformers, its parameters lie on the meta device, or one has no rule.
    """
    skeleton = twin_of(model)
    for name, shards in shards_by_name(model, skeleton).items():
        write_whole(initial_value(skeleton, name, seed=seed), shards)
