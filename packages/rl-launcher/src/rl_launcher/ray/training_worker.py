"""One rank of the trainer in a Ray actor: a backend, the models beside it, and its side of every refit."""

import contextlib
import gc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl_backends import process_group, select_backend
from rl_backends.backend import Backend, TrainingBackend
from rl_backends.checkpoints.folders import sees
from rl_backends.metrics.memory import device_used_bytes
from rl_launcher.build.engines import dtypes_of, weight_source
from rl_launcher.ray.remote_methods import POLICY_METHODS, PackedFields, RemoteCall, Reply, packed, unpacked
from rl_launcher.schema import PolicyConfig
from rl_observe import Profiler
from rl_observe.config import ProfilerConfig
from rl_refit import Refit, RefitError, RefitReport
from rl_refit.parties import Parties

POLICY = 0
"""The number of the model that is trained; references and teachers have others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """What every rank is made from."""

    policy: PolicyConfig
    model_name: str
    """A folder that all ranks see, or a hub id."""
    seed: int
    """Of the initial values of adapters."""
    num_ranks: int
    threads: int
    """CPU threads of each rank."""
    profiler: ProfilerConfig | None = None
    """Which of its steps each rank records."""
    profile_folder: str = ""
    """Where the recordings go: a folder that all ranks see."""


class TrainingWorker:
    """A rank. Starting takes two calls: rank 0 serves the store (`host_store`), then all ranks `load` together.

    `local_rank` is its GPU among those of the node, of whose ranks there are `num_local_ranks`; `ip` is the address of
    the node that the other nodes reach.
    """

    _is_pipelined = False
    """Whether only some of the ranks that are given the same rows call the loss: those of the last stage."""

    def __init__(self, spec: TrainerSpec, *, rank: int, local_rank: int, num_local_ranks: int, ip: str) -> None:
        torch.set_num_threads(spec.threads)
        self._spec, self._rank, self._ip = spec, rank, ip
        self._local_rank, self._num_local_ranks = local_rank, num_local_ranks
        self._config = select_backend(spec.policy).config
        self._is_pipelined = getattr(self._config, "pipeline_model_parallel_size", 1) > 1
        self._store: Any = None
        self._models: dict[int, Any] = {}
        self._refit: Refit | None = None
        self._profiler = Profiler(spec.profiler, Path(spec.profile_folder), rank=rank)

    def host_store(self) -> int:
        """Serve the store that the ranks meet at; return its port. For rank 0."""
        self._store, port = process_group.host_store(
            self._ip, num_ranks=self._spec.num_ranks, timeout_s=self._config.timeout_s
        )
        return port

    def sees(self, path: str, token: str) -> bool:
        """Whether this rank can read a file of the driver's; see `probe_file`."""
        return sees(path, token)

    def load(self, address: tuple[str, int]) -> None:
        """Join the process group, and read this rank's shards of the weights. A collective of all ranks."""
        process_group.meet_at(
            address,
            store=self._store,
            rank=self._rank,
            num_ranks=self._spec.num_ranks,
            local_rank=self._local_rank,
            num_local_ranks=self._num_local_ranks,
            device=self._config.device,
            timeout_s=self._config.timeout_s,
        )
        policy = self._spec.policy
        self._models[POLICY] = select_backend(policy).from_pretrained(
            self._spec.model_name,
            seed=self._spec.seed,
            revision=policy.revision,
            trust_remote_code=policy.trust_remote_code,
        )
        gc.collect()
        gc.freeze()

    def run(self, call: RemoteCall, *arguments: Any, **options: Any) -> Reply:
        """Carry out a method of `POLICY_METHODS`; packed batches are unpacked."""
        for number in call.forgotten:
            if hasattr(gone := self._models.pop(number, None), "close"):
                gone.close()
        if call.version is not None:
            self._policy.version = call.version
        row = POLICY_METHODS[call.method]
        owner = self if row.runs == "worker" else self._models[call.model]
        value = getattr(owner, call.method)(
            # Nobody writes to the tensors of a batch: a backend indexes the rows that it works on, and so copies them.
            *(unpacked(each, writable=False) if isinstance(each, PackedFields) else each for each in arguments),
            **options,
        )
        if call.result is not None:
            self._models[call.result] = value
        wanted = self._rank in call.answers
        model, rate = self._models[call.model], None
        with contextlib.suppress(RuntimeError, AttributeError):  # no optimizer yet, or none ever
            rate = model.learning_rate
        kept: tuple[Any, ...] = ()
        if call.readers is None or self._rank in call.readers or self._is_pipelined:
            kept = tuple(packed(each) for argument in arguments for each in getattr(argument, "kept", ()))
        # Each step is logged with them, and asking for them would be one more call of all ranks.
        measured = (
            model.metrics(memory=False) if wanted and call.method == TrainingBackend.optim_step.__name__ else None
        )
        used = None
        if call.method == "refit" and self._config.device == "cuda":
            used = device_used_bytes(torch.device("cuda", torch.cuda.current_device()))
        return Reply(packed(value) if wanted else None, getattr(model, "version", 0), rate, kept, measured, used)

    def close(self) -> None:
        """Write what is still being recorded; close the refit and the backends, and leave the process group."""
        self._profiler.close()
        self._close_refit()
        others = [model for number, model in self._models.items() if number != POLICY]
        for model in (*others, self._models.get(POLICY)):
            if hasattr(model, "close"):
                model.close()
        self._models.clear()
        if dist.is_initialized():
            dist.destroy_process_group()

    # -- Rows of POLICY_METHODS that the worker runs itself -----------------------------------------------------------

    def load_teacher(self, model_name: str, *, training: Mapping[str, Any], **options: Any) -> Backend:
        """Load another model, sharded as the policy is; `options` are those of `from_pretrained`.

        `training` has the arguments of `start_training`, which sets the temperature. A teacher never steps, so its
        optimizer never allocates state.
        """
        teacher = select_backend(self._spec.policy).without_adapters().from_pretrained(model_name, **options)
        teacher.start_training(**training)
        return teacher

    def load_companion(self, folder: str, *, new_head: bool, seed: int) -> Backend:
        """Load a reward model or critic, sharded as the policy is, without adapters; see `rl_launcher.build`."""
        selection = select_backend(self._spec.policy).without_adapters()
        return selection.from_pretrained(folder, head="sequence_classification", new_head=new_head, seed=seed)

    def reached(self, stage: str, step: int) -> None:
        """Start or end a recording of the profiler, which is done between two steps."""
        self._profiler.reached(stage, step)

    def report(self) -> None:
        """Only report version and learning rate, as every reply does."""

    def dtypes(self) -> dict[str, str]:
        """In which dtype each weight, or this rank's shard of it, is sent."""
        return dtypes_of(self._policy.shards())

    def join_refit(self, parties: Parties) -> None:
        """Take part in the refits of `parties` from now on, instead of those of an earlier one."""
        self._close_refit()
        self._refit = parties.source_refit(weight_source(self._policy), rank=self._rank, host=self._ip)

    def refit(self, version: int) -> RefitReport:
        """Send the weights of `version` to the engines."""
        if self._refit is None:
            raise RuntimeError("there is no refit yet; call join_refit first")
        self._policy.shards()  # merges the adapters of the current version
        return self._refit(version)

    @property
    def _policy(self) -> Backend:
        policy: Backend = self._models[POLICY]
        return policy

    def _close_refit(self) -> None:
        refit, self._refit = self._refit, None
        if refit is not None:
            with contextlib.suppress(RefitError):  # the other parties may be gone: that is why it is closed
                refit.close()
