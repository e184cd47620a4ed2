"""What a rank does for a cell of the table: convert there and back, read, train, and compare with the plain answer."""

import contextlib
import dataclasses
import importlib
import itertools
import json
import pkgutil
import tempfile
import time

import torch
import torch.distributed as dist
from parity.problems import BETAS, EPS, LEARNING_RATE, MAX_GRAD_NORM, STEPS, WEIGHT_DECAY

from megatron_parity import problems

SMALLEST_SHARE = 1e-4
"""A gradient that is zero but for rounding has no size of its own: it counts as this share of the largest of all."""


def import_all():
    """What every rank needs, before they are forked, and what is worked out at its first use."""
    import transformers
    import transformers.models.llama.modeling_llama
    import transformers.models.mistral.modeling_mistral
    import transformers.models.qwen2.modeling_qwen2
    import transformers.models.qwen3.modeling_qwen3
    import transformers.models.qwen3_moe.modeling_qwen3_moe

    from rl_backends.megatron.installed import require_megatron

    require_megatron()
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel.schedules  # noqa: F401

    import rl_backends.megatron

    for each in pkgutil.walk_packages(rl_backends.megatron.__path__, "rl_backends.megatron."):
        importlib.import_module(each.name)
    with tempfile.TemporaryDirectory() as folder:  # reading and writing a folder compiles hundreds of patterns
        problems.Problem("Llama").model().save_pretrained(folder)
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    torch.set_num_threads(1)  # no pool of threads that ranks would miss


def run_cells(cells, folder, outcomes):
    """Cells of one layout over ranks, which share Megatron's process groups; a line of JSON in `outcomes` for each."""
    from rl_backends.megatron.config import MegatronConfig
    from rl_backends.megatron.groups import ParallelGroups

    groups = None
    with contextlib.suppress(ValueError):  # cells that are refused may have no groups
        groups = ParallelGroups.join(MegatronConfig(**cells[0].config))
    with outcomes.open("w") as lines:
        for cell in cells:
            print(json.dumps(run_cell(cell, folder)), file=lines, flush=True)
    if groups is not None:
        groups.leave()


def run_cell(cell, folder):
    """The outcome of a cell: the error of each quantity, or the words of the refusal. Other errors are raised."""
    from rl_backends import OptimizerConfig
    from rl_backends.megatron.backend import MegatronBackend
    from rl_backends.megatron.config import MegatronConfig

    started = time.process_time()
    try:
        backend = MegatronBackend(cell.problem.model(), MegatronConfig(**cell.config))
    except ValueError as error:
        return {"cell": cell.name, "refused": f"{type(error).__name__}: {error}"}
    truth = torch.load(folder / cell.problem.file, weights_only=True)
    try:
        converted = there_and_back(backend, cell, folder)
        optimizer = OptimizerConfig(
            lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM
        )
        backend.start_training(optimizer, num_steps=STEPS, temperature=cell.problem.temperature)
        errors = train(backend, cell, truth)
    finally:
        backend.close()
    worst = {quantity: max(each, key=each.__getitem__) for quantity, each in errors.items()}
    return {
        "cell": cell.name,
        **converted,
        "figures": {quantity: errors[quantity][name] for quantity, name in worst.items()},
        "worst": worst,
        "cpu_s": time.process_time() - started,
    }


def train(backend, cell, truth):
    """By quantity and tensor, how far the backend is from `Problem.answer`."""
    examples, loss = cell.problem.examples(), cell.problem.loss()
    errors = {
        "logits": {"logits": relative(logits(backend, cell.problem), truth["logits"])},
        "logp": {"logp": relative(backend.logp(examples), truth["logp"])},
    }
    for step in range(STEPS):
        sums = {}
        for part in parts(examples, cell.calls):
            for name, value in backend.forward_backward(part, loss).items():
                sums[name] = sums.get(name, 0) + value
        with finalized_gradients(backend) as gradients:
            norm = backend.optim_step()
        if step == 0:
            errors["sums"] = {name: relative(value, truth["sums"][name]) for name, value in sums.items()}
            errors["norm"] = {"norm": relative(torch.tensor(norm), truth["norm"])}
            errors["gradients"] = errors_of_held(backend, truth["gradients"], of=gradients)
    errors["weights"] = errors_of_held(backend, truth["weights"])
    return errors


def logits(backend, problem):
    """The log-softmax over all words that predicts each token of two long rows [2, T, V]."""
    examples = problem.long_examples()
    words = problem.model().config.vocab_size
    top = backend.topk_logits(examples, words)
    return torch.zeros(*examples.tokens.shape, words).scatter(-1, top.token_ids, top.logp)


