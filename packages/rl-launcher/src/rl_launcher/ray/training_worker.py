"""One rank of the trainer in a Ray actor: a backend and its end of every refit.

torch's own way listens on every address of the machine; here the store listens on the one that the others use.

Ray shares the memory of arrays between the processes of a node, and of arrays alone. They cannot be written to, which
nobody does: a backend indexes the rows that it works on, and so copies them.

It knows its rank, and no other process but by torch's process group. Every method is called on all ranks alike, with
the whole batch; what all of them would return, rank 0 does.
"""

import contextlib
import fcntl
import os
import socket
import struct
import sys
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backends import select_backend
from rl_backends.selection import Backend
from rl_launcher.checkpoints.disk import sees
from rl_launcher.engines import dtypes_of, weight_source
from rl_launcher.gc_freeze import freeze
from rl_launcher.ray.refit_rendezvous import RefitMeeting
from rl_launcher.schema import PolicyConfig
from rl_observe import Profiler
from rl_observe.config import ProfilerConfig
from rl_parallel_plans import TopKLogp
from rl_refit import Refit, RefitError, RefitReport

__all__ = [
    "PackedExamples",
    "Reply",
    "TrainerSpec",
    "TrainingWorker",
    "host_store",
    "interface_of",
    "join",
    "pack",
    "unpack",
]

SIOCGIFADDR = 0x8915
"""Of Linux: an interface's address."""


def host_store(ip: str, *, num_ranks: int, timeout_s: float) -> tuple[Any, int]:
    """Serve the store on a free port of `ip`, by rank 0; return it and the port."""
    server = socket.create_server((ip, 0))
    port = server.getsockname()[1]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        ip,
        port,
        num_ranks,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=server.detach(),
    )
    return store, port


def join(
    address: tuple[str, int],
    *,
    store: Any,
    rank: int,
    num_ranks: int,
    local_rank: int,
    device: Literal["cpu", "cuda"],
    timeout_s: float,
) -> None:
    """Make this process a rank.

    Args:
        address: of the store.
        store: rank 0's; None for the others, which connect to it.
        rank: this one.
        num_ranks: all.
        local_rank: which of the machine's GPUs is its own.
        device: "cuda" joins by NCCL too.
        timeout_s: how long a rank waits for another in a collective.
    """
    ip, port = address
    names = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": local_rank, "MASTER_ADDR": ip, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    if ip == "127.0.0.1":  # one machine: nobody else needs to reach its ranks
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    elif interface := interface_of(_address_towards(address)):
        # Gloo takes what the host's own name means, which on many machines is loopback; NCCL looks by itself.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    timeout = timedelta(seconds=timeout_s)
    if store is None:
        store = dist.TCPStore(ip, port, num_ranks, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)


def interface_of(ip: str) -> str | None:
    """The network interface of this machine whose first address is `ip`; None where there is none, or nobody tells."""
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == ip:
                return name
    return None


def _address_towards(address: tuple[str, int]) -> str:
    """This machine's address as the other end of a connection to `address` sees it; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(address)
        except OSError:
            return ""
        return str(asking.getsockname()[0])


_NO_ARRAYS = {torch.bfloat16: torch.int16}  # numpy has no such numbers, and the same bits will do


@dataclass(frozen=True, slots=True)
class PackedExamples:
    """Examples as arrays."""

    kind: type[Any]
    """The dataclass that they are."""

    arrays: Mapping[str, Any]
    """Its tensors."""

    dtypes: Mapping[str, torch.dtype]
    """Of these."""

    others: Mapping[str, Any]
    """Its other fields."""


def pack(examples: Any) -> PackedExamples:
    """Of a dataclass with tensors."""
    values = {field.name: getattr(examples, field.name) for field in fields(examples) if field.init}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    return PackedExamples(
        kind=type(examples),
        arrays={name: _as_array(tensor) for name, tensor in tensors.items()},
        dtypes={name: tensor.dtype for name, tensor in tensors.items()},
        others={name: value for name, value in values.items() if name not in tensors},
    )


def unpack(packed: PackedExamples) -> Any:
    """The examples again, their tensors in the memory of the arrays."""
    with warnings.catch_warnings():
        # torch has no tensors that cannot be written to, and warns of them; see above.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensors = {name: torch.from_numpy(array).view(packed.dtypes[name]) for name, array in packed.arrays.items()}
    return packed.kind(**tensors, **packed.others)


def _as_array(tensor: Tensor) -> Any:
    there = tensor.detach().cpu().contiguous()
    return there.view(_NO_ARRAYS.get(there.dtype, there.dtype)).numpy()


POLICY = 0
"""The number of the model that is trained; references and teachers have others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """What every rank is made from."""

    policy: PolicyConfig
    """Which backend, and how it shards."""

    model_name: str
    """A folder that all ranks see, or a hub id."""

    seed: int
    """Of the first values of adapters."""

    num_ranks: int
    """All of them."""

    threads: int
    """That each computes with on the CPU."""

    profiler: ProfilerConfig | None = None
    """Which of its steps each rank records."""

    profile_folder: str = ""
    """Where to: a folder that all ranks see."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Of one call."""

    value: Any
    """What the method returned."""

    version: int
    """Of the policy, afterwards."""

    learning_rate: float | None
    """Of the next step; None before `start_training`."""


