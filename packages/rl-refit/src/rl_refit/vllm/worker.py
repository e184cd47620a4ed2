"""A worker of a vLLM engine as a rank of the sink: `RefitWorker`, which vLLM mixes into its worker class.

Its `WorkerSink` stages the boxes of its own parameters on its own device. A commit copies them into the parameters;
layers that are not plain copies of the source, or that the engine has rearranged for its kernels, go through the
model's `load_weights` in vLLM's layerwise reload. Arguments and answers are plain data, never tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from rl_refit.vllm.survey import NeedsConfig, find_needs, sink_manifest

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
        config: What the user declares.
        ask: See `WorkerEnd.ask`; None where nothing is refitted, and the engine is only read.
    """

    def __init__(self, worker: RefitWorker, config: NeedsConfig, ask: Callable[..., Any] | None) -> None:
        super().__init__({}, engine="the engine")  # what it needs is known after a survey
        self._worker, self._config, self._ask = worker, config, ask
        self._known = ""
        self.unreadable: dict[str, str] = {}
        """The fed tensors that cannot be read back after a commit, with the reason."""
        self._direct: dict[str, tuple[Landing, ...]] = {}
        self._reloaded: dict[str, TensorMeta] = {}
        self.received = 0
        """Bytes staged in the last transaction."""

    @property
    def device(self) -> torch.device:
        """The worker's."""
        return torch.device(self._worker.device)

    def _begin(self, manifest: Manifest) -> dict[str, int]:
        """The first time for a source, look at the engine in the main thread, which may raise a `CoverageError`."""
        if self._known != manifest.hash():
            assert self._ask is not None
            self._ask("survey", lambda: self.look_at(manifest))
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

    def look_at(self, source: Manifest, *, ties: Sequence[bool] = (False, True), room: bool = True) -> dict[str, str]:
        """Find out what the engine needs of `source`, and allocate room for the boxes that this worker needs.

        Without `room` nothing can be staged, and only `digest` is of use.

        Returns:
            `unreadable`.

        Raises:
            CoverageError: The engine needs what the source does not have, or has no place for what it has.
            RefitError: A fault of this release of vLLM cannot be repaired.
        """
        reload.must_repair()  # or refuse now what cannot be repaired later
        model = self._worker.model_runner.get_model()
        survey = find_needs(
            self._worker.vllm_config, source, self._config, live_ties=read_memory(model).tied, ties=ties
        )
        found = survey.landings
        reasons, through = _reloaded(found, model)
        self._direct, self._reloaded, self.unreadable = {}, {}, {}
        wanted: dict[str, list[Region]] = {}
        for meta in source.tensors:
            if meta.name not in found.users:
                continue
            landings = found.by_source.get(meta.name, ())
            boxes = list(dict.fromkeys(landing.box for landing in landings))
            disjoint = all(one.intersect(two) is None for n, one in enumerate(boxes) for two in boxes[:n])
            whole = Region.whole(meta.name, meta.shape)
            wanted[meta.name] = boxes if boxes and disjoint else [whole]
            if meta.name in through:
                self._reloaded[meta.name] = meta
                why = next((reasons[name] for name in found.users[meta.name] if name in reasons), "")
                self.unreadable[meta.name] = why or "changed by the loader"
            else:
                self._direct[meta.name] = landings
                if not all(landing.same_dtype for landing in landings):
                    self.unreadable[meta.name] = "cast by the engine"
        rank = self._worker.rl_refit_rank
        self._manifest = sink_manifest(source, self._config, wanted, ties=survey.ties, rank=rank)
        bank: dict[str, list[Holding]] = {}
        for name, boxes in wanted.items() if room else ():
            before, dtype = dict(self._bank.get(name, ())), source.by_name[name].torch_dtype
            bank[name] = [
                (box, before[box])
                if box in before and before[box].dtype == dtype
                else (box, torch.empty(box.shape, dtype=dtype, device=self.device))
                for box in boxes
            ]
        self._bank = bank
        return self.unreadable

    def fed_boxes(self) -> list[Region]:
        """Those that this worker holds of the tensors which must be sent."""
        fed = (meta for meta in self._manifest.tensors if meta.travels)
        return [box for meta in fed for box in meta.regions_on(self._worker.rl_refit_rank)]

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
    _rl_refit_check: tuple[str, WorkerSink] | None = None
    """The latest `UpdateCheck`'s, after its token."""

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
        self._rl_refit_sink = WorkerSink(self, NeedsConfig(**end.options), end.ask)
        return InMainThread(self._rl_refit_sink, end)

    @answering
    def rl_refit_inspect(  # noqa: PLR0917  (over RPC)
        self,
        token: str,
        source: str,
        config: Mapping[str, Any],
        ties: bool,  # noqa: FBT001
    ) -> Answer:
        """Look at the engine beside the source that has this manifest, for weights that come by another way.

        From now on `token` is the engine's check; see `rl_refit.vllm.weight_transfer`.
        """
        reader = WorkerSink(self, NeedsConfig(**config), None)
        reader.look_at(Manifest.from_json(source), ties=[ties], room=False)
        self._rl_refit_check = token, reader
        boxes = [[box.name, list(box.offsets), list(box.shape)] for box in reader.fed_boxes()]
        return {"unreadable": reader.unreadable, "boxes": boxes}

    @answering
    def rl_refit_read(self, token: str) -> Answer:
        """By tensor, the digest of what the parameters now hold of its boxes, without what cannot be read."""
        if self._rl_refit_check is None or self._rl_refit_check[0] != token:
            raise RefitError("another UpdateCheck was made of this engine since this one; make a new one")
        reader = self._rl_refit_check[1]
        return {"digests": dict(reader.digest(reader.fed_boxes()).tensors)}
