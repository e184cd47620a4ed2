"""Claims about the routers' load-balancing loss: its value, its gradient, and that no cut changes it."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from rl_backends.batching.dealing import RowDealing
from rl_backends.batching.microbatches import make_inputs
from rl_backends.errors import ModelError
from rl_backends.moe import RouterWatch, router_metrics
from rl_backends.packing.enable import enable_packing

MIXTURES = {
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Qwen2Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "attn_implementation": "eager"},
}


def make_mixture(world, family="Qwen3Moe"):
    return world.make_model(family, **MIXTURES[family]).eval()


def plain_loss(model, examples):
    """By the formula, one row at a time, from the logits that transformers itself returns."""
    total = 0.0
    for row, length in enumerate(examples.lengths.tolist()):
        out = model(input_ids=examples.tokens[row : row + 1, :length], output_router_logits=True, use_cache=False)
        losses = []
        for logits in out.router_logits:
            num_experts, top_k = logits.shape[-1], 2
            chosen = logits.topk(top_k, dim=-1).indices.flatten()
            f = torch.bincount(chosen, minlength=num_experts) * num_experts / (top_k * length)
            losses.append((f * F.softmax(logits, dim=-1).mean(0)).sum())
        total = total + torch.stack(losses).mean()
    return total


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def watched_loss(model, watch, examples, *, limits, num_ranks=1):
    """What a backend adds up over its microbatches and ranks, backward included."""
    total = 0.0
    ranks = RowDealing(rank=0, **limits, num_ranks=num_ranks).cut(examples)
    for microbatch in (microbatch for rank in ranks for microbatch in rank):
        rows = microbatch.of(examples, device="cpu")
        inputs = make_inputs(rows.tokens, rows.lengths, rows.trainable, layout=limits.get("layout", "padded"))
        given = {}
        if inputs.cu_seq_lens is not None:
            given = {"cu_seq_lens_q": inputs.cu_seq_lens, "cu_seq_lens_k": inputs.cu_seq_lens}
            given |= {
                "max_length_q": inputs.longest,
                "max_length_k": inputs.longest,
                "position_ids": inputs.position_ids,
            }
        with watch.recording():
            model.base_model(input_ids=inputs.tokens, use_cache=False, **given)
        loss = watch.loss(inputs, rows.lengths, counted=microbatch.counted)
        (loss * microbatch.counted).backward()
        total += loss.item() * microbatch.counted
    return total


@pytest.mark.parametrize("family", MIXTURES)
def test_value_and_gradient_are_those_of_the_formula_row_by_row(world, family):
    model, examples = make_mixture(world, family), world.make_examples()
    watch = RouterWatch(model)
    expected = plain_loss(model, examples)
    expected.backward()
    wanted = gradients(model)
    assert any("gate" in name or "router" in name for name in wanted)
    total = watched_loss(model, watch, examples, limits={"micro_batch_size": 4})
    assert total == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(gradients(model), wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(("rows", "num_ranks"), [(64, 1), (1, 1), (2, 4)])
def test_neither_the_cut_nor_the_layout_changes_it(world, layout, rows, num_ranks):
    model, examples = make_mixture(world), world.make_examples(rows=5)
    plain_loss(model, examples).backward()
    wanted = gradients(model)
    if layout == "packed":
        enable_packing(model)
    watch = RouterWatch(model)
    watched_loss(model, watch, examples, limits={"micro_batch_size": rows, "layout": layout}, num_ranks=num_ranks)
    torch.testing.assert_close(gradients(model), wanted, rtol=1e-5, atol=1e-7)
    counts = watch.take_counts()
    assert {count.sum().item() for count in counts.values()} == {2.0 * examples.lengths.sum().item()}
    assert watch.take_counts() == {}


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_in_backward_does_not_count_twice(world, mode):
    from rl_parallel_plans import apply_activation_checkpointing

    model, examples = make_mixture(world), world.make_examples()
    limits = {"micro_batch_size": 4}
    total = watched_loss(model, RouterWatch(model), examples, limits=limits)
    wanted = gradients(model)
    again = make_mixture(world)
    apply_activation_checkpointing(again, mode)
    watch = RouterWatch(again)
    assert watched_loss(again, watch, examples, limits=limits) == pytest.approx(total, rel=1e-6)
    torch.testing.assert_close(gradients(again), wanted, rtol=1e-5, atol=1e-7)
    assert sum(count.sum().item() for count in watch.take_counts().values()) == 2 * 2 * examples.lengths.sum().item()


def test_even_use_of_experts_costs_one_and_the_worst_costs_experts_over_top_k(world):
    model, examples = make_mixture(world), world.make_examples(rows=1)
    watch = RouterWatch(model)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()
        even = watched_without_backward(model, watch, examples)
        for layer in model.model.layers:  # every token to experts 0 and 1, with scores of 1/2 each
            layer.post_attention_layernorm.weight.zero_()
            layer.post_attention_layernorm.register_forward_hook(lambda _m, _a, out: torch.ones_like(out))
            layer.mlp.gate.weight[:2] = 1.0
            layer.mlp.gate.weight[2:] = -1.0
        worst = watched_without_backward(model, watch, examples)
    assert even == pytest.approx(1.0, rel=1e-6)  # scores are even, whichever experts a tie picks
    assert worst == pytest.approx(4 / 2, rel=1e-6)


def watched_without_backward(model, watch, examples):
    inputs = make_inputs(examples.tokens, examples.lengths, examples.trainable, layout="padded")
    with watch.recording():
        model.base_model(input_ids=inputs.tokens, use_cache=False)
    return watch.loss(inputs, examples.lengths).item()


def test_load_is_reported_as_shares_of_an_even_load():
    counts = {"a": torch.tensor([6.0, 2.0, 0.0, 0.0]), "b": torch.tensor([2.0, 2.0, 2.0, 2.0])}
    assert router_metrics(counts) == pytest.approx(
        {"router_max_load": 2.0, "router_worst_load": 3.0, "router_idle_experts": 0.25}
    )


def test_a_loss_without_a_recorded_forward_is_refused(world):
    model, examples = make_mixture(world), world.make_examples()
    inputs = make_inputs(examples.tokens, examples.lengths, examples.trainable, layout="padded")
    with pytest.raises(RuntimeError, match="2 of 2 routers were not seen"):
        RouterWatch(model).loss(inputs, examples.lengths)


def test_two_forwards_in_one_recording_are_refused(world):
    model = make_mixture(world)
    watch = RouterWatch(model)
    tokens = torch.ones(1, 3, dtype=torch.int64)
    with watch.recording():
        model.base_model(input_ids=tokens, use_cache=False)
        with pytest.raises(RuntimeError, match="ran twice in one recording"):
            model.base_model(input_ids=tokens, use_cache=False)


def test_a_model_without_routers_is_refused_by_name(world):
    with pytest.raises(ModelError, match=r"Qwen3ForCausalLM has no router .* set it to 0"):
        RouterWatch(world.make_model("Qwen3"))


def test_a_router_that_hides_its_logits_is_refused_by_name():
    class Router(torch.nn.Module):
        def forward(self, hidden):
            scores = hidden.softmax(-1)
            return scores, scores.topk(2).indices

    block = torch.nn.Module()
    block.experts, block.router = torch.nn.ModuleList(), Router()
    with pytest.raises(ModelError, match=r"the router 0.router cannot be watched: Router returns .*, and no logits"):
        RouterWatch(torch.nn.Sequential(block))


RANKS = 2
CASES = [
    "tp",
    "tp, packed, recomputed",
    "tp, sequence parallel, packed",
    "fsdp",
    "fsdp, packed, recomputed",
    "cp",
    "cp, packed",
]


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory, start_program):
    """What two ranks found, by case."""
    folder = tmp_path_factory.mktemp("router")
    program = Path(__file__).parent / "programs" / "router_loss.py"
    tasks = [{"rank": rank, "ranks": RANKS, "folder": str(folder), "cases": CASES} for rank in range(RANKS)]
    processes = [start_program(program, task) for task in tasks]
    try:
        assert [process.wait(timeout=600) for process in processes] == [0] * RANKS
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_find_the_gradients_of_one_plain_process(world, of_ranks, case):
    model, examples = make_mixture(world), world.make_examples()
    logp = world.plain_logp(model, examples)
    loss = world.token_loss(logp, examples, num_tokens=examples.trainable.sum())[0]
    balance = plain_loss(model, examples)
    (loss + 0.5 / len(examples.lengths) * balance).backward()
    wanted = gradients(model)
    for rank in of_ranks:
        assert rank[case]["balance"] == pytest.approx(balance.item(), rel=1e-5)
        torch.testing.assert_close(rank[case]["gradients"], wanted, rtol=1e-4, atol=1e-6)
