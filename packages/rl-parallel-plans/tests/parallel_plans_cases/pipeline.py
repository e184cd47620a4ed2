"""What one rank does in the tests of pipeline stages, beside the plain model on all rows."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

import rl_parallel_plans as plans
from parallel_plans_cases.cases import error, ordered, whole
from parallel_plans_cases.models import tiny, token_ids
from rl_parallel_plans.pipeline.stages import stage_info


def parity(
    architecture,
    shape,
    *,
    tied=False,
    schedule="1f1b",
    microbatches=4,
    length=11,
    sequence_parallel=False,
    hidden_loss=False,
    optimizer_steps=0,
    num_layers=4,
    accumulate=1,
    changes=None,
    options=None,
):
    """Loss, every gradient, norm and weights of a pipeline against one process. `shape` is that of (pp, dp, tp)."""
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("pp", "dp", "tp"))
    dp = mesh["dp"].size()
    changes = {"num_hidden_layers": num_layers, **(changes or {})}
    reference, model = (tiny(architecture, tied=tied, **changes) for _ in range(2))
    ids = token_ids(2 * dp * microbatches * accumulate, length)
    # Some tokens do not count, so that microbatches weigh differently.
    counts = torch.rand(ids[:, 1:].shape, generator=torch.Generator().manual_seed(5)) < 0.6
    total = counts.sum()

    def loss(model, batch):
        if hidden_loss:
            hidden = model.model(input_ids=batch["input_ids"]).last_hidden_state[:, :-1].flatten(0, 1)
            logp = plans.linear_logp(hidden, model.lm_head, batch["input_ids"][:, 1:].flatten())
            return -logp[batch["counts"].flatten()].sum() / total
        logits = whole(model(input_ids=batch["input_ids"]).logits)[:, :-1]
        each = cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten(), reduction="none")
        return each[batch["counts"].flatten()].sum() / total

    plan = plans.plan_for(model, tp=mesh["tp"].size(), sequence_parallel=sequence_parallel)
    pipeline = plans.pipeline_stages(model, mesh, plan, schedule=schedule, **(options or {}))
    # A large eps: otherwise AdamW divides rounding by rounding where a gradient is nearly zero.
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-2) for m in (reference, pipeline)]
    rank = mesh["dp"].get_local_rank()
    mine = [{"input_ids": i, "counts": c} for i, c in zip(ids.chunk(dp)[rank], counts.chunk(dp)[rank], strict=True)]
    mine = [
        {name: torch.stack([row[name] for row in mine[at : at + 2]]) for name in mine[0]}
        for at in range(0, len(mine), 2)
    ]
    result = {}
    for _ in range(max(1, optimizer_steps)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        truth = loss(reference, {"input_ids": ids, "counts": counts})
        truth.backward()
        found = sum(pipeline.step(mine[at : at + microbatches], loss) for at in range(0, len(mine), microbatches))
        dist.all_reduce(found, group=mesh["dp"].get_group())
        norm = pipeline.grad_norm()
        result = result or {
            "loss": [found.item(), truth.item()],
            "norms": [norm.item(), plans.get_grad_norm(reference.parameters()).item()],
            "gradient_errors": _errors(pipeline, reference, gradients=True),
        }
        if optimizer_steps:
            plans.clip_grad_by_total_norm_(pipeline.parameters(), 0.5 * result["norms"][1], norm)
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5 * result["norms"][1])
            for optimizer in optimizers:
                optimizer.step()
    result["weight_errors"] = _errors(pipeline, reference, gradients=False)
    result["stages"] = [str(stage_info(stage)) for stage in pipeline.stages]
    result["names"] = [name for name, _ in pipeline.named_parameters()]
    result["all_names"] = [name for name, _ in reference.named_parameters(remove_duplicate=False)]
    outputs = pipeline.forward(mine, loss)
    forward = torch.stack(outputs).sum() if outputs else torch.zeros(())
    for axis in ("pp", "dp"):
        dist.all_reduce(forward, group=mesh[axis].get_group())
    with torch.no_grad():
        result["forward"] = [forward.item(), loss(reference, {"input_ids": ids, "counts": counts}).item()]
    return result


def _errors(pipeline, reference, *, gradients):
    truth = dict(reference.named_parameters(remove_duplicate=False))
    least = 1e-4 * max(p.grad.abs().max().item() for p in truth.values() if p.grad is not None)
    errors = {}
    for stage in pipeline.stages:
        for name, parameter in stage.named_parameters():
            assert (parameter.grad is None) == (truth[name].grad is None), name
            if not gradients:
                errors[name] = error(ordered(stage, name, parameter), truth[name])
            elif parameter.grad is not None:
                errors[name] = error(ordered(stage, name, parameter.grad), truth[name].grad, least)
    return errors


def exported(shape, *, schedule="1f1b", sequence_parallel=False):
    """Weights of each stage and of the whole pipeline against the plain model's, on this rank."""
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("pp", "dp", "tp"))
    reference, model = (tiny("qwen3", tied=True, num_hidden_layers=4) for _ in range(2))
    truth = dict(plans.export_state_dict(reference))
    if dist.get_rank() != 0:  # which yields on rank 0 alone
        truth = dict(plans.export_state_dict(reference, every_rank=True))
    plan = plans.plan_for(model, tp=mesh["tp"].size(), sequence_parallel=sequence_parallel)
    pipeline = plans.pipeline_stages(model, mesh, plan, schedule=schedule)
    by_stage = {name: tensor for stage in pipeline.stages for name, tensor in plans.export_state_dict(stage)}
    together = dict(pipeline.export_state_dict())
    return {
        "by_stage": {name: torch.equal(tensor, truth[name]) for name, tensor in by_stage.items()},
        "together": {name: torch.equal(tensor, truth[name]) for name, tensor in together.items()},
        "truth": list(truth),
        "with_copies": [
            name for stage in pipeline.stages for name, _ in plans.export_state_dict(stage, tied_names=True)
        ],
        "state_dict": [name for stage in pipeline.stages for name in stage.state_dict()],
    }