def parts(examples, calls):
    """Rows of uneven shares, as a step that is accumulated over several calls gets them; whole units."""
    edges = [len(examples.lengths) * number // calls for number in range(calls + 1)]
    for start, stop in itertools.pairwise(edges):
        fields = {field.name: getattr(examples, field.name)[start:stop] for field in dataclasses.fields(examples)}
        yield dataclasses.replace(examples, **fields)


# -- What ranks hold -----------------------------------------------------------------------------


def held(backend):
    """All that this rank holds, second copies too; every rank must call it."""
    backend._distributed.finish_param_gather()
    return backend._distributed.held


@contextlib.contextmanager
def finalized_gradients(backend):
    """The gradient of each parameter, summed over ranks and not clipped yet: a dict that is filled within."""
    from rl_backends.megatron import gradients

    found, sum_over_ranks = {}, gradients._sum_over_ranks

    def watched(models, optimizers):
        sum_over_ranks(models, optimizers)
        for model in models:
            gather_shards(model)
        found.update({each.parameter: each.parameter.main_grad.clone() for each in held(backend)})

    gradients._sum_over_ranks = watched
    try:
        yield found
    finally:
        gradients._sum_over_ranks = sum_over_ranks


def gather_shards(ddp):
    """With the distributed optimizer, each rank has but its share of the sum: put the others' in their places."""
    if ddp.ddp_config.use_distributed_optimizer:
        for group in [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]:
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                own = bucket.grad_data.view(ranks.size(), -1)[ranks.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, own, group=ranks)


def errors_of_held(backend, truth, *, of=None):
    """By name, the largest error in this rank's boxes of it; `of` are other tensors by parameter than the weights."""
    least = SMALLEST_SHARE * max(float(tensor.abs().max()) for tensor in truth.values())
    errors = {}
    for each in held(backend):
        local = each.local if of is None else each.view(of[each.parameter])
        for box in each.boxes():
            scale = max(float(truth[each.name].abs().max()), least)
            error = relative(box.of_local(local), box.of_whole(truth[each.name]), scale=scale)
            errors[each.name] = max(errors.get(each.name, 0.0), error)
    return errors


def relative(found, truth, *, scale=None):
    """Largest difference over the largest entry; NaN counts as infinite."""
    truth = truth.to(torch.float64)
    error = (found.to(torch.float64) - truth).abs().max().item() / (scale or truth.abs().max().item())
    return error if error == error else float("inf")  # noqa: PLR0124 - NaN is what differs from itself


# -- Hugging Face to Megatron and back, bit for bit ----------------------------------------------


def there_and_back(backend, cell, folder):
    """Names of tensors that have other bits, or are not held at all; and this rank's share of all numbers."""
    weights = {name: parameter.detach() for name, parameter in cell.problem.model().named_parameters()}
    if cell.bar > 1e-4:  # in bfloat16
        weights = {name: weight.bfloat16() for name, weight in weights.items()}
    shards = backend.shards()
    wrong = {
        each.name
        for each in shards
        for box in each.boxes()
        if not torch.equal(box.of_local(each.local), box.of_whole(weights[each.name]))
    }
    target = folder / "exported" / cell.name
    backend.save_pretrained(target)
    return {
        "exported": other_bits(target, weights) if not dist.is_initialized() or dist.get_rank() == 0 else [],
        "held_wrong": sorted(wrong | {each.name for each in shards if each.shape != tuple(weights[each.name].shape)}),
        "uncovered": uncovered(shards, weights),
        "held": numbers_held(shards) / sum(weight.numel() for weight in weights.values()),
    }


def numbers_held(shards):
    return sum(torch.Size(box.sizes).numel() for each in shards for box in each.boxes())


def other_bits(folder, weights):
    """Names that are not in the folder's model bit for bit."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    found = dict(model.named_parameters())
    names = weights.keys() ^ found.keys()
    return sorted(names | {name for name in weights if name in found and not torch.equal(found[name], weights[name])})


def uncovered(shards, weights):
    """Names of tensors of which some number is on no rank."""
    masks = {name: torch.zeros(weight.shape, dtype=torch.uint8) for name, weight in weights.items()}
    for each in shards:
        for box in each.boxes():
            box.of_whole(masks[each.name]).fill_(1)
    if dist.is_initialized():
        for mask in masks.values():
            dist.all_reduce(mask, dist.ReduceOp.MAX)
    return sorted(name for name, mask in masks.items() if not mask.all())
