"""What one rank does in each test of context parallelism; each also computes the truth of one process."""

import copy
import inspect
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import rl_parallel_plans as plans
from parallel_plans_cases.cases import error, gradient_errors, whole
from parallel_plans_cases.models import tiny, token_ids
from rl_parallel_plans.context_parallel.apply import apply_context_parallel, gathered_attention
from rl_parallel_plans.context_parallel.layout import sequence_positions, shard_sequence, unshard_sequence

IGNORED = -100
CHECKPOINTING = {
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]),
    },
}


def cp_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def next_tokens(ids, documents=None):
    """Target of each token; the last of a document has none."""
    parts = ids.split(documents or ids.shape[1], 1)
    return torch.cat([torch.cat([part[:, 1:], ids.new_full((len(ids), 1), IGNORED)], 1) for part in parts], 1)


def sum_of_losses(logits, targets):
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)


def borders(documents):
    return None if documents is None else torch.tensor([0, *documents]).cumsum(0).to(torch.int32)


def true_logits(model, ids, documents=None):
    """Of one process; each document is a row by itself."""
    return torch.cat([model(input_ids=part).logits for part in ids.split(documents or ids.shape[1], 1)], 1)


def logits_of_shard(model, ids, mesh, documents=None, *, cut_as_one=False):
    """Logits of this rank's tokens, rows padded as they must be."""
    if cut_as_one:
        positions = torch.cat([torch.arange(length) for length in documents])[None]
        shard, positions = (shard_sequence(each, mesh, pad_value=0) for each in (ids, positions))
    else:
        shard = shard_sequence(ids, mesh, pad_value=0, cu_seqlens=borders(documents))
        positions = sequence_positions(ids.shape[1] if documents is None else borders(documents), mesh)
    return whole(model(input_ids=shard, position_ids=positions).logits)


def sum_gradients(model, mesh):
    """What FSDP does where there is no FSDP."""
    for parameter in model.parameters():
        dist.all_reduce(plans.to_local_if_dtensor(parameter.grad), group=mesh.get_group("cp"))


def parity(
    architecture,
    shape,
    *,
    length=16,
    documents=None,
    cut_as_one=False,
    accumulate=1,
    checkpointing=None,
    fsdp=False,
    sequence_parallel=False,
    experts_over=None,
    **changes,
):
    """Logits, loss and gradients on a mesh (dp, cp, tp), or (dp, cp, ep, tp), against one process.

    documents: their lengths in each row; None: a row is one. experts_over: the axis that experts are shared out over.
    """
    names = ("dp", "cp", "ep", "tp") if len(shape) == 4 else ("dp", "cp", "tp")
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)
    own_rows = [name for name in names if name in ("dp", "ep")]
    groups = 1
    row_rank = 0
    for name in own_rows:
        groups, row_rank = groups * mesh[name].size(), row_rank * mesh[name].size() + mesh.get_local_rank(name)
    length = sum(documents) if documents is not None else length
    ids = token_ids(2 * groups * accumulate, length)
    reference = tiny(architecture, **changes)
    truth = true_logits(reference, ids, documents)
    loss = sum_of_losses(truth, next_tokens(ids, documents))
    loss.backward()

    model = tiny(architecture, **changes).train()
    ep = 1 if experts_over is None else mesh[experts_over].size()
    plan = plans.plan_for(model, tp=mesh["tp"].size(), ep=ep, sequence_parallel=sequence_parallel)
    if experts_over is not None:
        plans.parallelize(model, mesh, plan, cp_axis="cp", ep_axis=experts_over, dp_axis=names[:-1])
    else:
        plans.apply_tensor_parallel(model, mesh, plan)
        apply_context_parallel(model, mesh, plan=plan)
        if fsdp:
            plans.apply_fsdp(model, mesh, dp_axis=names[:-1])
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING[checkpointing])
    rows = ids.chunk(groups)[row_rank]
    cu_seqlens = None if cut_as_one else borders(documents)
    total = torch.zeros(())
    losses = []
    for microbatch in rows.chunk(accumulate):
        targets = next_tokens(microbatch, documents)
        targets = shard_sequence(targets, mesh, pad_value=IGNORED, cu_seqlens=cu_seqlens)
        losses.append(
            sum_of_losses(logits_of_shard(model, microbatch, mesh, documents, cut_as_one=cut_as_one), targets)
        )
        total += losses[-1].detach()
        if not fsdp:  # all forwards before the first backward, where FSDP lets them
            continue
        losses.pop().backward()
    for each in losses:
        each.backward()
    for axis in names[:-1]:
        dist.all_reduce(total, group=mesh.get_group(axis))
    if not fsdp:
        sum_gradients(model, mesh)
    gradients = gradient_errors(model, reference)  # first: a forward leaves FSDP's last unit gathered
    with torch.no_grad():
        held = logits_of_shard(model, rows, mesh, documents, cut_as_one=cut_as_one)
        logits = unshard_sequence(held, mesh, length=None if cu_seqlens is not None else length, cu_seqlens=cu_seqlens)
    return {
        "logits_error": error(logits, truth.chunk(groups)[row_rank]),
        "loss_error": error(total, loss),
        "gradient_errors": gradients,
        "is_fsdp": isinstance(model, FSDPModule),
    }