def shapes_and_gradients_of_several_steps():
    """Microbatches of one length in one step and of another in the next, and another number of them; one gradient."""
    mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("pp", "dp", "tp"))
    reference, model = (tiny("qwen3", tied=True, num_hidden_layers=4) for _ in range(2))
    pipeline = plans.pipeline_stages(model, mesh, plans.plan_for(model, tp=1))

    def loss(model, ids):
        return cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")

    for length, microbatches in ((9, 2), (14, 3), (9, 4)):
        ids = token_ids(2 * microbatches, length)
        loss(reference, ids).backward()
        pipeline.forward(list(ids.chunk(microbatches)), lambda model, ids: model(input_ids=ids).logits)
        pipeline.step(ids.chunk(microbatches), loss)
    return max(_errors(pipeline, reference, gradients=True).values())


def refusals():
    """What is refused while a pipeline runs or is made, and that nothing has changed before."""
    mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("pp", "dp", "tp"))
    messages = {}

    def tried(name, function):
        try:
            function()
        except plans.PlanError as refusal:
            messages[name] = str(refusal)

    def made(**options):
        model = tiny("llama", num_hidden_layers=4)
        before = {name: id(parameter) for name, parameter in model.named_parameters()}
        try:
            return plans.pipeline_stages(model, mesh, plans.plan_for(model, tp=1), **options)
        except plans.PlanError:
            assert before == {name: id(parameter) for name, parameter in model.named_parameters()}
            raise

    def loss(model, ids):
        return model(input_ids=ids).logits.square().mean()

    for name, options in {
        "schedule": {"schedule": "zero_bubble"},
        "stages of 1f1b": {"stages_per_rank": 2},
        "stages of interleaved": {"schedule": "interleaved_1f1b", "stages_per_rank": 1},
        "stages": {"schedule": "interleaved_1f1b", "stages_per_rank": 3},
        "layers": {"layers": [4, 1]},
        "axis": {"pp_axis": "stage"},
        "rows": {"cp_axis": "dp"},
    }.items():
        tried(name, lambda options=options: made(**options))
    pipeline, ids = made(), token_ids(8, 5)
    tried("microbatches of 1f1b", lambda: pipeline.step([ids], loss))
    tried("no microbatches", lambda: pipeline.step([], loss))
    tried("shapes", lambda: pipeline.step([ids, ids[:, 1:]], loss))
    tried("no ids", lambda: pipeline.step([{"rows": ids}, {"rows": ids}], loss))
    tried("by itself", lambda: pipeline.stages[0](ids))
    return messages


def one_rank_with_every_stage():
    """Two stages on one rank that nobody has sharded: the tied weight is still one parameter."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
    reference, model = (tiny("qwen3", tied=True) for _ in range(2))
    stages = plans.split_stages(model, 2)
    pipeline = plans.Pipeline(stages, mesh, schedule="interleaved_1f1b")
    ids = token_ids(4, 9)

    def loss(model, ids):
        return cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")

    found = pipeline.step(list(ids.chunk(2)), loss)
    truth = loss(reference, ids)
    truth.backward()
    return [found.item() / truth.item() - 1, max(_errors(pipeline, reference, gradients=True).values())]


def experts_over_ranks():
    """Stages whose experts are shared out over an axis of their own, each rank of which has rows of its own."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "ep"))
    reference, model = (tiny("qwen3_moe", num_hidden_layers=4) for _ in range(2))
    plan = plans.plan_for(model, tp=1, ep=2)
    pipeline = plans.pipeline_stages(model, mesh, plan, dp_axis=("dp", "ep"))
    ids = token_ids(8, 9)

    def loss(model, ids):
        return cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")

    loss(reference, ids).backward()
    pipeline.step(ids.chunk(2)[mesh["ep"].get_local_rank()].chunk(2), loss)
    norms = [pipeline.grad_norm().item(), plans.get_grad_norm(reference.parameters()).item()]
    return [max(_errors(pipeline, reference, gradients=True).values()), norms]
