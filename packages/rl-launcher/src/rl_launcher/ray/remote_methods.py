"""The methods of a policy whose ranks are Ray actors: one row each, and what travels between driver and ranks.

Three readers obey the table: `RayPolicy` sends the arguments and picks the result, `TrainingWorker` calls the method
on its rank, and `ColocatedModel` enters the phase that the method needs. To make another method of the backends
available, add it to `TrainingBackend`, so that a backend without it is a type error, and a row here; its arguments and
options are those of the backend.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rl_backends.backend import TrainingBackend
from rl_launcher.ray.remote_calls import GRACE_S
from rl_parallel_plans import TopKLogp

Phase = Literal["generating", "refitting", "training"]
"""What is in the memory of devices that trainer and engine share; see `rl_launcher.ray.colocation`."""

REFIT_GRACE_S = 90.0
"""After one rank's refit has failed, the others end it as soon as they notice, at the latest by the rank's silence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteMethod:
    """How all ranks carry out one method of the policy. Every rank is called alike, but for its rows of a batch."""

    name: str
    runs: Literal["backend", "worker"] = "backend"
    """Whose method of that name a rank calls: its backend's, or `TrainingWorker`'s own."""
    sends: Literal["values", "batch", "folder"] = "values"
    """What the first argument is. A `batch` is dealt by `rl_backends.batching.dealing`: the rows of each data-parallel
    rank are put into Ray's object store once, and its ranks alone read them. A `folder` is made absolute: ranks may
    work in another directory."""
    returns: Literal["rank 0", "rows", "merged", "each rank", "nothing", "frozen model", "trained model"] = "rank 0"
    """What the driver gets: rank 0's result, what data-parallel ranks return of their rows in the order of the batch,
    the dicts of all ranks merged, a list of all results, None, or a handle of a model that stays on the ranks."""
    phase: Phase | None = "training"
    """The colocation phase that must be entered first; None for a method that needs no weights on the device, or that
    runs while `Colocation` itself changes phases."""
    of: Literal["policy", "trained", "any"] = "policy"
    """Who has the method: the `policy` alone; each `trained` model, which are the policy, a reward model and a critic;
    or `any`, references and teachers included."""
    limit: Literal["call_timeout_s", "start_timeout_s"] = "call_timeout_s"
    """The key of `cluster` that limits it."""
    grace_s: float = GRACE_S
    """Seconds that the other ranks get to return once one has failed."""


