"""A worker of a vLLM engine as a rank of the sink: `RefitWorker`, which vLLM mixes into its worker class.

Its `WorkerSink` stages the boxes of its own parameters on its own device. A commit copies them into the parameters;
layers that are not plain copies of the source, or that the engine has rearranged for its kernels, go through the
model's `load_weights` in vLLM's layerwise reload. Arguments and answers are plain data, never tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from rl_refit import gpu
from rl_refit.digest import Digest
from rl_refit.engine import Answer, InMainThread, WorkerEnd, answering
from rl_refit.errors import RefitError
from rl_refit.layout import Region
from rl_refit.manifest import Manifest, TensorMeta
from rl_refit.module_tensors import Holding
from rl_refit.staged import StagedSink, digest_held, places_of
from rl_refit.tracing.layouts import Landing, Landings
from rl_refit.tracing.memory import read_memory
from rl_refit.vllm import reload
from rl_refit.vllm.survey import NeedsConfig, offered, sink_meta, survey

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["RefitWorker", "WorkerSink"]

COPIES_S = 60.0
"""Longest time, in seconds, that a GPU may take for the copies of a commit."""

_KEEPS_PLAIN = {"NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
"""Methods whose parameters, where they keep their shape, are what was loaded."""


@final
class WorkerSink(StagedSink):
    """The parameters of one worker. A `WeightSink` of one rank.

    Args:
        worker: vLLM's.
        ask: See `WorkerEnd.ask`.
    """

    def __init__(self, worker: RefitWorker, ask: Callable[[str], Any]) -> None:
        super().__init__({}, engine="the engine")  # what it needs is known after a survey
        self._worker, self._ask = worker, ask
        self.source: Manifest | None = None
        """The source that is being asked about, or was last."""
        self._found: Landings | None = None
        self._known = ""
        self._direct: dict[str, tuple[Landing, ...]] = {}
        self._reloaded: dict[str, TensorMeta] = {}
        self.received = 0
        """Bytes staged in the last transaction."""

    @property
    def device(self) -> torch.device:
        """The worker's."""
        return torch.device(self._worker.device)

    def _begin(self, manifest: Manifest) -> dict[str, int]:
        """The first time for a source, have the driver survey the engine, which may raise a `CoverageError`."""
        if self._known != manifest.hash():
            self.source = manifest
            self._ask("survey")
            self._known = manifest.hash()
        return super()._begin(manifest)

    @torch.no_grad()
    def _hand_over(self, version: int) -> None:
        """Give the model what is staged. In the worker's main thread, while the engine is paused."""
        model = self._worker.model_runner.get_model()
        if self._reloaded:
            reload.reload_from(self._offer(), model, self._worker.reload_weights)
        for name, landings in self._direct.items():
            for landing in landings:
                self._live(model, landing).copy_(places_of(self._bank[name], landing.box)[0])
        if self.device.type == "cpu" and reload.must_repair():
            reload.repack_vocabulary(model)
        gpu.synchronize(self.device, COPIES_S)
        self.received = sum(tensor.nbytes for held in self._bank.values() for _, tensor in held)

    def _digest_engine(self, regions: Sequence[Region]) -> Digest:
        """Of what the parameters hold. What the engine has packed, cast or rearranged is left out."""
        model = self._worker.model_runner.get_model()
        held = {
            name: [(landing.box, self._live(model, landing)) for landing in landings]
            for name, landings in self._direct.items()
            if landings and all(landing.same_dtype for landing in landings)
        }
        return digest_held([region for region in regions if region.name in held], held)

    # -- The survey, in the main thread -------------------------------------------------------------------------

    def told(self) -> Answer:
        """The source that the engine has been given, of the first worker."""
        told = self.source if self._worker.rl_refit_rank == 0 else None
        return {"manifest": "" if told is None else told.to_json()}

    def survey(self, config: Mapping[str, Any], ties: bool) -> Answer:  # noqa: FBT001  (over RPC)
        """Trace what the engine does with the source's tensors, without memory; `config` is a `NeedsConfig`."""
        assert self.source is not None
        reload.must_repair()  # or refuse now what cannot be repaired later
        given = offered(self.source, NeedsConfig(**config), ties=ties)
        answer, self._found = survey(self._worker.vllm_config, given)
        model = self._worker.model_runner.get_model()
        return {**answer, "live_ties": read_memory(model).tied}

    def settle(self, config: Mapping[str, Any], fed: Sequence[str], room: bool) -> Answer:  # noqa: FBT001  (over RPC)
        """Allocate room for the boxes that this worker needs of `fed`, the tensors that the engine needs of the source.

        Without `room` nothing can be staged, and only `digest` is of use.

        Returns:
            The tensors that cannot be read back after a commit, with the reason; and without `room` the boxes, as name,
            offsets and shape.
        """
        assert self.source is not None
        assert self._found is not None
        found, model = self._found, self._worker.model_runner.get_model()
        reasons, through = _reloaded(found, model)
        self._direct, self._reloaded = {}, {}
        wanted: dict[str, list[Region]] = {}
        unreadable: dict[str, str] = {}
        for meta in self.source.tensors:
            if meta.name not in set(fed) or meta.name not in found.users:
                continue
            landings = found.by_source.get(meta.name, ())
            boxes = list(dict.fromkeys(landing.box for landing in landings))
            disjoint = all(one.intersect(two) is None for n, one in enumerate(boxes) for two in boxes[:n])
            whole = Region.whole(meta.name, meta.shape)
            wanted[meta.name] = boxes if boxes and disjoint else [whole]
            if meta.name in through:
                self._reloaded[meta.name] = meta
                why = next((reasons[name] for name in found.users[meta.name] if name in reasons), "")
                unreadable[meta.name] = why or "changed by the loader"
            else:
                self._direct[meta.name] = landings
                if not all(landing.same_dtype for landing in landings):
                    unreadable[meta.name] = "cast by the engine"
        rank = self._worker.rl_refit_rank
        metas = (
            sink_meta(meta, NeedsConfig(**config), boxes=wanted.get(meta.name), fed=meta.name in wanted, rank=rank)
            for meta in self.source.tensors
        )
        kept = [meta for meta in metas if meta is not None]
        roots = {meta.name for meta in kept if meta.tied_to is None}
        self._manifest = Manifest(tuple(meta for meta in kept if meta.tied_to is None or meta.tied_to in roots))
        self._allocate(wanted if room else {})
        fed_boxes = [] if room else self._fed_boxes()
        return {
            "unreadable": unreadable,
            "boxes": [[box.name, list(box.offsets), list(box.shape)] for box in fed_boxes],
        }

    def digests(self) -> Answer:
        """By tensor, the digest of what the parameters now hold of its boxes, without what cannot be read."""
        return {"digests": dict(self.digest(self._fed_boxes()).tensors)}

    def _fed_boxes(self) -> list[Region]:
        """Those that this worker holds of the tensors which must be sent."""
        fed = (meta for meta in self._manifest.tensors if meta.travels)
        return [box for meta in fed for box in meta.regions_on(self._worker.rl_refit_rank)]

    def _allocate(self, wanted: Mapping[str, Sequence[Region]]) -> None:
        assert self.source is not None
        bank: dict[str, list[Holding]] = {}
        for name, boxes in wanted.items():
            before, dtype = dict(self._bank.get(name, ())), self.source.by_name[name].torch_dtype
            bank[name] = [
                (box, before[box])
                if box in before and before[box].dtype == dtype
                else (box, torch.empty(box.shape, dtype=dtype, device=self.device))
                for box in boxes
            ]
        self._bank = bank

    # -- Where things are ----------------------------------------------------------------------------------------

    def _offer(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors for `load_weights`: it reads the boxes that are here, and the rest of each is undefined."""
        for name, meta in self._reloaded.items():
            held = self._bank[name]
            if held[0][0].shape == meta.shape:
                yield name, held[0][1]
                continue
            tensor = torch.empty(meta.shape, dtype=meta.torch_dtype, device=self.device)
            whole = Region.whole(name, meta.shape)
            for box, staged in held:
                tensor[box.index_within(whole)].copy_(staged)
            yield name, tensor

    def _live(self, model: nn.Module, landing: Landing) -> Tensor:
        """Where a box lies in the engine's own memory, in the order of the source's dims."""
        owner, _, name = landing.name.rpartition(".")
        tensor: Tensor = getattr(model.get_submodule(owner), name).detach()
        return landing.view_in(tensor)


def _reloaded(found: Landings, model: nn.Module) -> tuple[dict[str, str], set[str]]:
    """The engine's tensors that must go through the loader, with the reason, and the source tensors they are made from.

    Whole layers go, and whatever is made from the same source tensors.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    shapes = {landing.name: landing.shape for each in found.by_source.values() for landing in each}
    latent = {  # latent attention keeps products of its projections beside them, made when weights are loaded
        name.rpartition(".")[0]
        for name, layer in model.named_modules()
        if is_deferred_attention_layer(layer) and "MLA" in type(layer).__name__
    }

    def why(name: str) -> str | None:
        owner_name, _, own_name = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        tensor: Tensor = getattr(owner, own_name)
        method = type(getattr(owner, "quant_method", None)).__name__
        if name in found.changed:
            return "changed by the loader"
        if method not in _KEEPS_PLAIN:
            return f"{method} may rearrange it"
        if tensor.numel() == 0:
            return "packed for a kernel of the CPU"
        if name in shapes and (tuple(tensor.shape) != shapes[name] or not tensor.is_contiguous()):
            return f"kept in another form, {list(tensor.shape)} of strides {list(tensor.stride())}"
        if isinstance(owner, ParallelLMHead) and tensor.device.type == "cpu":
            return "computed from a packed copy"
        if any(owner_name == prefix or owner_name.startswith(f"{prefix}.") for prefix in latent):
            return "part of a latent attention"
        return None

    engine_tensors = dict.fromkeys(name for names in found.users.values() for name in names)
    reasons = {name: reason for name in engine_tensors if (reason := why(name)) is not None}
    while True:
        layers = {name.rpartition(".")[0]: reason for name, reason in reasons.items()}
        through = {
            source
            for source, names in found.users.items()
            if source not in found.by_source or reasons.keys() & set(names)
        }
        users = (names for source, names in found.users.items() if source in through)
        more = dict.fromkeys(itertools.chain(*users), "loaded together with others")
        more |= {name: layers[layer] for name in engine_tensors if (layer := name.rpartition(".")[0]) in layers}
        if more.keys() <= reasons.keys():
            return reasons, through
        reasons |= {name: reason for name, reason in more.items() if name not in reasons}


class RefitWorker:
    """The methods that a worker gets."""

    if TYPE_CHECKING:
        rank: int
        device: torch.device
        model_runner: Any
        vllm_config: VllmConfig
        reload_weights: Callable[..., None]

    _rl_refit_end: WorkerEnd | None = None
    _rl_refit_sink: WorkerSink
    _rl_refit_check: Mapping[str, WorkerSink] = MappingProxyType({})
    """The latest `UpdateCheck`'s, by its token."""

    @property
    def rl_refit_rank(self) -> int:
        """Of this worker among those of all data-parallel replicas of the engine; vLLM counts those of each from 0."""
        parallel = self.vllm_config.parallel_config
        first: int = parallel.data_parallel_index * parallel.world_size
        return first + self.rank

    def rl_refit(self, token: str, what: str, *args: object) -> Answer:
        """Take part in the refits of a driver; see `WorkerEnd.do`."""
        if self._rl_refit_end is None:
            self._rl_refit_end = WorkerEnd(self.rl_refit_rank, self._rl_refit_make_sink)
        return self._rl_refit_end.do(token, what, *args)

    def _rl_refit_make_sink(self, end: WorkerEnd) -> InMainThread:
        self._rl_refit_sink = WorkerSink(self, end.ask)
        return InMainThread(self._rl_refit_sink, end)

    @answering
    def rl_refit_inspect(self, token: str, source: str) -> Answer:
        """Look at the engine beside the source that has this manifest, for weights that come by another way.

        From now on `token` is the engine's check; see `rl_refit.vllm.weight_transfer`.
        """

        def ask(what: str) -> None:
            raise RefitError(f"nothing is refitted here, so there is no driver to {what}")

        reader = WorkerSink(self, ask)
        reader.source = Manifest.from_json(source)
        self._rl_refit_check = {token: reader}
        return {}

    @answering
    def rl_refit_ask(self, token: str, what: str, *args: Any) -> Answer:
        """What the worker's sink for the driver's sink, or check, `token` answers to one of its methods."""
        sink = self._rl_refit_check.get(token)
        if sink is None:
            if self._rl_refit_end is None or not self._rl_refit_end.belongs(token):
                raise RefitError("another sink or UpdateCheck was made of this engine since this one; make a new one")
            sink = self._rl_refit_sink
        methods: dict[str, Callable[..., Answer]] = {
            "told": sink.told,
            "survey": sink.survey,
            "settle": sink.settle,
            "digests": sink.digests,
        }
        return methods[what](*args)
