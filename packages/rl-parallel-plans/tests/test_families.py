"""Layers that are more than softmax attention and one feed-forward network: two ranks against one, or refused."""

import pytest
from parallel_plans_cases.hybrids import ARCHITECTURES, DOUBLE, classes, tiny
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

import rl_parallel_plans as plans
from rl_parallel_plans.structure import around_layers
from rl_parallel_plans.styles import SequenceShardedParallel, WholeLayer, WholeParallel

# What reordered sums may cost, relative to the largest entry: in fp32 after the exponentials of state spaces.
TOLERANCE = 3e-5
TOLERANCE_FP64 = 5e-6  # parts of these models compute in fp32 whatever they are given
# One of each kind of layer: state space, convolution, linear attention, shared keys, latent attention, whole layers.
QUICK = ("bamba", "lfm2", "qwen3_next", "gemma4_shared", "longcat_flash", "granitemoehybrid", "gemma3n", "opt")
WHOLE_LAYERS = ["gemma4_moe", "gemma3n", "opt", "nanochat"]


def needs(architecture):
    if classes(architecture) is None:
        pytest.skip(f"this transformers has no {ARCHITECTURES[architecture][0]}")


@pytest.mark.parametrize(
    "architecture", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in ARCHITECTURES]
)
def test_layers_on_two_ranks_equal_one_with_the_stream_whole_and_cut(ranks, architecture):
    needs(architecture)
    tolerance = TOLERANCE_FP64 if architecture in DOUBLE else TOLERANCE
    for results in ranks("hybrids:parity", 2, architecture=architecture, streams=[False, True]):
        for result in results:
            assert result["source"] == "structure"
            assert result["logits_error"] < tolerance
            assert result["worst_gradient"][1] < tolerance, result["worst_gradient"]
            assert result["gradients_placed_otherwise"] == []
            assert result["all_train"]


@pytest.mark.parametrize(
    "architecture",
    ["bamba", "qwen3_next", *(pytest.param(each, marks=pytest.mark.slow) for each in ("nemotron_h", "jamba"))],
)
def test_gradient_adds_up_over_microbatches_and_recomputed_activations(ranks, architecture):
    needs(architecture)
    for results in ranks("hybrids:parity", 2, architecture=architecture, accumulate=3, checkpointing=True):
        assert all(result["worst_gradient"][1] < TOLERANCE for result in results), results


@pytest.mark.parametrize(
    "architecture", ["qwen3_next", *(pytest.param(each, marks=pytest.mark.slow) for each in ("bamba", "gemma3n"))]
)
def test_gradient_on_a_mesh_of_two_axes_is_that_of_the_whole_batch(ranks, architecture):
    needs(architecture)
    errors = ranks("hybrids:fsdp_parity", 4, architecture=architecture, sequence_parallel=True)
    assert all(worst < TOLERANCE for worst in errors)


def test_groups_fewer_than_ranks_are_shared_by_the_ranks(ranks):
    """Two groups of heads on four ranks: two ranks read the same B and C."""
    needs("falcon_h1")
    changes = {"mamba_n_groups": 2, "num_key_value_heads": 4}
    for results in ranks("hybrids:parity", 4, architecture="falcon_h1", **changes):
        assert all(result["worst_gradient"][1] < TOLERANCE for result in results), results


def test_mixer_with_one_group_is_cut_all_the_same(ranks):
    """Rows that every rank needs are gathered for the forward, not kept by every rank."""
    needs("bamba")
    paths = [f"model.layers.0.mamba.{name}" for name in ("in_proj.weight", "conv1d.weight", "A_log", "norm.weight")]
    for sizes in ranks("hybrids:sizes_of_rank", 2, architecture="bamba", paths=paths):
        assert all(2 * mine == total for mine, total in sizes.values()), sizes


def test_mixer_whose_norm_spans_ranks_takes_no_fused_kernel(ranks):
    needs("bamba")
    for seen, placed in ranks("hybrids:mixer_is_itself_again_after_an_error", 2):
        assert seen == [False, True]
        assert placed


def test_mixer_that_no_rank_can_share_is_whole_and_listed():
    needs("jamba")
    plan = plans.plan_for(tiny("jamba", device="meta"), tp=2)
    assert isinstance(plan.styles["model.layers.*.mamba"], WholeParallel)
    rows = [row for row in plan.parameters if ".mamba." in row.name]
    assert rows
    assert not any(row.sharded for row in rows)


@pytest.mark.parametrize("architecture", WHOLE_LAYERS)
def test_layers_that_mix_the_stream_compute_on_all_of_it_and_hand_on_a_part(architecture):
    needs(architecture)
    plan = plans.plan_for(tiny(architecture, device="meta"), tp=2, sequence_parallel=True)
    assert not plan.problems
    layers = [style for style in plan.styles.values() if isinstance(style, WholeLayer)]
    assert (layers[0].first, layers[-1].last) == (True, True)
    (note,) = [note for note in plan.notes if "compute on the whole sequence" in note]
    assert layers[0].why in note
    assert not any(isinstance(style, SequenceShardedParallel) for style in plan.styles.values())


