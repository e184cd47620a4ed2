"""vLLM's own weight transfer with rl-refit's checks: its trainer engines (NCCL, IPC …), its client, its `WeightSource`.

Send our weights over vLLM's transport, from a trainer's process that has vLLM installed, and check that they arrived:
`SourceForVllm` and `UpdateCheck`. Refit from an existing vLLM `WeightSource`: `Refit(SourceFromVllm(theirs), sink)`.

vLLM's update writes into the weights that serve, so `UpdateCheck` finds wrong weights, and does not keep the old ones:
that takes a `VllmSink`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, final

import torch
from torch import Tensor

# The one module of this package that imports vLLM at once: its classes inherit vLLM's.
from vllm.distributed.weight_transfer.base import ParamMeta, layerwise_groups
from vllm.distributed.weight_transfer.base import WeightSource as TransferSource

from rl_refit.contracts import WeightSource
from rl_refit.digest import Digest, combine_digests, digest_tensor
from rl_refit.engine import raise_errors
from rl_refit.errors import CoverageError, DigestError, RefitError
from rl_refit.layout import Region
from rl_refit.manifest import Manifest
from rl_refit.staged import assemble
from rl_refit.vllm.sink import VllmEngine
from rl_refit.vllm.survey import DERIVED, NeedsConfig, offered

__all__ = ["SourceForVllm", "SourceFromVllm", "UpdateCheck"]


@final
class SourceForVllm(TransferSource):  # type: ignore[misc]
    """A source of rl-refit as vLLM's `WeightSource`, which digests everything that vLLM takes from it.

    Names come in the order of vLLM's `layerwise_groups`. Nothing is gathered, so that ranks need not iterate together.

    Args:
        source: This rank of it holds every tensor whole, such as a `ModuleSource` of a module that is not sharded.
        derived: Patterns, as of `fnmatch`, of tensors that the engine computes itself: they are not sent.
        ties: Whether a tensor that is tied to another is sent under its own name too, for an engine that does not tie.

    Raises:
        RefitError: A tensor is sharded.
    """

    def __init__(self, source: WeightSource, *, derived: Sequence[str] = DERIVED, ties: bool = False) -> None:
        self.source, self.ties, self.config = source, ties, NeedsConfig(derived=tuple(derived))
        manifest = source.manifest()
        names = offered(manifest, self.config, ties=ties).by_name
        metas = {name: meta for name in names if math.prod((meta := manifest.by_name[name]).shape)}
        for name, meta in metas.items():
            held = [sum(box.numel for box in boxes) for boxes in meta.regions().values()]
            if max(held) < math.prod(meta.shape):
                raise RefitError(
                    f"{name!r} is sharded, and vLLM's weight transfer takes whole tensors from one rank: give vLLM its "
                    f"own ModuleSource, which gathers, or refit a VllmSink, which takes shards",
                    tensor=name,
                )
        self._metas = {name: metas[name] for group in layerwise_groups([*metas]) for name in group}
        self.boxes: set[Region] = set()
        """Boxes to digest beside the whole tensors, since workers hold these."""
        self._digests: dict[Region, str | None] | None = None

    def metadata(self) -> list[ParamMeta]:
        """What iteration yields, in its order."""
        return [ParamMeta(name, meta.torch_dtype, meta.shape) for name, meta in self._metas.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self._digests = None
        digests: dict[Region, str | None] = {}
        boxes: dict[str, list[Region]] = {}
        for box in self.boxes:
            boxes.setdefault(box.name, []).append(box)
        # vLLM packs several tensors at once, so they must stay longer than ours need to.
        stay = getattr(self.source, "tensors_stay", False)
        for name, shards in itertools.groupby(self.source.shards(self._metas), key=lambda shard: shard[0].name):
            held = [(box, tensor.detach() if stay else tensor.detach().clone()) for box, tensor in shards]
            whole = Region.whole(name, self._metas[name].shape)
            tensor = held[0][1] if held[0][0] == whole else assemble(held, whole)
            for box in {whole, *boxes.get(name, ())}:
                digests[box] = digest_tensor(tensor if box == whole else tensor[box.index_within(whole)])
            yield name, tensor
        if missing := [name for name, meta in self._metas.items() if Region.whole(name, meta.shape) not in digests]:
            raise RefitError(f"the source has {missing[0]!r} in its manifest, and yields no shard of it")
        self._digests = digests

    def digest(self, regions: Iterable[Region] | None = None) -> Digest:
        """Of what vLLM took the last time, as of `digest_regions`; `regions` are whole tensors or of `boxes`.

        Raises:
            RefitError: vLLM has taken nothing yet, or not all of it the last time.
        """
        if self._digests is None:
            raise RefitError("vLLM has not taken all of the weights: there is nothing to compare the engine's with")
        wholes = (Region.whole(name, meta.shape) for name, meta in self._metas.items())
        return combine_digests(tuple(wholes if regions is None else regions), self._digests)


@final
class UpdateCheck:
    """Compares what a vLLM engine holds with what vLLM's weight transfer took from a `SourceForVllm`.

    When it is made, it proves that the source feeds every tensor of the engine, and that each of the source's has a
    place there. Each call reads the parameters of all workers and compares the digest of each one's boxes. The engine
    is not paused for it: call it between the update and whatever may change the weights next.

    Args:
        engine: A `vllm.LLM` or an `AsyncLLM`, made with `worker_extension_cls=WORKER_EXTENSION`. Of several
            checks of one engine, the last that was made works.
        source: What the trainer's engine is given. From now on it digests the workers' boxes too.
        constant: Patterns of engine tensors, by vLLM's names, that need no feeding.
        loop: The event loop that runs an `AsyncLLM`; found where the check is made in it, or the engine has generated.
        timeout_s: Seconds that one call of the engine may take.

    Raises:
        CoverageError: The engine and the source do not hold the same tensors, or one would be cast.
        RefitError: The engine was made without the worker extension, or a worker failed.
    """

    def __init__(
        self,
        engine: Any,
        source: SourceForVllm,
        *,
        constant: Sequence[str] = (),
        loop: asyncio.AbstractEventLoop | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._engine, self._source = VllmEngine(engine, loop=loop, pause=None, timeout_s=timeout_s), source
        self._token = uuid.uuid4().hex
        manifest, config = source.source.manifest(), replace(source.config, constant=tuple(constant))
        settled = self._call("rl_refit_inspect", manifest.to_json(), asdict(config), source.ties)
        used = {name for each in settled for name, *_ in each["boxes"]}
        if unmapped := tuple(meta.name for meta in source.metadata() if meta.name not in used):
            raise CoverageError(
                f"{len(unmapped)} tensors of the source have no place in the engine: {', '.join(unmapped)}",
                unmapped=unmapped,
            )
        self._boxes = [
            tuple(Region(name, tuple(offsets), tuple(shape)) for name, offsets, shape in each["boxes"])
            for each in settled
        ]
        source.boxes.update(box for boxes in self._boxes for box in boxes)
        self.unreadable: Mapping[str, str] = {name: why for each in settled for name, why in each["unreadable"].items()}
        """The tensors that some worker cannot be compared in, with the reason: packed for a kernel, for example."""

    def __call__(self) -> Digest:
        """Pass if every worker holds what was sent, of every tensor that it can read back. Returns the source's digest.

        Raises:
            DigestError: Names every tensor that differs. The engine serves wrong weights: send them again.
            RefitError: vLLM has not taken all of the weights since, or a worker failed.
        """
        sent = [self._source.digest(boxes) for boxes in self._boxes]
        differing: dict[str, None] = {}
        for ours, answer in zip(sent, self._call("rl_refit_read"), strict=True):
            held = answer["digests"]
            differing |= {
                name: None
                for name, value in ours.tensors.items()
                if held.get(name, value if name in self.unreadable else None) != value
            }
        if differing:
            lines = "".join(f"\n  {name}" for name in differing)
            raise DigestError(
                f"{len(differing)} tensors of the engine are not what vLLM's weight transfer was given; it serves them "
                f"all the same, so send the weights again before anything generates:{lines}",
                tensors=tuple(differing),
            )
        return self._source.digest()

    def _call(self, method: str, *args: object) -> list[Any]:
        answers = self._engine.call(method, self._token, *args)
        raise_errors(answers)
        return answers


@final
class SourceFromVllm:
    """A vLLM `WeightSource` as a source of rl-refit, of one rank; its tensors must not change during a refit.

    Each reading is a pass over vLLM's, whose names, dtypes, shapes and order are compared with its `metadata()`: one to
    send, one for the digests. What comes before its turn is kept meanwhile.

    Args:
        source: vLLM's; it holds every parameter, and buffers are not its business: the sink declares those derived or
            constant.
        device: Where its tensors are.

    Raises:
        RefitError: It holds a part of the model only, or this process is one of several of a trainer, where a pass may
            be a collective that the others do not take part in.
    """

    tensors_stay = False

    def __init__(self, source: TransferSource, *, device: torch.device | str = "cpu") -> None:
        self._source, self.device = source, torch.device(device)
        several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        if several or source.held_names() is not None:
            raise RefitError(
                "a vLLM WeightSource of several ranks gathers its tensors when they all iterate it together, and a "
                "refit has each rank send what it holds: use rl_refit.ModuleSource(policy) on every rank instead"
            )

    def manifest(self) -> Manifest:
        """What `metadata()` says, without ties."""
        return Manifest.of_whole((meta.name, meta.dtype, meta.shape) for meta in self._source.metadata())

    def shards(self, names: Iterable[str]) -> Iterator[tuple[Region, Tensor]]:
        """Each tensor whole, from a fresh pass.

        Raises:
            RefitError: Iteration and `metadata()` differ, or there is no tensor of a name.
        """
        wanted = dict.fromkeys(names)
        early: dict[str, Tensor] = {}
        stream = itertools.zip_longest(self._source.metadata(), self._source)
        for turn in wanted:
            while turn not in early:
                meta, pair = next(stream, (None, None))
                name, tensor = pair if pair is not None else ("", None)
                said = None if meta is None else (meta.name, meta.dtype, tuple(meta.shape))
                came = None if tensor is None else (name, tensor.dtype, tuple(tensor.shape))
                if said != came:
                    raise RefitError(
                        f"the vLLM WeightSource yields {came}, and its metadata() says {said}: both must list the same "
                        f"parameters in one order, or weights end in the wrong tensor",
                        tensor=turn,
                    )
                if tensor is None:
                    raise RefitError(f"the vLLM WeightSource has no {turn!r}", tensor=turn)
                if name in wanted:
                    early[name] = tensor.detach()
            tensor = early.pop(turn)
            yield Region.whole(turn, tensor.shape), tensor
