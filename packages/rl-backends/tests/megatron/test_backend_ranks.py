"""Claims about ranks: what one of them is told or goes wrong on, all of them know, whatever the layout.

How exact they are is the parity table's (`megatron_parity`).
"""

import functools

import pytest
import torch
import torch.distributed as dist

from rl_backends import DTensorBackend, DTensorConfig, OptimizerConfig
from rl_backends.megatron.config import MegatronConfig

LAYOUTS = {
    "DP2": {},
    "TP2": {"tensor_model_parallel_size": 2},
    "TP2+SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP2": {"pipeline_model_parallel_size": 2},
    "PP2, 2 chunks": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "CP2": {"context_parallel_size": 2},
    "EP2": {"expert_model_parallel_size": 2},
    "DP2, distributed optimizer": {"use_distributed_optimizer": True},
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
OUTPUTS = ("logp_and_entropy", "logp_of_token_ids")
ADAMW = OptimizerConfig(lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.01)


QUICK = ("TP2+SP", "PP2", "PP2, 2 chunks", "EP2", "DP2, distributed optimizer")


@pytest.fixture(
    scope="module",
    params=[each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in LAYOUTS],
)
def layout(request):
    return request.param


@pytest.fixture(scope="module")
def found(layout, world, on_ranks_once):
    """What a rank of each layout has seen, rank by rank; one launch for all claims."""
    return on_ranks_once(functools.partial(one_rank, world, layout), ranks=2)


def one_rank(world, layout, rank):
    backend = make_backend(world, layout)
    examples = world.make_examples(rows=7)
    loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())
    seen = {"rank": rank, "read": readings(backend, examples)}
    seen["frozen"] = backend.freeze_reference()
    seen["failed"] = {name: after(backend, examples, loss, wrong) for name, wrong in WRONG.items()}
    seen["not finite"] = not_finite(backend, examples)
    seen["outputs"] = steps_of_outputs(backend, world.asking(examples), world.words_loss)
    seen["first"], seen["second"] = (a_step(backend, examples, loss) for _ in range(2))
    seen["frozen"] = seen["frozen"].logp(examples)
    seen["no rows"] = {key: float(value) for key, value in rows_for_one(backend, world).items()}
    seen["versions"] = backend.version
    backend.close()
    return seen


def make_model(world, layout):
    family, other = ("Qwen3Moe", MIXTURE) if layout == "EP2" else ("Qwen3", {})
    layers = 4 if "chunks" in layout else 2
    return world.make_model(family, pad_token_id=None, tie_word_embeddings=True, num_hidden_layers=layers, **other)


def make_backend(world, layout):
    from rl_backends.megatron.backend import MegatronBackend

    backend = MegatronBackend(make_model(world, layout), MegatronConfig(micro_batch_size=2, **LAYOUTS[layout]))
    backend.start_training(ADAMW, num_steps=10)
    return backend


def readings(backend, examples):
    top = backend.topk_logits(examples, 3)
    return [backend.logp(examples), backend.entropy(examples), top.logp, top.token_ids]


def a_step(backend, examples, loss):
    sums = backend.forward_backward(examples, loss)
    return {"norm": backend.optim_step(), **{name: float(value) for name, value in sums.items()}}


def steps_of_outputs(backend, examples, loss):
    """Sums and gradient norms of losses that look at more than log-probabilities; no weight moves."""
    backend.start_training(OptimizerConfig(lr=1e-30, weight_decay=0.0), num_steps=10)
    of_all = functools.partial(loss, num_tokens=examples.trainable.sum())
    seen = {}
    for output in OUTPUTS:
        sums = backend.forward_backward(examples, of_all, output=output)
        seen[output] = {"norm": backend.optim_step(), "loss": float(sums["loss"])}
    backend.start_training(ADAMW, num_steps=10)
    return seen


def on_one(loss, error):
    """A loss that raises at the second call on the last rank, which every layout has a loss on."""
    calls = []

    def raises(logp, rows):
        calls.append(rows)
        if len(calls) == 2 and dist.get_rank() == 1:
            raise error
        return loss(logp, rows)

    return raises


WRONG = {
    "loss of one rank": lambda loss: on_one(loss, ZeroDivisionError("no rewards")),
    "detached": lambda loss: lambda logp, rows: (logp.sum().detach(), {}),
}


def after(backend, examples, loss, wrong):
    """What was raised, and what is left of the gradient, also of one from before."""
    backend.forward_backward(examples, loss)
    try:
        backend.forward_backward(examples, wrong(loss))
    except Exception as error:  # noqa: BLE001 - what it was is the result
        raised = f"{type(error).__name__}: {error}"
    else:
        raised = "nothing"
    left = max(float(held.parameter.main_grad.abs().max()) for held in backend._distributed.held)
    return {"raised": raised, "left": left}


def not_finite(backend, examples):
    """One row's loss is NaN, wherever that row is."""
    before = [held.local.clone() for held in backend._distributed.held]

    def one_nan(logp, rows):
        factor = torch.where(rows.weight == examples.weight[5], torch.nan, 1.0)
        return (logp * factor[:, None]).sum(), {}

    backend.forward_backward(examples, one_nan)
    try:
        backend.optim_step()
        raised = "nothing"
    except RuntimeError as error:
        raised = f"{type(error).__name__}: {error}"
    same = all(torch.equal(held.local, was) for held, was in zip(backend._distributed.held, before, strict=True))
    return {"raised": raised, "same": same, "version": backend.version}