def loss_of_whole_sequences():
    """A loss that needs every token of a sequence at once, from hidden states, computed by every rank alike."""
    mesh = cp_mesh()
    ids = token_ids(3, 11)
    reference, model = tiny("qwen3"), tiny("qwen3")
    apply_context_parallel(model, mesh)
    losses = []
    for each in (reference, model):
        if each is reference:
            inputs, targets, positions = ids, next_tokens(ids), torch.arange(11)[None]
        else:
            inputs = shard_sequence(ids, mesh, pad_value=0)
            targets = shard_sequence(next_tokens(ids), mesh, pad_value=IGNORED)
            positions = sequence_positions(11, mesh)
        hidden = each.model(input_ids=inputs, position_ids=positions).last_hidden_state
        logp = plans.linear_logp(hidden.flatten(0, 1), each.lm_head, targets.clamp(min=0).flatten()).view_as(inputs)
        if each is model:
            logp = unshard_sequence(logp, mesh, length=11)
        losses.append(torch.exp(logp[:, :-1].mean(1)).sum())
        losses[-1].backward()
    sum_gradients(model, mesh)
    return {"loss_error": error(losses[1], losses[0]), "gradient_errors": gradient_errors(model, reference)}


def changed_logits(position):
    """Positions whose logits change when the token at `position` does."""
    mesh = cp_mesh()
    model = apply_context_parallel(tiny("qwen3"), mesh)
    ids = token_ids(1, 16)
    other = ids.clone()
    other[0, position] = (other[0, position] + 1) % 128
    with torch.no_grad():
        first, second = (unshard_sequence(logits_of_shard(model, each, mesh), mesh) for each in (ids, other))
    return (first != second).any(-1)[0].nonzero().flatten().tolist()


def rows_packed_differently():
    """Two rows, the documents of each of other lengths, as a loader that packs to one length makes them."""
    mesh = cp_mesh()
    ids = token_ids(2, 16)
    packs = [[5, 11], [1, 7, 8]]
    reference, model = tiny("mistral", sliding_window=4), tiny("mistral", sliding_window=4)
    truth = torch.cat([true_logits(reference, row, pack) for row, pack in zip(ids.split(1), packs, strict=True)])
    targets = torch.cat([next_tokens(row, pack) for row, pack in zip(ids.split(1), packs, strict=True)])
    loss = sum_of_losses(truth, targets)
    loss.backward()
    apply_context_parallel(model, mesh)
    positions = torch.stack([torch.cat([torch.arange(length) for length in pack]) for pack in packs])
    logits = model(input_ids=shard_sequence(ids, mesh), position_ids=shard_sequence(positions, mesh)).logits
    found = sum_of_losses(logits, shard_sequence(targets, mesh))
    found.backward()
    total = found.detach().clone()
    dist.all_reduce(total)
    sum_gradients(model, mesh)
    return {
        "logits_error": error(unshard_sequence(logits.detach(), mesh), truth),
        "loss_error": error(total, loss),
        "gradient_errors": gradient_errors(model, reference),
    }


