"""Log-probabilities over a vocabulary cut over ranks, each against log_softmax over the whole one in fp64."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import linear

import rl_parallel_plans.logp.linear as linear_module
from rl_parallel_plans import PlanError
from rl_parallel_plans.logp import (
    get_logprobs_from_vocab_parallel_logits,
    linear_logp,
    logp_of_token_ids,
    top_k_logp,
    top_k_logp_from_logits,
)

FEATURES = 24
IGNORED = -100


def tp_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def error(found, truth):
    """Largest deviation, relative to the largest entry of the truth."""
    found, truth = whole(found).detach().double(), truth.detach()
    return ((found - truth).abs().max() / truth.abs().max().clamp(min=1e-30)).item() if truth.numel() else 0.0


def numbers(*, leading, vocabulary, words, ignored, dtype):
    """hidden, weight, bias and targets, the same at every call."""
    generator = torch.Generator().manual_seed(sum(leading) * 1000 + vocabulary)
    hidden = torch.randn(*leading, FEATURES, generator=generator).to(dtype)
    weight = torch.randn(vocabulary, FEATURES, generator=generator).to(dtype)
    bias = torch.randn(vocabulary, generator=generator).to(dtype)
    shape = [*leading, words] if words else leading
    targets = torch.randint(vocabulary, shape, generator=generator)
    if ignored:
        targets = targets.masked_fill(torch.rand(shape, generator=generator) < ignored, IGNORED)
    return hidden, weight, bias, targets


def head_of(weight, bias, mesh=None, placement=None):
    head = nn.Linear(1, 1, bias=bias is not None)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            placed = tensor if mesh is None else distribute_tensor(tensor, mesh, [placement])
            setattr(head, name, nn.Parameter(placed))
    return head


def distribution(hidden, head, *, temperature=1.0, softcap=None, logit_scale=1.0):
    """log p of every word, [..., V]."""
    logits = linear(hidden, head.weight, head.bias) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return (logits / temperature).log_softmax(-1)


def at_targets(log_p, targets):
    """logp as targets are shaped, and entropy; 0 where ignored."""
    asked = targets != IGNORED
    many = targets if targets.ndim == log_p.ndim else targets[..., None]
    logp = log_p.gather(-1, many.clamp(min=0)).reshape(targets.shape).where(asked, 0)
    rows = asked.any(-1) if targets.ndim == log_p.ndim else asked
    return logp, -(log_p.exp() * log_p).sum(-1).where(rows, 0)


def weighted_sum(outputs):
    """A number that depends on every entry differently."""
    return sum(
        (output.flatten() * torch.linspace(-1, 2, output.numel(), dtype=output.dtype) * (i + 1)).sum()
        for i, output in enumerate(outputs)
    )


def placed_hidden(hidden, mesh, placement):
    placements = {"replicate": Replicate(), "shard 0": Shard(0), "shard 1": Shard(1)}
    if placement == "plain":
        return hidden.clone().requires_grad_()
    return distribute_tensor(hidden, mesh, [placements[placement]]).requires_grad_()


def counts(mode):
    return {str(operation).split(".")[-1]: count for operation, count in mode.get_comm_counts().items()}


def parity(
    *,
    vocabulary,
    leading=(17,),
    words=0,
    ignored=0.0,
    bias=False,
    dtype="float32",
    hidden_placement="plain",
    head_placement="shard",
    given="module",
    entropy=True,
    chunk_size=None,
    kept=True,
    **transform,
):
    """linear_logp: values, gradients of all inputs, where they lie, and collectives."""
    linear_module.KEPT_BYTES = 2**20 if kept else 0
    mesh = tp_mesh()
    hidden, weight, bias_values, targets = numbers(
        leading=leading, vocabulary=vocabulary, words=words, ignored=ignored, dtype=getattr(torch, dtype)
    )
    bias_values = bias_values if bias else None
    truth_hidden = hidden.double().clone().requires_grad_()
    truth_head = head_of(weight.double().clone(), None if bias_values is None else bias_values.double())
    truths = at_targets(distribution(truth_hidden, truth_head, **transform), targets)[: 1 + entropy]
    weighted_sum(truths).backward()

    head = head_of(weight, bias_values, mesh, Shard(0) if head_placement == "shard" else Replicate())
    hidden = placed_hidden(hidden, mesh, hidden_placement)
    with CommDebugMode() as forward:
        lm_head = head.weight if given == "weight" else head
        found = linear_logp(hidden, lm_head, targets, chunk_size=chunk_size, entropy=entropy, **transform)
    found = list(found) if entropy else [found]
    with CommDebugMode() as backward:
        weighted_sum(found).backward()
    return {
        "values": [error(f, t) for f, t in zip(found, truths, strict=True)],
        "shapes": [list(f.shape) for f in found],
        "dtypes": [str(f.dtype) for f in found],
        "gradients": [error(hidden.grad, truth_hidden.grad)]
        + [error(p.grad, t.grad) for p, t in zip(head.parameters(), truth_head.parameters(), strict=True)],
        "placements": [str(getattr(t.grad, "placements", "plain")) for t in (hidden, *head.parameters())],
        "forward": counts(forward),
        "backward": counts(backward),
    }


def top_k_parity(*, vocabulary, k, dtype="float32", hidden_placement="plain", kept=True, chunk_size=4, bias=False):
    """top_k_logp and top_k_logp_from_logits: values, words, gradients, collectives."""
    linear_module.KEPT_BYTES = 2**20 if kept else 0
    mesh = tp_mesh()
    hidden, weight, bias_values, _ = numbers(
        leading=(9,), vocabulary=vocabulary, words=0, ignored=0, dtype=getattr(torch, dtype)
    )
    bias_values = bias_values if bias else None
    truth_hidden = hidden.double().clone().requires_grad_()
    truth_head = head_of(weight.double().clone(), None if bias_values is None else bias_values.double())
    truth = distribution(truth_hidden, truth_head, temperature=0.7, softcap=9.0).topk(k)
    weighted_sum([truth.values]).backward()
    head = head_of(weight, bias_values, mesh, Shard(0))
    hidden = placed_hidden(hidden, mesh, hidden_placement)
    with CommDebugMode() as forward:
        found = top_k_logp(hidden, head, k, temperature=0.7, softcap=9.0, chunk_size=chunk_size)
    weighted_sum([found.logp]).backward()
    return {
        "values": error(found.logp, truth.values),
        "words": bool((found.token_ids == truth.indices).all()),
        "gradients": [error(hidden.grad, truth_hidden.grad), error(head.weight.grad, truth_head.weight.grad)],
        "forward": counts(forward),
    }


def given_words(*, vocabulary, words, dtype="float32", hidden_placement="plain", kept=True, bias=False):
    """logp_of_token_ids: values, gradients, collectives; the first word of each row is asked for twice."""
    linear_module.KEPT_BYTES = 2**20 if kept else 0
    mesh = tp_mesh()
    hidden, weight, bias_values, token_ids = numbers(
        leading=(9,), vocabulary=vocabulary, words=words, ignored=0, dtype=getattr(torch, dtype)
    )
    bias_values = bias_values if bias else None
    token_ids = torch.cat([token_ids, token_ids[:, :1]], -1)
    transform = {"temperature": 0.7, "softcap": 9.0, "logit_scale": 0.5}
    truth_hidden = hidden.double().clone().requires_grad_()
    truth_head = head_of(weight.double().clone(), None if bias_values is None else bias_values.double())
    truth = distribution(truth_hidden, truth_head, **transform).gather(-1, token_ids)
    weighted_sum([truth]).backward()
    head = head_of(weight, bias_values, mesh, Shard(0))
    hidden = placed_hidden(hidden, mesh, hidden_placement)
    with CommDebugMode() as forward:
        found = logp_of_token_ids(hidden, head, token_ids, chunk_size=4, **transform)
    weighted_sum([found]).backward()
    return {
        "values": error(found, truth),
        "gradients": [error(hidden.grad, truth_hidden.grad), error(head.weight.grad, truth_head.weight.grad)],
        "forward": counts(forward),
    }


def top_k_of_logits(*, vocabulary, k):
    mesh = tp_mesh()
    values = torch.randn(2, 5, vocabulary, generator=torch.Generator().manual_seed(3)) * 3
    truth_logits = values.double().requires_grad_()
    truth = (truth_logits / 0.7).log_softmax(-1).topk(k)
    weighted_sum([truth.values]).backward()
    logits = distribute_tensor(values, mesh, [Shard(-1)]).requires_grad_()
    found = top_k_logp_from_logits(logits, k, temperature=0.7, chunk_size=3)
    weighted_sum([found.logp]).backward()
    return {
        "values": error(found.logp, truth.values),
        "words": torch.equal(found.token_ids, truth.indices),
        "gradient": error(logits.grad, truth_logits.grad),
        "unchanged": torch.equal(whole(logits.detach()), values),
    }


def masked_words(*, vocabulary, possible):
    """Logits of which only the first `possible` words are finite: a rank may hold none of them."""
    mesh = tp_mesh()
    values = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(3))
    values[:, possible:] = -torch.inf
    targets = torch.arange(4) % possible
    truth_logits = values[:, :possible].double().requires_grad_()
    truths = at_targets(truth_logits.log_softmax(-1), targets)
    weighted_sum(truths).backward()
    logits = distribute_tensor(values, mesh, [Shard(-1)]).requires_grad_()
    found = get_logprobs_from_vocab_parallel_logits(logits, targets, entropy=True)
    weighted_sum(found).backward()
    top = top_k_logp_from_logits(logits, possible)
    gradient = whole(logits.grad)
    return {
        "values": [error(f, t) for f, t in zip(found, truths, strict=True)],
        "gradient": error(gradient[:, :possible], truth_logits.grad),
        "of_masked": gradient[:, possible:].abs().max().item(),
        "top_words": int(top.token_ids.max()),
    }


def logits_parity(*, vocabulary, ignored=0.0, words=0, temperature=0.7, dtype="float32"):
    mesh = tp_mesh()
    generator = torch.Generator().manual_seed(3)
    values = (torch.randn(2, 5, vocabulary, generator=generator) * 3).to(getattr(torch, dtype))
    *_, targets = numbers(leading=(2, 5), vocabulary=vocabulary, words=words, ignored=ignored, dtype=torch.float32)
    truth = values.double().requires_grad_()
    truths = at_targets((truth / temperature).log_softmax(-1), targets)
    weighted_sum(truths).backward()
    logits = distribute_tensor(values, mesh, [Shard(-1)]).requires_grad_()
    before = logits.to_local().detach().clone()
    with CommDebugMode() as forward:
        found = get_logprobs_from_vocab_parallel_logits(
            logits, targets, temperature=temperature, chunk_size=3, entropy=True
        )
    weighted_sum(found).backward()
    return {
        "values": [error(f, t) for f, t in zip(found, truths, strict=True)],
        "gradient": error(logits.grad, truth.grad),
        "unchanged": torch.equal(logits.to_local().detach(), before),
        "forward": counts(forward),
    }


def published_interval(*, vocabulary):
    """Words [rank * (V // tp), …) instead of DTensor's ceil(V / tp): which log-probabilities that would give."""
    mesh = tp_mesh()
    hidden, weight, _, targets = numbers(leading=(400,), vocabulary=vocabulary, words=0, ignored=0, dtype=torch.float32)
    truth = distribution(hidden, head_of(weight, None)).gather(-1, targets[:, None])[:, 0]
    head = head_of(weight, None, mesh, Shard(0))
    local = hidden @ head.weight.to_local().T
    size = vocabulary // mesh.size()
    index = targets - mesh.get_rank() * size
    mine = (index >= 0) & (index < size)
    at = local.gather(-1, index.where(mine, 0)[:, None])[:, 0].where(mine, 0)
    exponentials = local.exp().sum(-1)
    dist.all_reduce(at)
    dist.all_reduce(exponentials)
    published = at - exponentials.log()
    ours = linear_logp(hidden, head, targets)
    return {
        "published": [((published - truth).abs() > 1e-3).float().mean().item(), (published - truth).abs().max().item()],
        "ours": (ours - truth).abs().max().item(),
    }


def one_rank_meshes():
    """A weight on a mesh of one rank, whatever its axes are called: no collective, the plain result."""
    hidden, weight, bias, targets = numbers(leading=(11,), vocabulary=13, words=0, ignored=0.0, dtype=torch.float32)
    truth = linear_logp(hidden, head_of(weight, bias), targets)
    equal = []
    for names in (["tp"], ["dp"], ["dp", "tp"]):
        mesh = init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names)
        head = nn.Linear(1, 1)
        for name, tensor in (("weight", weight), ("bias", bias)):
            setattr(head, name, nn.Parameter(distribute_tensor(tensor, mesh, [Shard(0)] * len(names))))
        placed = distribute_tensor(hidden, mesh, [Shard(0)] * len(names))
        equal.append(torch.equal(linear_logp(placed, head, targets), truth))
    return equal


def refusals():
    """Placements that nothing can be computed from, each with its message."""
    mesh, dp = tp_mesh(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    hidden, weight, bias, targets = numbers(leading=(4,), vocabulary=8, words=0, ignored=0.0, dtype=torch.float32)
    cut = head_of(weight, None, mesh, Shard(0))
    biased = head_of(weight, bias, mesh, Shard(0))
    biased.bias = nn.Parameter(bias)
    cases = {
        "weight on dp": (hidden, head_of(weight, None, dp, Shard(0))),
        "weight by features": (hidden, head_of(weight, None, mesh, Shard(1))),
        "hidden on dp": (distribute_tensor(hidden, dp, [Shard(0)]), cut),
        "hidden by features": (distribute_tensor(hidden, mesh, [Shard(1)]), cut),
        "whole bias": (hidden, biased),
    }
    messages = {}
    for name, (given, head) in cases.items():
        try:
            linear_logp(given, head, targets)
        except PlanError as refusal:
            messages[name] = str(refusal)
    return messages


def uneven_kernel():
    hidden, weight, _, targets = numbers(leading=(4,), vocabulary=129, words=0, ignored=0.0, dtype=torch.float32)
    try:
        linear_logp(hidden, head_of(weight, None, tp_mesh(), Shard(0)), targets, kernel="liger")
    except PlanError as refusal:
        return str(refusal)
    return None