def rows_for_one(backend, world):
    """Fewer rows than ranks that have rows of their own: one repeats a row, and counts nothing of it."""
    examples = world.make_examples(rows=1)
    sums = backend.forward_backward(examples, lambda logp, rows: (logp.sum(), {"rows": torch.tensor(1.0 * len(logp))}))
    return {**sums, "norm": backend.optim_step()}


def test_every_rank_reads_the_same_and_it_is_what_one_process_reads(found, layout, world):
    examples = world.make_examples(rows=7)
    model = make_model(world, layout).eval()
    with torch.no_grad():
        expected = world.plain_logp(model, examples)
    for each in found:
        torch.testing.assert_close(each["read"][0], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(each["read"], found[0]["read"], rtol=0, atol=0)
        assert (each["read"][1][examples.trainable] > 0).all()


def test_a_loss_that_raises_on_one_rank_raises_on_all_and_clears_every_gradient(found):
    for each in found:
        failed = each["failed"]["loss of one rank"]
        assert "ZeroDivisionError: no rewards" in failed["raised"]
        assert failed["left"] == 0.0
    assert found[1]["failed"]["loss of one rank"]["raised"] == "ZeroDivisionError: no rewards"
    assert found[0]["failed"]["loss of one rank"]["raised"].startswith("RankError: rank 1 failed")


def test_a_loss_without_a_gradient_is_refused_on_all(found):
    for each in found:
        assert "no gradient flows" in each["failed"]["detached"]["raised"]
        assert each["failed"]["detached"]["left"] == 0.0


def test_a_nan_of_one_row_stops_all_and_touches_no_weight(found):
    for each in found:
        assert each["not finite"]["raised"].startswith("NonFiniteGradientError: the gradient norm of step 1 is nan")
        assert each["not finite"]["same"]
        assert each["not finite"]["version"] == 0


def test_the_steps_after_all_that_went_wrong_are_those_of_a_plain_loop(found, layout, world):
    examples = world.make_examples(rows=7)
    loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())
    model = make_model(world, layout)
    first, _ = world.plain_steps(model, examples, loss, steps=1, lr=1e-2, max_grad_norm=1.0)
    norm = torch.nn.utils.get_total_norm(list(first.values())).item()
    for each in found:
        assert each["first"] == found[0]["first"]
        assert each["second"] == found[0]["second"]
        assert each["first"]["norm"] == pytest.approx(norm, rel=1e-5)
        assert each["first"]["tokens"] == examples.trainable.sum()


@pytest.mark.parametrize("output", OUTPUTS)
def test_losses_of_entropies_and_given_words_have_the_gradient_of_one_process(found, layout, world, output):
    examples = world.asking(world.make_examples(rows=7))
    model = make_model(world, layout)
    plain = DTensorBackend(model, DTensorConfig())
    loss = functools.partial(world.words_loss, num_tokens=examples.trainable.sum())
    sums = plain.forward_backward(examples, loss, output=output)
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in plain.model.parameters()]).item()
    plain.close()
    for each in found:
        assert each["outputs"] == found[0]["outputs"]
        assert each["outputs"][output]["norm"] == pytest.approx(norm, rel=1e-5)
        assert each["outputs"][output]["loss"] == pytest.approx(float(sums["loss"]), rel=1e-5)


def test_the_reference_is_the_policy_of_before_on_every_rank(found):
    for each in found:
        torch.testing.assert_close(each["frozen"], found[0]["read"][0], rtol=1e-6, atol=1e-6)


def test_a_rank_without_rows_counts_nothing_and_the_version_counts_steps(found):
    for each in found:
        assert each["no rows"]["rows"] == 1.0
        assert each["no rows"]["norm"] == found[0]["no rows"]["norm"] > 0
        assert each["versions"] == 3 + len(OUTPUTS)


def test_a_batch_that_differs_between_ranks_is_refused_on_all(world, on_ranks):
    def differing(rank):
        backend = make_backend(world, "TP2")
        examples = world.make_examples(seed=rank)
        with pytest.raises(Exception, match="same") as raised:
            backend.logp(examples)
        backend.close()
        return str(raised.value)

    on_ranks(differing, ranks=2)


def test_one_layout_after_the_other_in_one_process(world, on_ranks):
    def both(rank):
        read = []
        for layout in ("TP2", "PP2", "TP2"):
            backend = make_backend(world, layout)
            read.append(backend.logp(world.make_examples()))
            backend.close()
        return read

    for first, *others in on_ranks(both, ranks=2):
        for other in others:
            torch.testing.assert_close(other, first, rtol=1e-5, atol=1e-5)


def test_another_layout_beside_one_that_lives_is_refused(world, on_ranks):
    def beside(rank):
        backend = make_backend(world, "TP2")
        with pytest.raises(ValueError, match=r"one\s+layout a process"):
            make_backend(world, "PP2")
        read = backend.logp(world.make_examples())
        backend.close()
        return read

    on_ranks(beside, ranks=2)
