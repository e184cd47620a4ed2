"""Claims about Megatron's optimizer: the numbers of the other backend, whole steps or none, the same on every rank."""

import copy
import functools
import inspect
import json
import math
import warnings

import pytest
import torch
from torch import nn

from rl_backends.errors import CheckpointError, ModelError, NonFiniteGradientError
from rl_backends.megatron.config import MegatronConfig
from rl_backends.optimizers import optimizers as neutral
from rl_backends.optimizers.config import MuonConfig, OptimizerConfig

pytestmark = [
    # megatron-core 0.16 names collectives as torch did before 2.13.
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
    # Of GPUs alone.
    pytest.mark.filterwarnings("ignore:When using sequence parallelism it is recommended:UserWarning"),
]

ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


class Layered(nn.Module):
    """A table, a matrix with a bias, a norm, and a matrix of another shape, none trivially right."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 12)
        self.norm = nn.RMSNorm(12)
        self.down = nn.Linear(12, 5, bias=False)
        for seed, parameter in enumerate(self.parameters()):
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 + seed))


def alone(test):
    """Run a test on one rank that is forked for it, in Megatron's groups of that process alone.

    Not in this process: what groups leave behind here would crash ranks that are forked later.
    """

    def run(on_ranks, **given):
        def on_rank(rank):
            from rl_backends.megatron.groups import ParallelGroups

            groups = ParallelGroups.join(MegatronConfig())
            test(**given)
            groups.leave()

        on_ranks(on_rank, ranks=1)

    own = inspect.signature(test).parameters.values()
    fixture = inspect.Parameter("on_ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = inspect.Signature([fixture, *own])
    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def wrap(model, config):
    """The model in Megatron's DDP, as the backend does it."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    from rl_backends.megatron.cpu_compat import cpu_compat

    dtype = getattr(torch, config.precision)
    theirs = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, params_dtype=dtype, bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True, cuda_graph_scope=[],
    )  # fmt: skip
    model.config = theirs
    model.to(dtype)
    gradients = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=config.use_distributed_optimizer
    )
    with cpu_compat():
        return [DistributedDataParallel(theirs, gradients, model)]


def make(model, config, optimizer, *, num_steps=3):
    from rl_backends.megatron.optimizer import make_optimizers

    ddp = wrap(model, config)
    return ddp, make_optimizers(ddp, config, optimizer, num_steps=num_steps)


def random_like(parameters, *, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(parameter.shape, generator=generator) for parameter in parameters]


def give_gradients(ddp, **how):
    parameters = list(ddp[0].parameters())
    for parameter, gradient in zip(parameters, random_like(parameters, **how), strict=True):
        parameter.main_grad.add_(gradient)


def step(ddp, optimizers, *, seed, **how):
    from rl_backends.megatron.gradients import clip_and_step

    give_gradients(ddp, seed=seed, **how)
    return clip_and_step(ddp, optimizers, version=optimizers.num_steps_taken)


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def plain_steps(model, config, *, num_steps):
    """The same gradients through rl_backends.optimizers, as every other backend steps."""
    optimizers = neutral.make_optimizers(model, config, num_steps=num_steps)
    steps = []
    for number in range(num_steps):
        parameters = list(model.parameters())
        for parameter, gradient in zip(parameters, random_like(parameters, seed=number), strict=True):
            parameter.grad = gradient
        steps.append(neutral.clip_and_step(model, optimizers, version=number))
    return steps


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize(
    "recipe",
    [
        {"warmup_steps": 2, "final_lr_ratio": 0.5},
        {"schedule": "cosine", "final_lr_ratio": 0.1, "decay_vectors": True},
        {"schedule": "wsd", "decay_steps": 2, "final_lr_ratio": 0.0, "max_grad_norm": None},
    ],
)
@alone
def test_the_same_recipe_gives_the_numbers_of_the_other_backend(recipe, distributed):
    model = Layered()
    plain, config = copy.deepcopy(model), OptimizerConfig(**ADAMW, **recipe)
    expected = plain_steps(plain, config, num_steps=4)
    megatron = MegatronConfig(use_distributed_optimizer=distributed)
    ddp, optimizers = make(model, megatron, config, num_steps=4)
    found = [step(ddp, optimizers, seed=number) for number in range(4)]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.norm == pytest.approx(theirs.norm, rel=1e-6)
        assert (ours.clipped, ours.skipped) == (theirs.clipped, theirs.skipped)
    torch.testing.assert_close(weights_of(model), weights_of(plain), rtol=0, atol=1e-6)