class TrainingWorker:
    """A rank. Made in two steps: rank 0 is asked where it can be met, and then all load the model together."""

    def __init__(self, spec: TrainerSpec, *, rank: int, local_rank: int) -> None:
        torch.set_num_threads(spec.threads)
        self._spec, self._rank, self._local_rank = spec, rank, local_rank
        self._config = select_backend(spec.policy).config
        self._store: Any = None
        self._models: dict[int, Any] = {}
        self._started = False
        self._refit: Refit | None = None
        self._profiler = Profiler(spec.profiler, Path(spec.profile_folder), rank=rank)

    # -- Starting and ending ----------------------------------------------------------------------------------------

    def host(self, ip: str) -> int:
        """Serve the ranks' meeting point; return its port. Rank 0 alone."""
        self._store, port = host_store(ip, num_ranks=self._spec.num_ranks, timeout_s=self._config.timeout_s)
        return port

    def sees(self, path: str, token: str) -> bool:
        """Whether a file of the driver's is here, too; see `SharedFolder`."""
        return sees(path, token)

    def load(self, address: tuple[str, int]) -> None:
        """Meet the others, and read this rank's part of the weights."""
        join(
            address,
            store=self._store,
            rank=self._rank,
            num_ranks=self._spec.num_ranks,
            local_rank=self._local_rank,
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
        freeze()

    def load_teacher(
        self, number: int, model_name: str, *, training: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        """Load another model as the policy is, to ask it under this number; `training` sets its temperature."""
        teacher = select_backend(self._spec.policy).without_adapters().from_pretrained(model_name, **options)
        teacher.start_training(**training)  # nothing is stepped, so that no optimizer makes its moments
        self._models[number] = teacher

    def close(self) -> None:
        """Write what is still being recorded; leave the refit, the backends and the process group."""
        self._profiler.close()
        self._close_refit()
        teachers = [model for number, model in self._models.items() if number != POLICY]
        for model in (*teachers, self._models.get(POLICY)):
            if hasattr(model, "close"):
                model.close()
        self._models.clear()
        if dist.is_initialized():
            dist.destroy_process_group()

    def reached(self, stage: str, step: int) -> None:
        """Recording starts and ends between two steps; see `Profiler`."""
        self._profiler.reached(stage, step)

    # -- Calls that answer with a `Reply` ---------------------------------------------------------------------------

    def run(self, method: str, *arguments: Any, version: int | None, forgotten: Collection[int]) -> Reply:
        """Call one of the methods below.

        Args:
            method: its name.
            arguments: its own; packed examples are unpacked.
            version: to set before, where the driver was given another; None leaves it.
            forgotten: references that nobody holds any more.
        """
        for number in forgotten:
            self._models.pop(number, None)
        if version is not None:
            self._policy.version = version
        unpacked = [unpack(each) if isinstance(each, PackedExamples) else each for each in arguments]
        value = getattr(self, f"_do_{method}")(*unpacked)
        rate = self._policy.learning_rate if self._started else None
        return Reply(_on_host(value) if self._rank == 0 else None, self._policy.version, rate)

    def _do_nothing(self) -> None:
        """Only tell version and learning rate."""

    def _do_start_training(self, optimizer: Any, options: Mapping[str, Any]) -> None:
        self._policy.start_training(optimizer, **options)
        self._started = True

    def _do_logp(self, number: int, examples: Any) -> Tensor:
        logp: Tensor = self._models[number].logp(examples)
        return logp

    def _do_entropy(self, number: int, examples: Any) -> Tensor:
        entropy: Tensor = self._models[number].entropy(examples)
        return entropy

    def _do_topk_logits(self, number: int, examples: Any, k: int) -> TopKLogp:
        read: TopKLogp = self._models[number].topk_logits(examples, k)
        return read

    def _do_forward_backward(self, examples: Any, loss: Any, output: Any) -> dict[str, Tensor]:
        return self._policy.forward_backward(examples, loss, output=output)

    def _do_optim_step(self) -> float:
        return self._policy.optim_step()

    def _do_metrics(self) -> Any:
        return self._policy.metrics()

    def _do_freeze_reference(self, number: int, options: Mapping[str, Any]) -> None:
        self._models[number] = self._policy.freeze_reference(**options)

    def _do_save_pretrained(self, folder: str) -> None:
        self._policy.save_pretrained(folder)

    def _do_save_adapter(self, folder: str, base_model_name: str) -> None:
        policy: Any = self._policy  # which has adapters where this is called
        policy.save_adapter(folder, base_model_name=base_model_name)

    def _do_save_checkpoint(self, folder: str, options: Mapping[str, Any]) -> None:
        self._policy.save_checkpoint(folder, **options)

    def _do_load_checkpoint(self, folder: str, options: Mapping[str, Any]) -> Any:
        return self._policy.load_checkpoint(folder, **options)

    def _do_explain(self) -> str:
        return self._policy.explain()

    # -- Refit and room for engines ---------------------------------------------------------------------------------

    def make_refit(self, meeting: RefitMeeting, ip: str) -> None:
        """Take part in the refits of `meeting` from now on, in the place of the former; returns when all have come.

        Args:
            meeting: where, with whom and by which way.
            ip: of this machine, as the others reach it.
        """
        self._close_refit()
        self._refit = meeting.source_refit(weight_source(self._policy), rank=self._rank, host=ip)

    def dtypes(self) -> dict[str, str]:
        """In which dtype each weight, or this rank's part of it, is sent."""
        return dtypes_of(self._policy.shards())

    def refit(self, version: int) -> RefitReport | None:
        """Send the weights as of `version`; the report, from rank 0."""
        if self._refit is None:
            raise RuntimeError("there is no refit yet; call make_refit first")
        self._policy.shards()  # adapters are merged anew
        report = self._refit(version)
        return report if self._rank == 0 else None

    def explain_refit(self) -> str:
        """What each refit moves."""
        return "" if self._refit is None else self._refit.explain()

    def offload(self, options: Mapping[str, Any]) -> Any:
        """Give the device's memory away; the report of this rank."""
        return self._movable.offload(**options)

    def onload(self, options: Mapping[str, Any]) -> Any:
        """Take it back; the report of this rank."""
        return self._movable.onload(**options)

    # -- Within -------------------------------------------------------------------------------------------------------

    @property
    def _policy(self) -> Backend:
        policy: Backend = self._models[POLICY]
        return policy

    @property
    def _movable(self) -> Any:
        if not hasattr(self._policy, "offload"):
            raise RuntimeError(f"{type(self._policy).__name__} cannot give its memory to an engine")
        return self._policy

    def _close_refit(self) -> None:
        refit, self._refit = self._refit, None
        if refit is not None:
            with contextlib.suppress(RefitError):  # the others may be gone, which is why it is closed
                refit.close()


def _on_host(value: Any) -> Any:
    """What can travel to a driver that may have no GPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {name: _on_host(each) for name, each in value.items()}
    if isinstance(value, TopKLogp):
        return TopKLogp(logp=_on_host(value.logp), token_ids=_on_host(value.token_ids))
    return value