def packed_layout():
    """What is cut by documents is joined by them."""
    mesh = cp_mesh()
    documents = borders([5, 13, 1, 8])
    tokens = torch.arange(2 * 27).view(2, 27)
    return all(
        torch.equal(unshard_sequence(shard, mesh, dim=dim, cu_seqlens=documents), each)
        for dim, each in enumerate((tokens.T, tokens))
        for shard in [shard_sequence(each, mesh, dim=dim, pad_value=-1, cu_seqlens=documents.tolist())]
    )


def attention_parity(*, heads, key_heads, length, value_size=16, scale=None, window=None):
    """Values and gradients of one attention over gathered keys, against torch's over the whole sequence."""
    mesh = cp_mesh()
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, heads, length, 16), (2, key_heads, length, 16), (2, key_heads, length, value_size)]
    wholes = [torch.randn(shape, generator=generator).double().requires_grad_() for shape in shapes]
    weight = torch.randn(2, heads, length, value_size, generator=generator).double()
    options = {"scale": scale, "enable_gqa": heads != key_heads}
    distance = torch.arange(length)[:, None] - torch.arange(length)
    mask = (distance >= 0) & (distance < (window or length))
    truth = scaled_dot_product_attention(*wholes, attn_mask=mask, **options)
    (truth * weight).sum().backward()
    shards = [shard_sequence(each.detach(), mesh, dim=2).requires_grad_() for each in wholes]
    found = gathered_attention(*shards, cp_mesh=mesh, window=window, is_causal=True, **options)
    (found * shard_sequence(weight, mesh, dim=2)).sum().backward()
    return [
        error(unshard_sequence(found, mesh, dim=2), truth),
        *(error(unshard_sequence(s.grad, mesh, dim=2), w.grad) for s, w in zip(shards, wholes, strict=True)),
    ]


def layout(length, dim):
    """What each rank holds of a sequence, and whether everything comes back."""
    mesh = cp_mesh()
    whole_sequence = (
        torch.arange(length).view([length if i == dim else 1 for i in range(3)]).expand(2, 2, 2) if 0 else None
    )
    del whole_sequence
    tokens = torch.arange(2 * length).view(2, length).movedim(1, dim)
    shard = shard_sequence(tokens, mesh, dim=dim, pad_value=-1)
    back = unshard_sequence(shard, mesh, dim=dim, length=length)
    return {
        "held": shard.movedim(dim, 1)[0].tolist(),
        "positions": sequence_positions(length, mesh)[0].tolist(),
        "back": torch.equal(back, tokens),
        "mask_back": torch.equal(unshard_sequence(shard >= 0, mesh, dim=dim, length=length), tokens >= 0),
    }