@alone
def test_a_stage_begins_anew_over_the_same_gradient_buffers():
    from rl_backends.megatron.optimizer import make_optimizers

    model, config = Layered(), OptimizerConfig(**ADAMW)
    plain = copy.deepcopy(model)
    plain_steps(plain, config, num_steps=2)
    plain_steps(plain, config, num_steps=2)
    megatron = MegatronConfig(use_distributed_optimizer=True)
    ddp = wrap(model, megatron)
    for _ in range(2):
        optimizers = make_optimizers(ddp, megatron, config, num_steps=2)
        for number in range(2):
            step(ddp, optimizers, seed=number)
    torch.testing.assert_close(weights_of(model), weights_of(plain), rtol=0, atol=1e-6)


@alone
def test_bfloat16_weights_follow_float32_masters():
    model, config = Layered().to(torch.bfloat16), OptimizerConfig(**{**ADAMW, "lr": 1e-4})
    plain = copy.deepcopy(model).float()  # as the masters begin
    plain_steps(plain, config, num_steps=8)
    ddp, optimizers = make(model, MegatronConfig(precision="bfloat16"), config, num_steps=8)
    for number in range(8):
        step(ddp, optimizers, seed=number)
    rounded = {name: weight.bfloat16() for name, weight in weights_of(plain).items()}
    assert sum(torch.equal(weights_of(model)[name], rounded[name]) for name in rounded) == len(rounded)


@alone
def test_gradients_of_several_calls_add_up_and_none_is_left_after_the_step():
    ddp, optimizers = make(Layered(), MegatronConfig(), OptimizerConfig(**ADAMW))
    give_gradients(ddp, seed=0)
    found = step(ddp, optimizers, seed=1)
    parameters = list(ddp[0].parameters())
    first, second = random_like(parameters, seed=0), random_like(parameters, seed=1)
    total = math.sqrt(sum((a + b).square().sum().item() for a, b in zip(first, second, strict=True)))
    assert found.norm == pytest.approx(total, rel=1e-6)
    assert all(each.grad is None and not each.main_grad.any() for each in parameters)