@pytest.mark.parametrize("architecture", ["gemma4_moe", "gemma3n"])
def test_layers_that_compute_on_the_whole_stream_may_be_recomputed(ranks, architecture):
    needs(architecture)
    changes = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    if architecture == "gemma3n":
        changes |= {"intermediate_size": [96] * 3, "activation_sparsity_pattern": [0.9, 0.0, 0.0]}
    for results in ranks("hybrids:parity", 2, architecture=architecture, accumulate=2, checkpointing=True, **changes):
        assert all(result["worst_gradient"][1] < TOLERANCE for result in results), results


def test_part_of_the_sequence_asked_of_a_norm_that_also_meets_all_of_it_is_a_problem():
    """NanoChat calls its norm before its layers as well: found in its code, whatever the model is called."""
    needs("nanochat")
    model = tiny("nanochat", device="meta")
    styles = {"model.norm": SequenceShardedParallel(gather=True), "model.layers.*.mlp.fc1": ColwiseParallel()}
    plan = plans.plan_for(model, tp=2, sequence_parallel=True, custom=lambda *_, **__: styles)
    (problem,) = [problem for problem in plan.problems if problem.kind == "whole_stream"]
    assert "NanoChatModel.forward calls model.norm before its layers, on the whole sequence" in problem.message
    with pytest.raises(plans.PlanError, match=r"calls model\.norm before its layers"):
        plan.check(model)


def test_feed_forward_that_looks_at_all_features_is_whole_and_the_others_are_cut():
    needs("gemma3n")
    plan = plans.plan_for(tiny("gemma3n", device="meta"), tp=2)
    assert isinstance(plan.styles["model.layers.0.mlp"], WholeParallel)
    assert not isinstance(plan.styles["model.layers.1.mlp"], WholeParallel)


def test_layers_that_differ_get_styles_of_their_own():
    """Attention sinks in one layer and none in the other, under one name: one style for both would lose them."""
    needs("mimo_v2_flash")
    plan = plans.plan_for(tiny("mimo_v2_flash", device="meta"), tp=2)
    sinks = next(row for row in plan.parameters if row.name.endswith("sinks"))
    assert sinks.sharded


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("nemotron_h", {}, "mixer.norm has 2 groups (128 rows, 64 each), which tp=4 does not divide"),
        ("falcon_h1", {"mamba_n_heads": 6, "mamba_d_ssm": 96}, "mamba.in_proj has 6 heads, which tp=4 does not divide"),
        ("qwen3_next", {}, "linear_attn has 2 key heads, which tp=4 does not divide"),
    ],
)
def test_heads_and_groups_that_do_not_divide_are_refused(architecture, changes, message):
    needs(architecture)
    model = tiny(architecture, device="meta", **changes)
    with pytest.raises(plans.PlanError) as refusal:
        plans.plan_for(model, tp=4).check(model)
    assert message in str(refusal.value)


@pytest.mark.parametrize("architecture", ["qwen3_next", "bamba"])
def test_column_wise_output_projections_are_refused_for_mixers(architecture):
    needs(architecture)
    with pytest.raises(plans.PlanError, match="column-wise output projections are for"):
        plans.plan_for(tiny(architecture, device="meta"), tp=2, output_projections="colwise")


@pytest.mark.parametrize("architecture", ["bamba", "minimax", "qwen3_next", "opt"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_plan_counts_the_collectives_that_run(ranks, architecture, sequence_parallel):
    needs(architecture)
    case = {"architecture": architecture, "sequence_parallel": sequence_parallel}
    for ran, told in ranks("hybrids:collectives", 2, **case):
        assert ran == told


def test_mixture_that_flattens_its_tokens_hands_on_the_stream_cut_along_the_sequence(ranks):
    """Llama 4's returns [B * S, H], whose dim 1 is features: cut there, its layer would exchange all of it again."""
    needs("llama4")
    assert ranks("hybrids:what_a_mixture_hands_on", 2) == [["(Shard(dim=1),)", [1, 6, 64], [1, 3, 64]]] * 2


def test_router_of_a_layer_keeps_its_whole_gradient(ranks):
    """Gemma 4's router stands outside of the experts' block: what they send back is summed before it gets there."""
    needs("gemma4_moe")
    for results in ranks("hybrids:parity", 2, architecture="gemma4_moe", streams=[False], accumulate=2):
        assert results[0]["worst_gradient"][1] < TOLERANCE


def test_logits_of_a_model_with_an_embedding_for_each_layer_are_cut_over_the_vocabulary(ranks):
    needs("gemma4")
    assert ranks("hybrids:shape_of_logits", 2, architecture="gemma4") == [["(Shard(dim=2),)", [1, 5, 128]]] * 2


class _Around(nn.Module):
    def forward(self, hidden):
        hidden = self.norm(hidden)
        for _ in range(2):
            for layer in self.layers[:3]:
                hidden = self.mix(layer(hidden))
        return self.last(hidden)


class _ByIndex(nn.Module):
    def forward(self, hidden):
        for index in range(3):
            hidden = self.layers[index](hidden)
        return self.norm(hidden)


def test_what_a_model_does_around_its_layers_is_read_from_its_code():
    around = around_layers(_Around(), "layers")
    assert (around.before, around.inside, around.repeated) == ({"norm"}, {"mix"}, True)
    around = around_layers(_ByIndex(), "layers")
    assert (around.before, around.inside, around.repeated) == (set(), set(), False)
    assert around_layers(_ByIndex(), "blocks") is None
    assert around_layers(nn.Linear(1, 1), "layers") is None
