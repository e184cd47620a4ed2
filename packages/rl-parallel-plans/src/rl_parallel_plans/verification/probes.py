"""Measurements of a sharded model beside its forward and backward: checkpoints, collectives, outputs, compilation.

Each shards a copy of the model itself and is collective; compilation changes the sharded model of a step.
"""

import copy
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.structure import stacked_layers, text_layers
from rl_parallel_plans.verification.gradients import whole
from rl_parallel_plans.verification.plan_under_test import shard
from rl_parallel_plans.verification.reference import Batch, forward, relative_error
from rl_parallel_plans.verification.tasks import Request

# -- Checkpoints ---------------------------------------------------------------------------------

State = Mapping[str, Tensor]


def checkpoint_facts(request: Request, model: nn.Module) -> dict[str, Any]:
    """Save the sharded weights and load them in every way that torch has: way to the names that came out otherwise."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh

    from rl_parallel_plans.checkpoints import export_state_dict
    from rl_parallel_plans.sharding.fsdp import apply_fsdp

    truth = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    sharded = copy.deepcopy(model)
    shard(request, sharded)
    folder = [tempfile.mkdtemp(prefix="verify-checkpoint-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    options = StateDictOptions(full_state_dict=True)
    full: dict[str, Any] = {}

    @torch.no_grad()
    def emptied(module: nn.Module) -> nn.Module:
        for parameter in module.parameters():
            parameter.zero_()
        return module

    def exported(module: nn.Module) -> State:
        return dict(export_state_dict(module, every_rank=True, tied_names=True))

    def full_state_dict() -> State:
        # What every rank holds whole comes as the model's own memory, which the other ways empty.
        state: dict[str, Any] = get_model_state_dict(sharded, options=options)
        full.update({name: tensor.clone() for name, tensor in state.items()})
        return full

    def into_unsharded() -> State:
        save({"model": sharded.state_dict()}, checkpoint_id=folder[0])
        state = {"model": emptied(copy.deepcopy(model)).state_dict()}
        load(state, checkpoint_id=folder[0], no_dist=True)
        return state["model"]

    def into(other: nn.Module) -> State:
        state = {"model": emptied(other).state_dict()}
        load(state, checkpoint_id=folder[0])
        other.load_state_dict(state["model"])
        return exported(other)

    def from_full() -> State:
        set_model_state_dict(emptied(sharded), dict(full), options=options)
        return exported(sharded)

    ways: dict[str, Callable[[], State]] = {
        "full state dict": full_state_dict,
        "distributed checkpoint, into the unsharded model": into_unsharded,
        "distributed checkpoint, into the same layout": lambda: into(sharded),
        "full state dict, into the same layout": from_full,
    }
    if request.tp > 1:
        try:
            all_ranks = init_device_mesh("cpu", (request.world,), mesh_dim_names=("dp",))
            fully_sharded = apply_fsdp(copy.deepcopy(model), all_ranks)
            ways["distributed checkpoint, into FSDP without tp"] = lambda: into(fully_sharded)
        except PlanError:  # FSDP does not take this model
            pass
    try:
        return {"ways": {way: _differences(load_by, truth) for way, load_by in ways.items()}}
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(str(folder[0]), ignore_errors=True)


def _differences(load_by: Callable[[], State], truth: State) -> list[str]:
    try:
        state = load_by()
    except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is no Exception
        return [f"it raises {type(error).__name__}: {' '.join(str(error).split())[:300]}"]
    names = [f"{name}: not in the checkpoint" for name in truth if name not in state]
    names += [f"{name}: not in the model" for name in state if name not in truth]
    both = [name for name in state if name in truth]
    return names + [f"{name}: other numbers" for name in both if not torch.equal(state[name], truth[name])]


# -- Collectives ---------------------------------------------------------------------------------

NAMESPACES = {"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor"}
NO_COLLECTIVES = {"wait_tensor", "barrier", "monitored_barrier_", "_wrap_tensor_autograd"}


def collective_facts(request: Request, model: nn.Module) -> dict[str, dict[str, int]]:
    """How often each collective runs in one forward and one backward, and how often a layer runs in each."""
    model = copy.deepcopy(model)
    shard(request, model)
    runs = {"forward": 0, "backward": 0}  # some models run their layers in cycles, not all of them with a gradient

    def count_run(_module: nn.Module, _args: object) -> None:
        runs["forward"] += 1
        runs["backward"] += torch.is_grad_enabled()

    ids = torch.arange(32).view(2, 16) + 4
    model(input_ids=ids)  # whatever happens once only
    stack = text_layers(model)
    if stack is not None and len(stack[1]):
        stack[1][0].register_forward_pre_hook(count_run)
    with _CollectiveCounter() as in_forward:
        loss = whole(model(input_ids=ids).logits).float().logsumexp(-1).sum()
    with _CollectiveCounter() as in_backward:
        loss.backward()  # type: ignore[no-untyped-call]
    return {"forward": dict(in_forward.counts), "backward": dict(in_backward.counts), "runs": runs}


class _CollectiveCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: PLR0917
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as what it does to local tensors
        namespace, _, name = func._schema.name.partition("::")  # noqa: SLF001 - no public one
        if namespace in NAMESPACES and name not in NO_COLLECTIVES:
            # The `allreduce_` of process groups and the `all_reduce_` of functional collectives are one name.
            name = name.strip("_")
            for ending in ("_coalesced", "_into_tensor", "_tensor", "_base", "_single"):
                name = name.removesuffix(ending)
            for joint, parted in (("allr", "all_r"), ("allg", "all_g"), ("alltoall", "all_to_all")):
                name = name.replace(joint, parted)
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


# -- Outputs -------------------------------------------------------------------------------------

WRONG_OUTPUT = 1e-4


@torch.no_grad()
def output_facts(request: Request, model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Names of modules whose output differs from the unsharded model's, in the order in which they ran.

    Outputs that are one rank's part (of the heads, of a sum) cannot be compared, and are left out.
    """
    sharded = copy.deepcopy(model)
    microbatch = batch.microbatches[0]
    with _recorded_outputs(model) as expected:
        forward(model, microbatch)
    mesh = shard(request, sharded)
    dp_rank = mesh.get_local_rank("dp") if request.dp > 1 else 0
    with _recorded_outputs(sharded) as outputs:
        forward(sharded, microbatch.rows_of(dp_rank, request.dp))
    wrong = []
    for name, output in outputs.items():
        if (true := expected.get(name)) is None:
            continue
        true = true.chunk(request.dp)[dp_rank] if len(true) == len(microbatch.ids) else true
        if output.shape == true.shape and (error := relative_error(output, true)) > WRONG_OUTPUT:
            wrong.append((name, error))
    return {"wrong": wrong[:6]}