def refused(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except plans.PlanError as refusal:
        return str(refusal)
    return None


def forward_refusals():
    mesh = cp_mesh()
    model = apply_context_parallel(tiny("llama"), mesh)
    ids = token_ids(2, 8)
    shard, positions = shard_sequence(ids, mesh), sequence_positions(8, mesh)
    late = shard_sequence(torch.tensor([[3, 4, 5, 6, 7, 0, 1, 2]]), mesh)
    cache = tiny("llama")(input_ids=ids, use_cache=True).past_key_values
    named = {"cache" if "cache" in inspect.signature(tiny("llama").forward).parameters else "past_key_values": cache}
    calls = {
        "no positions": {},
        "positions of the whole": {"position_ids": torch.arange(8)[None]},
        "positions that begin late": {"position_ids": late},
        "positions of three axes": {"position_ids": positions.expand(3, 1, -1)},
        "other documents": {"position_ids": positions, "cu_seq_lens_q": torch.tensor([0, 5, 8])},
        "mask": {"position_ids": positions, "attention_mask": torch.ones_like(shard)},
        "labels": {"position_ids": positions, "labels": shard},
        "images": {"position_ids": positions, "pixel_values": torch.ones(1)},
        "cache": {"position_ids": positions, **named},
    }
    messages = {name: refused(model, input_ids=shard, **kwargs) for name, kwargs in calls.items()}
    messages["by position"] = refused(model.model, shard, None, positions)
    messages["twice"] = refused(apply_context_parallel, model, mesh)
    messages["length"] = refused(shard_sequence, ids[:, :7], mesh)
    messages["odd shard"] = refused(unshard_sequence, ids[:, :7], mesh)
    messages["borders"] = refused(shard_sequence, ids, mesh, cu_seqlens=[0, 7])
    messages["empty document"] = refused(shard_sequence, ids, mesh, cu_seqlens=[0, 4, 4, 8])
    messages["other shard"] = refused(unshard_sequence, shard, mesh, cu_seqlens=[0, 3, 8])
    messages["axis"] = refused(shard_sequence, ids, mesh, cp_axis="context")
    handle = model.model.layers[1].self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "attention_mask": torch.ones(1, 1, 4, 4, dtype=torch.bool)}),
        with_kwargs=True,
    )
    messages["mask of a layer"] = refused(model, input_ids=shard, position_ids=positions)
    handle.remove()
    handle = model.model.layers[1].self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "attention_mask": None}), with_kwargs=True, prepend=True
    )
    messages["no mask"] = refused(model, input_ids=shard, position_ids=positions)
    handle.remove()
    model.set_attn_implementation("eager")
    messages["eager"] = refused(model, input_ids=shard, position_ids=positions)
    return messages


def attention_that_raises_leaves_torch_as_it_was():
    """No hook stays entered: attention elsewhere sees its own keys, and the model still works."""
    mesh = cp_mesh()
    model = apply_context_parallel(tiny("llama"), mesh)
    ids = token_ids(1, 8)
    before = logits_of_shard(model, ids, mesh)
    attention = model.model.layers[1].self_attn
    handle = attention.o_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        logits_of_shard(model, ids, mesh)
    except ZeroDivisionError:
        handle.remove()
        return [torch._C._len_torch_function_stack(), torch.equal(logits_of_shard(model, ids, mesh), before)]
    return None


def copied_model():
    """A deep copy, as a reference policy is made: context parallel like its original, with weights of its own."""
    mesh = cp_mesh()
    model = apply_context_parallel(tiny("llama"), mesh)
    other = copy.deepcopy(model)
    ids = token_ids(1, 8)
    before = logits_of_shard(other, ids, mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return torch.equal(logits_of_shard(other, ids, mesh), before) and not logits_of_shard(model, ids, mesh).any()


def collectives():
    """In one layer, forward and backward: three layers less two."""
    mesh = cp_mesh()
    counts = []
    for num_layers in (2, 3):
        model = apply_context_parallel(tiny("llama", num_hidden_layers=num_layers), mesh)
        ids = token_ids(1, 8)
        with CommDebugMode() as forward:
            loss = logits_of_shard(model, ids, mesh).sum()
        with CommDebugMode() as backward:
            loss.backward()
        counts.append([forward.get_comm_counts(), backward.get_comm_counts()])
    return [
        {str(kind).rpartition(".")[2]: more[kind] - less[kind] for kind in more if more[kind] != less[kind]}
        for less, more in zip(*counts, strict=True)
    ]


def one_rank():
    """At cp=1 nothing changes: the model takes what it took."""
    mesh = cp_mesh()
    model = tiny("llama")
    ids = token_ids(2, 7)
    before = model(input_ids=ids, labels=ids).loss
    return torch.equal(apply_context_parallel(model, mesh)(input_ids=ids, labels=ids).loss, before)