@pytest.mark.parametrize("distributed", [False, True])
@alone
def test_gradients_that_were_never_laid_out_are_cleared_without_a_warning(distributed):
    ddp, optimizers = make(Layered(), MegatronConfig(use_distributed_optimizer=distributed), OptimizerConfig(**ADAMW))
    give_gradients(ddp, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizers.zero_grad()
    assert not any(each.main_grad.any() for each in ddp[0].parameters())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@alone
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_named(value):
    model = Layered()
    ddp, optimizers = make(model, MegatronConfig(), OptimizerConfig(**ADAMW))
    step(ddp, optimizers, seed=0)
    before, state = weights_of(model), copy.deepcopy(optimizers.each[0].state_dict()["state"])
    model.up.weight.main_grad[3, 2] = value
    with pytest.raises(NonFiniteGradientError, match=r"of step 2 is (nan|inf).*in 1 parameters \(up\.weight\)"):
        step(ddp, optimizers, seed=1)
    torch.testing.assert_close(weights_of(model), before, rtol=0, atol=0)
    torch.testing.assert_close(optimizers.each[0].state_dict()["state"], state, rtol=0, atol=0)
    assert not any(each.main_grad.any() for each in model.parameters())
    assert (optimizers.num_steps_taken, optimizers.num_steps_skipped) == (1, 0)


@alone
def test_a_skipped_step_is_counted_and_does_not_move_the_schedule():
    model = Layered()
    config = OptimizerConfig(**ADAMW, warmup_steps=2, on_nonfinite_gradient="skip")
    ddp, optimizers = make(model, MegatronConfig(), config)
    before = weights_of(model)
    model.table.weight.main_grad[0, 0] = math.nan
    skipped = step(ddp, optimizers, seed=0)
    assert (skipped.skipped, skipped.nonfinite) == (True, ("table.weight",))
    torch.testing.assert_close(weights_of(model), before, rtol=0, atol=0)
    assert (optimizers.num_steps_taken, optimizers.num_steps_skipped) == (0, 1)
    assert optimizers.learning_rate == 0.5e-2
    assert step(ddp, optimizers, seed=0).skipped is False


@alone
def test_everything_without_a_counterpart_is_told_at_once():
    with pytest.raises(ValueError, match=r"(?s)no_decay=\('\*table\*',\).*implementation='foreach'"):
        make(Layered(), MegatronConfig(), OptimizerConfig(**ADAMW, no_decay=("*table*",), implementation="foreach"))
    with pytest.raises(ValueError, match="name='muon'"):
        make(Layered(), MegatronConfig(), OptimizerConfig(lr=1e-3, name="muon", muon=MuonConfig(momentum=0.9)))
    with pytest.raises(ValueError, match="name='adamw_8bit'"):
        make(Layered(), MegatronConfig(), OptimizerConfig(lr=1e-3, name="adamw_8bit"))


@alone
def test_nothing_to_train_is_refused():
    with pytest.raises(ModelError, match="none of the 5 parameters"):
        make(Layered().requires_grad_(False), MegatronConfig(), OptimizerConfig(**ADAMW))


@alone
def test_the_schedule_goes_on_from_json():
    config = OptimizerConfig(**ADAMW, warmup_steps=4)
    ddp, optimizers = make(Layered(), MegatronConfig(), config, num_steps=6)
    step(ddp, optimizers, seed=0)
    state = json.loads(json.dumps(optimizers.schedule_state()))
    _, resumed = make(Layered(), MegatronConfig(), config, num_steps=6)
    resumed.load_schedule_state(state)
    assert resumed.learning_rate == optimizers.learning_rate == 0.5e-2
    with pytest.raises(CheckpointError, match="this stage has 6"):
        resumed.load_schedule_state({"num_steps_taken": 7, "num_steps_skipped": 0})
    with pytest.raises(CheckpointError, match="no state of a schedule"):
        resumed.load_schedule_state({"steps": 1})


@alone
def test_explain_names_the_optimizer_and_its_groups():
    config = OptimizerConfig(lr=2e-3, weight_decay=0.1, schedule="cosine", final_lr_ratio=0.05)
    _, optimizers = make(Layered(), MegatronConfig(), config)
    text = optimizers.explain()
    assert text.startswith("Megatron's FP32Optimizer over AdamW: lr=0.002, cosine to 0.0001, 3 steps in all")
    rows = {line.split()[0]: line.split()[2] for line in text.splitlines()[2:]}
    assert rows == {"0.1": "3", "none": "2"}


@pytest.fixture
def tied_pair(world):
    def make_pair():
        return world.make_model("Llama", tie_word_embeddings=True, pad_token_id=None)

    return make_pair


def trained_on_rank(config, optimizer, hugging_face, *, world, poison=None):
    """Norms of three steps of the real model on this rank, and what a poisoned gradient is answered with."""
    from rl_backends.megatron.gradients import accumulate, clip_and_step
    from rl_backends.megatron.model import MegatronModel
    from rl_backends.megatron.optimizer import make_optimizers
    from rl_backends.megatron.weights import from_hugging_face
    from rl_backends.readers import Head, read_logp

    model = MegatronModel(hugging_face, config, fill=functools.partial(from_hugging_face, hugging_face))
    examples = world.make_examples()
    optimizers = make_optimizers(model.ddp, config, optimizer, num_steps=3)
    mine, reader, count = model.take(examples)[1], read_logp(Head.of(hugging_face), 1.0), 30

    def one_step(number):
        loss = lambda logp, rows: world.token_loss(logp, rows, num_tokens=count)  # noqa: E731
        accumulate(model, examples, mine, loss=loss, reader=reader, output="logp")
        return clip_and_step(model.ddp, optimizers, version=number)

    norms = [one_step(number).norm for number in range(3)]
    if poison is not None:
        next(model.gpt.parameters()).main_grad.view(-1)[0] = poison
    try:
        said = str(clip_and_step(model.ddp, optimizers, version=3))
    except NonFiniteGradientError as error:
        said = str(error)
    held = {held.name: held.local.clone() for held in model.held}
    model.close()
    return {"norms": norms, "said": said, "held": held}


def plain_norms(model, optimizer, world):
    examples, norms = world.make_examples(), []
    optimizers = neutral.make_optimizers(model, optimizer, num_steps=3)
    for number in range(3):
        world.token_loss(world.plain_logp(model, examples), examples, num_tokens=30)[0].backward()
        norms.append(neutral.clip_and_step(model, optimizers, version=number).norm)
    return norms


STEEP = OptimizerConfig(lr=1e-2, eps=1e-4, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=0.5, warmup_steps=2)


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        (4, {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True}),
    ],
)
def test_ranks_agree_on_the_true_norm_and_on_a_gradient_that_only_one_saw_fail(
    world, on_ranks, tied_pair, ranks, sizes
):
    """Norms of the second and third step tell whether the steps before were the right ones, too."""
    plain = tied_pair()
    config = MegatronConfig(micro_batch_size=2, **sizes)

    def on_rank(rank):
        poison = math.nan if rank == ranks - 1 else None
        return trained_on_rank(config, STEEP, tied_pair(), world=world, poison=poison)

    found = on_ranks(on_rank, ranks=ranks)
    expected = plain_norms(plain, STEEP, world)
    for each in found:
        assert each["norms"] == found[0]["norms"]
        assert each["said"] == found[0]["said"]
    assert found[0]["norms"] == pytest.approx(expected, rel=1e-5)
    assert "the gradient norm of step 4 is nan" in found[0]["said"]
    for name, after in plain.named_parameters():  # what every rank holds whole
        for each in found:
            if "norm" in name and name in each["held"]:
                torch.testing.assert_close(each["held"][name], after.detach(), rtol=0, atol=1e-5)