POLICY_METHODS = {
    method.name: method
    for method in (
        RemoteMethod(name=TrainingBackend.start_training.__name__, of="trained", returns="nothing"),
        RemoteMethod(name=TrainingBackend.logp.__name__, sends="batch", returns="rows", of="any"),
        RemoteMethod(name=TrainingBackend.topk_logits.__name__, sends="batch", returns="rows", of="any"),
        RemoteMethod(name=TrainingBackend.value.__name__, sends="batch", returns="rows", of="trained"),
        RemoteMethod(name=TrainingBackend.score.__name__, sends="batch", returns="rows", of="trained"),
        RemoteMethod(name=TrainingBackend.entropy.__name__, sends="batch", returns="rows"),
        RemoteMethod(name=TrainingBackend.forward_backward.__name__, sends="batch", of="trained"),
        RemoteMethod(name=TrainingBackend.optim_step.__name__, of="trained"),
        RemoteMethod(name=TrainingBackend.row_dealing.__name__, returns="each rank", of="any", phase=None),
        RemoteMethod(name=TrainingBackend.metrics.__name__, of="trained", phase=None),
        RemoteMethod(name=TrainingBackend.freeze_reference.__name__, returns="frozen model"),
        RemoteMethod(name="load_teacher", runs="worker", returns="frozen model", limit="start_timeout_s"),
        RemoteMethod(
            name="load_companion", runs="worker", sends="folder", returns="trained model", limit="start_timeout_s"
        ),
        RemoteMethod(name=TrainingBackend.save_pretrained.__name__, of="trained", sends="folder", returns="nothing"),
        RemoteMethod(name=TrainingBackend.save_adapter.__name__, sends="folder", returns="nothing"),
        RemoteMethod(name=TrainingBackend.save_checkpoint.__name__, of="trained", sends="folder", returns="nothing"),
        RemoteMethod(name=TrainingBackend.load_checkpoint.__name__, of="trained", sends="folder"),
        RemoteMethod(name=TrainingBackend.explain.__name__, phase=None),
        RemoteMethod(name=TrainingBackend.offload.__name__, of="trained", phase=None),
        RemoteMethod(name=TrainingBackend.onload.__name__, of="trained", phase=None),
        RemoteMethod(name="dtypes", runs="worker", returns="merged", phase=None),
        RemoteMethod(name="join_refit", runs="worker", returns="nothing", phase=None, grace_s=REFIT_GRACE_S),
        RemoteMethod(name="refit", runs="worker", phase=None, grace_s=REFIT_GRACE_S),
        RemoteMethod(name="reached", runs="worker", returns="nothing", phase=None),
        RemoteMethod(name="report", runs="worker", returns="nothing", phase=None),
    )
}
"""Every method that the driver can call on all ranks, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCall:
    """A call as the ranks get it, besides its arguments."""

    method: str
    model: int
    """Number of the model that it is called on; 0 is the policy."""
    result: int | None
    """Number that the ranks keep the result under, where it is a model."""
    version: int | None
    """Set on the policy first, where the driver was given another; None leaves it."""
    forgotten: tuple[int, ...]
    """Numbers of models whose handles are gone: the ranks free them."""
    answers: tuple[int, ...] = (0,)
    """The ranks whose results are used; the others return None."""
    readers: tuple[int, ...] | None = None
    """Of the ranks that are given the same rows, the first; None where no rows are sent."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a rank returns of a call."""

    value: Any
    """The result, `packed`, from those ranks whose result is used."""
    version: int
    """Optimizer steps that the weights of the model have seen by now; 0 of a frozen one."""
    learning_rate: float | None
    """Of its next step; None before `start_training`."""
    kept: tuple[Any, ...] = ()
    """What this rank's copy of an observed loss has kept of its rows: their numbers, and columns of them; `packed`."""
    measured: Any = None
    """After an optimizer step, its `metrics(memory=False)`, by a rank whose result is used."""
    device_used_bytes: int | None = None
    """After a refit, what all processes hold of this rank's GPU; None on a CPU."""


# ---- Batches and results as numpy arrays, whose memory the processes of a node share, as Ray does. Tensors would be
# copied, and each takes torch a fifth of a millisecond to read.


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor as a numpy array."""

    array: Any
    dtype: torch.dtype
    """Of the tensor."""


@dataclass(frozen=True, slots=True)
class PackedFields:
    """A dataclass, such as a batch, with its fields `packed`."""

    kind: type[Any]
    fields: Mapping[str, Any]


def packed(value: Any) -> Any:
    """A value with its tensors on the host as numpy arrays, of the CPU's without a copy: the driver may have no GPU."""
    if isinstance(value, Tensor):
        there = value.detach().cpu().contiguous()
        # numpy has no bfloat16; the same bits travel as int16.
        return PackedTensor((there.view(torch.int16) if there.dtype == torch.bfloat16 else there).numpy(), value.dtype)
    if isinstance(value, Mapping):
        return {name: packed(each) for name, each in value.items()}
    if isinstance(value, TopKLogp):
        return TopKLogp(*map(packed, value))
    if is_dataclass(value) and not isinstance(value, type):
        return PackedFields(
            type(value), {each.name: packed(getattr(value, each.name)) for each in fields(value) if each.init}
        )
    return tuple(map(packed, value)) if type(value) is tuple else value


def unpacked(value: Any, *, writable: bool = True) -> Any:
    """The value again. Not `writable`, its tensors may lie in memory that other processes share: only to be read."""
    if isinstance(value, PackedTensor):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            tensor = torch.from_numpy(value.array).view(value.dtype)
        return tensor.clone() if writable else tensor
    if isinstance(value, Mapping):
        return {name: unpacked(each, writable=writable) for name, each in value.items()}
    if isinstance(value, TopKLogp):
        return TopKLogp(*(unpacked(each, writable=writable) for each in value))
    if isinstance(value, PackedFields):
        return value.kind(**unpacked(value.fields, writable=writable))
    return tuple(unpacked(each, writable=writable) for each in value) if type(value) is tuple else value
