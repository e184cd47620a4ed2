"""Ways to shard that are, or were, in use and are wrong: as data for `verify`, which must say what is wrong with each.

Written anew after what published trainers and libraries do; each names what it gets wrong.
"""

import os

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import rl_parallel_plans as plans

LAYER = "model.layers.*"


def layers():
    """The part that all of them share and have right."""
    colwise = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rowwise = ("self_attn.o_proj", "mlp.down_proj")
    return {
        **{f"{LAYER}.{name}": ColwiseParallel() for name in colwise},
        **{f"{LAYER}.{name}": RowwiseParallel() for name in rowwise},
    }


def embeddings():
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }


def head_norms_left_plain(model):
    """q_norm and k_norm see their rank's heads only: on each rank a part of the gradient, 0.60 to 0.66 of its norm."""
    return {**embeddings(), **layers()}


class GradientReducedInHook(ParallelStyle):
    """All-reduce `.grad` after each backward, with what earlier microbatches left in it."""

    def _apply(self, module, device_mesh):
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p: dist.all_reduce(p.grad, group=device_mesh.get_group())
            )
        return module


def gradients_reduced_again(model):
    """Right after one backward, wrong after the second."""
    norms = {f"{LAYER}.self_attn.{name}": GradientReducedInHook() for name in ("q_norm", "k_norm")}
    return {**embeddings(), **layers(), **norms}


def one_end_of_the_tie(model):
    """The embedding is replaced by a sharded parameter, and the lm_head keeps the old one."""
    return {**layers(), "model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}


def both_ends_of_the_tie(model):
    """Both ends sharded alike, and never made one parameter again."""
    return {**embeddings(), **layers()}


def gathered_lm_head(model):
    """Every rank gets the logits of all words."""
    return {**embeddings(), **layers(), "lm_head": ColwiseParallel(output_layouts=Replicate())}


def layers_alone(model):
    """Embedding and lm_head whole on every rank."""
    return layers()


def local_lm_head(model):
    """Every rank gets a plain slice of the words, which nothing says."""
    return {**embeddings(), **layers(), "lm_head": ColwiseParallel()}


def forgotten_down_proj(model):
    """The outputs of the sharded up_proj meet a whole down_proj."""
    return {pattern: style for pattern, style in {**embeddings(), **layers()}.items() if "down_proj" not in pattern}


def summed_twice(model):
    """A norm outside of the heads has the whole gradient on every rank, and it is summed nevertheless."""
    return {**embeddings(), **layers(), f"{LAYER}.input_layernorm": GradientReducedInHook()}


PLANS_BY_CLASS = {transformers.LlamaForCausalLM: head_norms_left_plain}


def keyed_by_class(model):
    """Looked up by the class object: a wrapped class falls back to a plan that gathers."""
    return PLANS_BY_CLASS.get(type(model), gathered_lm_head)(model)


def sequence_parallel_of_local_pieces(model, mesh):
    """Pieces of the sequence as plain tensors, taken for even ones wherever they become DTensors again."""
    names = ("input_layernorm", "post_attention_layernorm")
    plan = {
        **layers(),
        **{f"{LAYER}.{name}": SequenceParallel() for name in names},
        **{
            f"{LAYER}.{name}": RowwiseParallel(output_layouts=Shard(1))
            for name in ("self_attn.o_proj", "mlp.down_proj")
        },
        f"{LAYER}.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        f"{LAYER}.mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
    model.register_forward_pre_hook(_positions_of_the_whole, with_kwargs=True)


def _positions_of_the_whole(_model, args, kwargs):
    ids = kwargs["input_ids"]
    return args, {**kwargs, "position_ids": torch.arange(ids.shape[1])[None].expand(len(ids), -1)}


def hangs_on_rank_one(model, mesh):
    """One rank waits for a collective that the other never joins."""
    parallelize_module(model, mesh["tp"], {**embeddings(), **layers()}, src_data_rank=None)
    if dist.get_rank() == 1:
        model.register_forward_hook(lambda *_: dist.barrier())


def aborts_on_rank_one(model, mesh):
    """What a communication library does that finds its peers' sizes unlike its own."""
    parallelize_module(model, mesh["tp"], {**embeddings(), **layers()}, src_data_rank=None)
    if dist.get_rank() == 1:
        model.register_forward_hook(lambda *_: os.abort())


def scaled_up_projection(model, mesh):
    """A mistake in the forward of one module of one layer."""
    parallelize_module(model, mesh["tp"], {**embeddings(), **layers()}, src_data_rank=None)
    model.model.layers[1].mlp.register_forward_hook(lambda _module, _args, output: output * 1.01)


def averaged_over_data_parallel_ranks(model, mesh):
    """FSDP as it is by default: it divides by the number of ranks what a global loss has divided already."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def floored_vocabulary_logp(logits, target):
    """Takes the words of a rank to begin at rank * (V // tp), where DTensor cuts ceil(V / tp)."""
    if not isinstance(logits, DTensor):
        return logits.log_softmax(-1).gather(-1, target[..., None]).squeeze(-1)
    group, local = logits.device_mesh.get_group(), logits.to_local().float()
    size = logits.shape[-1] // dist.get_world_size(group)
    start = dist.get_rank(group) * size
    shifted = local - _reduced(local.detach().amax(-1, keepdim=True), group, dist.ReduceOp.MAX)
    total = _Sum.apply(shifted.exp().sum(-1), group)
    mine = (target >= start) & (target < start + size)
    index = (target - start).clamp(0, local.shape[-1] - 1).where(mine, torch.zeros_like(target))
    at_target = shifted.gather(-1, index[..., None]).squeeze(-1) * mine
    return _Sum.apply(at_target, group) - total.log()


def norm_counting_every_copy(parameters):
    """Adds up what every rank holds, whole copies too."""
    total = torch.zeros(())
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            total += gradient.float().norm() ** 2
    dist.all_reduce(total)
    return total.sqrt()


def clip_of_a_copy(parameters, max_norm, total_norm):
    """Casts to fp32 and scales the result of the cast: bf16 gradients stay as they are."""
    scale = min(1.0, max_norm / (float(total_norm) + 1e-6))
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            gradient.to(torch.float32).mul_(scale)


class _Sum(torch.autograd.Function):
    """All-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx, value, group):
        return _reduced(value.clone(), group, dist.ReduceOp.SUM)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def _reduced(value, group, operation):
    dist.all_reduce(value, op=operation, group=group)
    return value


def with_a_graph_break(model, mesh):
    """A right plan, and a hook that torch.compile cannot look into."""
    plans.apply_tensor_parallel(model, mesh, plans.plan_for(model, tp=mesh["tp"].size()), src_data_rank=None)
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())


@torch.no_grad()
def rows_in_an_order_of_their_own(model, mesh):
    """Rows moved inside of each rank, as they were dealt to ranks before state dicts put them back."""
    plans.apply_tensor_parallel(model, mesh, plans.plan_for(model, tp=mesh["tp"].size()), src_data_rank=None)
    for layer in model.model.layers:
        local = layer.mlp.down_proj.weight.to_local()
        local.copy_(local.flip(0))
