"""The model as the question wants it sharded, on one rank; and what is done with it afterwards."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rl_parallel_plans.plan.parallel_plan import plan_for
from rl_parallel_plans.structure import matching_modules, output_head
from rl_parallel_plans.verification.question import Question, Task
from rl_parallel_plans.verification.subject import Batch, forward, token_logp

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from rl_parallel_plans.plan.parallel_plan import ParallelPlan


def plan_of(question: Question, model: nn.Module) -> "ParallelPlan":
    """The plan under test. Raises PlanError where there is none."""
    return plan_for(
        model,
        tp=question.tp,
        sequence_parallel=question.sequence_parallel,
        output_projections=question.output_projections,
        custom=question.custom,
    )


def shard(question: Question, model: nn.Module) -> "DeviceMesh":
    """Shard `model` in place; the mesh has the axes dp and tp, or tp alone where there is one data-parallel rank."""
    from torch.distributed.device_mesh import init_device_mesh

    if question.dp > 1:
        mesh = init_device_mesh("cpu", (question.dp, question.tp), mesh_dim_names=("dp", "tp"))
    else:
        mesh = init_device_mesh("cpu", (question.tp,), mesh_dim_names=("tp",))
    if question.apply is not None:
        imported(question.apply)(model, mesh)
    elif question.check_first:
        _applied(question, model, mesh)
    else:
        _forced(question, model, mesh)
    return mesh


def _applied(question: Question, model: nn.Module, mesh: "DeviceMesh") -> None:
    from rl_parallel_plans.sharding.parallelize import apply_tensor_parallel, parallelize

    plan = plan_of(question, model)
    if question.dp > 1:
        parallelize(model, mesh, plan, src_data_rank=None)
    else:
        apply_tensor_parallel(model, mesh, plan, src_data_rank=None)


def _forced(question: Question, model: nn.Module, mesh: "DeviceMesh") -> None:
    """As torch's own `parallelize_module` takes a plan: no checks, no ties made again, the rest left plain."""
    from torch.distributed.tensor.parallel import parallelize_module

    from rl_parallel_plans.sharding.fsdp import apply_fsdp

    for pattern, style in plan_of(question, model).styles.items():
        for _, module in matching_modules(model, pattern):
            parallelize_module(module, mesh["tp"], style, src_data_rank=None)
    if question.dp > 1:
        apply_fsdp(model, mesh)


def imported(function: Callable[..., Any] | str) -> Callable[..., Any]:
    """The function itself, or what its import path names."""
    if callable(function):
        return function
    from rl_parallel_plans.plan.registry import resolve

    found: Any = resolve(function)
    return found  # type: ignore[no-any-return]


def logits_logp(question: Question, logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probability of each next word by the function under test: [rows, length - 1]."""
    from rl_parallel_plans.logp import get_logprobs_from_vocab_parallel_logits

    function = imported(question.logp or get_logprobs_from_vocab_parallel_logits)
    # The last position predicts a word that is not there: any stands in its place, since slicing moves no DTensor.
    logp: Tensor = function(logits, ids.roll(-1, dims=1))
    return logp[:, :-1]


def hidden_logp(model: nn.Module, ids: Tensor) -> Tensor:
    """Log-probability of each next word by `linear_logp`, without logits: [rows, length - 1]."""
    from rl_parallel_plans.logp import linear_logp

    whole: Any = model
    backbone = whole.base_model if whole.base_model is not model else whole.get_decoder()
    hidden = backbone(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    head = model.get_submodule(output_head(model) or "lm_head")
    softcap, scale = _after_head(model)
    flat, targets = hidden.flatten(0, 1), ids[:, 1:].flatten()
    return linear_logp(flat, head, targets, chunk_size=7, softcap=softcap, logit_scale=scale).view(len(ids), -1)


def _after_head(model: nn.Module) -> tuple[float | None, float]:
    """Soft-cap and scale that some configurations say logits get after the lm_head."""
    config: Any = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    softcap = getattr(config, "final_logit_softcapping", None) or None
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return softcap, scale


@torch.no_grad()
def reference_refusal(model: nn.Module, task: Task, batch: Batch) -> str | None:
    """Why the unsharded model itself does not do what the task asks; None where it does."""
    if task.loss != "hidden":
        return None
    try:
        found = hidden_logp(model, batch.ids[0])
    except Exception as error:  # noqa: BLE001 - whatever a model of somebody else raises
        return f"hidden states and lm_head of this model do not fit linear_logp: {' '.join(str(error).split())[:160]}"
    truth = token_logp(forward(model, batch.ids[0], None), batch.ids[0])
    if (found - truth).abs().max() > 1e-4:
        return "this model does more to its logits after the lm_head than linear_logp is told"
    return None