@contextmanager
def _recorded_outputs(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    outputs: dict[str, Tensor] = {}

    def recorder(name: str) -> Any:
        def record(_module: nn.Module, _arguments: object, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple | list) and output else output
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and name not in outputs:
                outputs[name] = whole(tensor.detach()).clone()

        return record

    handles = [module.register_forward_hook(recorder(name)) for name, module in model.named_modules() if name]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


# -- Compilation ---------------------------------------------------------------------------------


def compile_layers(model: nn.Module, backend: str) -> None:
    """`layer.compile(backend=...)` for every layer of every stack, as torchtitan compiles a model."""
    import torch._inductor.config as inductor
    from torch._dynamo import config
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    inductor.compile_threads = 1  # ranks are forked, and take no pool of processes along
    # Without this, layers beyond the limit run without the compiler, and nothing says so.
    config.fail_on_recompile_limit_hit = True
    for layer in stacked_layers(model).values():
        layer.compile(backend=backend)


def compiler_facts() -> dict[str, Any]:
    """Graphs and graph breaks since `compile_layers`, with the reason of each break."""
    from torch._dynamo.utils import counters

    return {
        "graphs": int(counters["stats"].get("unique_graphs", 0)),
        "breaks": {str(reason).strip().splitlines()[0][:200]: n for reason, n in counters["graph_break"].items()},
    }
