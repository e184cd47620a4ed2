"""What a training step really holds: real numbers on real ranks, all live storages added up at each operator.

Shares no code with the prediction: another loop, another count.
"""

import gc
import types
import weakref

import torch
import torch.distributed as dist
import torch.distributed.pipelining  # whose import makes a tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel_plans_cases.models import tiny, token_ids
from rl_parallel_plans import (
    get_logprobs_from_vocab_parallel_logits,
    linear_logp,
    parallelize,
    pipeline_stages,
    plan_for,
)
from rl_parallel_plans.forecast.memory import memory


class LiveBytes(TorchDispatchMode):
    """`peak`: the most bytes alive after any operator since it was last set to 0."""

    def __init__(self):
        super().__init__()
        self.alive = weakref.WeakValueDictionary()
        self.peak = 0
        self.mode = _fake_mode()

    def add(self, tensors):
        for tensor in tensors:
            storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
            self.alive[storage._cdata] = storage

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = function(*args, **(kwargs or {}))
        if _fake_mode() is self.mode:  # else DTensor asks for shapes
            self.add(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
            self.peak = max(self.peak, self.now())
        return result

    def now(self):
        return sum(storage.nbytes() for storage in list(self.alive.values()))

    def take(self):
        peak, self.peak = self.peak, self.now()
        return peak


def _fake_mode():
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def _loss_of(model, ids, lm_head):
    if lm_head == "linear_logp":
        return model.loss(ids), None
    output = model(input_ids=ids, use_cache=False)
    if lm_head == "sharded":
        return -get_logprobs_from_vocab_parallel_logits(output.logits, ids, ignore_index=None).mean(), output
    return -output.logits.float().log_softmax(-1).gather(-1, ids[..., None]).mean(), output


def _loss(self, ids):
    hidden = self.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
    softcap = getattr(self.config, "final_logit_softcapping", None)
    return -linear_logp(hidden, self.lm_head, ids.flatten(), softcap=softcap, ignore_index=None).mean()


def truth(
    *,
    tp,
    dp,
    batch_size,
    sequence_length,
    lm_head,
    activation_checkpointing=None,
    sequence_parallel=False,
    param_dtype=None,
    architecture="llama",
    **changes,
):
    """Bytes alive on this rank: between two steps, and at the worst operator of each phase after the first.

    The least of three steps: gloo's thread may hold what it has sent a moment longer than the step does.
    """
    model = tiny(architecture, **changes)
    model.config._attn_implementation = "eager"
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    parallelize(
        model,
        mesh,
        plan_for(model, tp=tp, sequence_parallel=sequence_parallel),
        activation_checkpointing=activation_checkpointing,
        param_dtype=None if param_dtype is None else getattr(torch, param_dtype),
        reduce_dtype=torch.float32,
    )
    if lm_head == "gathered":
        model.lm_head.register_forward_hook(lambda _, __, out: out.full_tensor() if isinstance(out, DTensor) else out)
    elif lm_head == "linear_logp":
        model.loss = types.MethodType(_loss, model)
        register_fsdp_forward_method(model, "loss")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    ids = token_ids(batch_size, sequence_length, vocabulary=model.config.vocab_size)
    live = LiveBytes()
    steps = []
    for _ in range(4):
        gc.collect()
        live.add([*model.parameters(), *model.buffers(), ids])
        live.add(value for state in optimizer.state.values() for value in state.values())
        found = {"between steps": live.now()}
        live.take()
        with live:
            loss, output = _loss_of(model, ids, lm_head)
            found["forward"] = live.take()
            loss.backward()
            found["backward"] = live.take()
            del loss, output
            gc.collect()  # transformers 4.57 leaves a layer's input in a cycle, alive until the collector comes by
            live.take()
            optimizer.step()
            found["optimizer step"] = live.take()
        optimizer.zero_grad()
        steps.append(found)
    return {phase: min(found[phase] for found in steps[1:]) for phase in steps[0]}


def pipeline_truth(
    *,
    pp,
    tp,
    dp,
    batch_size,
    sequence_length,
    lm_head,
    schedule,
    microbatches,
    activation_checkpointing=None,
    sequence_parallel=False,
    param_dtype=None,
    architecture="llama",
    **changes,
):
    """As `truth`, of this rank's stages; forwards and backwards take turns and are one phase.

    The least of eight steps: gloo's threads hold what stages send one another, on a loaded machine for a while.
    """
    model = tiny(architecture, **changes)
    model.config._attn_implementation = "eager"
    mesh = init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    pipeline = pipeline_stages(
        model,
        mesh,
        plan_for(model, tp=tp, sequence_parallel=sequence_parallel),
        schedule=schedule,
        activation_checkpointing=activation_checkpointing,
        param_dtype=None if param_dtype is None else getattr(torch, param_dtype),
        reduce_dtype=torch.float32,
    )
    vocabulary = model.config.vocab_size
    del model

    def loss(model, ids):
        return _loss(model, ids) if lm_head == "linear_logp" else _loss_of(model, ids, lm_head)[0]

    optimizer = torch.optim.AdamW(pipeline.parameters(), foreach=True)
    ids = token_ids(batch_size * microbatches, sequence_length, vocabulary=vocabulary)
    batches = [each.clone() for each in ids.chunk(microbatches)]
    del ids
    live = LiveBytes()
    steps = []
    for _ in range(9):
        gc.collect()
        live.add([*pipeline.parameters(), *batches])
        live.add(buffer for stage in pipeline.stages for buffer in stage.buffers())
        live.add(value for state in optimizer.state.values() for value in state.values())
        found = {"between steps": live.now()}
        live.take()
        with live:
            pipeline.step(batches, loss)
            found["forward and backward"] = live.take()
            gc.collect()
            live.take()
            optimizer.step()
            found["optimizer step"] = live.take()
        optimizer.zero_grad()
        steps.append(found)
    return {phase: min(found[phase] for found in steps[1:]) for phase in steps[0]}


def gradients_after_a_prediction(*, rendezvous):
    """The largest error of a gradient, relative to its largest entry, in a process that predicted the same step."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    memory(tiny("llama"), tp=2, dp=1, param_dtype=None, lm_head="sharded", batch_size=2, sequence_length=16)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    alone, ids = tiny("llama"), token_ids(2, 16)
    alone(input_ids=ids).logits.square().mean().backward()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize(tiny("llama"), mesh, plan_for(alone, tp=2))
    model(input_ids=ids).logits.full_tensor().square().mean().backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max(((p.grad.full_tensor() - whole.grad).abs().max() / whole.grad.abs().max()).item() for p, whole in pairs)
