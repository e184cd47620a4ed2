"""The models' own plans, over the releases of transformers that the matrix names."""

import pytest
import torch
import transformers
from parallel_plans_cases.hugging_face import built
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from rl_parallel_plans import (
    PlanError,
    ReplicatedParallel,
    get_hf_tp_plan,
    plan_for,
    translate_parallel_style,
)
from rl_parallel_plans.hugging_face import own_plan, translate_plan
from rl_parallel_plans.hugging_face.patterns import matches, why_unmatched
from rl_parallel_plans.hugging_face.strings import KNOWN, SummedModule, parameter_rule
from rl_parallel_plans.styles import VocabularyParallelEmbedding

RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))
TOLERANCE = 1e-5

# Every string of `distributed/tensor_parallel.py` and `integrations/tensor_parallel.py`, 4.50 to 5.23.
EXPERT_PARALLEL = ["grouped_gemm", "ep_router", "ep_dispatch_experts", "megamoe_router", "megamoe_experts"]
STRINGS = [
    *["colwise", "rowwise", "colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep"],
    *["embedding_rowwise", "embedding_colwise", "replicated_with_grad_allreduce", "packed_colwise", "packed_rowwise"],
    *["moe_tp_experts", "moe_identity_expert", "mla_kv_a_proj", "all_reduce", "sequence_parallel", "replicate"],
    *["local_params", "local_colwise", "local_rowwise", "local", "gather", "local_packed_rowwise"],
]


def since(*release):
    return pytest.mark.skipif(release > RELEASE, reason=f"comes with transformers {release}")


class Part(nn.Module):
    """A module of the parts that it is given, with a plan."""

    def __init__(self, plan=None, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.tp_plan = plan


def layers(**parts):
    return Part(layers=nn.ModuleList([Part(**parts)]))


def experts(**changes):
    parameters = {"gate_up_proj": torch.empty(4, 24, 8), "down_proj": torch.empty(4, 8, 12), **changes}
    return Part(**{name: nn.Parameter(p) for name, p in parameters.items() if p is not None})


def test_every_string_of_every_release_is_known():
    assert set(KNOWN) == set(STRINGS)


@pytest.mark.parametrize("style", STRINGS)
def test_every_string_becomes_a_new_style_or_says_that_only_a_parameter_has_it(style):
    config = transformers.LlamaConfig()
    config.qk_rope_head_dim = 8
    if style in ("packed_rowwise", "local_packed_rowwise"):
        with pytest.raises(PlanError, match=f"'{style}' is one of a stacked parameter"):
            translate_parallel_style(style)
    else:
        first, second = (translate_parallel_style(style, config=config) for _ in range(2))
        assert first is not second
        assert type(first) is type(second)


@pytest.mark.parametrize("name", ["colwise_gather_output", "colwise_rep", "embedding_colwise"])
def test_gathered_columns_leave_a_whole_output(name):
    style = translate_parallel_style(name)
    assert isinstance(style, ColwiseParallel)
    assert style.output_layouts == (Replicate(),)


@pytest.mark.parametrize("name", ["rowwise_split_input", "rowwise_rep"])
def test_split_rows_take_a_whole_input(name):
    style = translate_parallel_style(name)
    assert isinstance(style, RowwiseParallel)
    assert style.input_layouts == (Replicate(),)


@pytest.mark.parametrize("style", EXPERT_PARALLEL)
def test_expert_parallelism_is_refused_as_no_style_of_the_tp_axis(style):
    with pytest.raises(PlanError, match=f"'{style}' is expert parallelism, which is no style of the tp axis"):
        translate_parallel_style(style)


def test_unknown_string_is_refused_with_what_is_known():
    with pytest.raises(PlanError, match="style 'diagonal' is unknown: known are all_reduce, colwise,"):
        translate_parallel_style("diagonal")


def test_unknown_string_of_a_plan_is_refused_with_model_pattern_and_release():
    model = built("llama", device="meta")
    model.__class__ = type("Odd", (type(model),), {"tp_plan": {"model.layers.*.mlp.up_proj": "diagonal"}})
    with pytest.raises(PlanError) as refusal:
        get_hf_tp_plan(model)
    assert "Odd, pattern 'model.layers.*.mlp.up_proj'" in str(refusal.value)
    assert f"(transformers {transformers.__version__}): Hugging Face style 'diagonal'" in str(refusal.value)


def test_model_without_a_plan_is_refused():
    model = built("llama", device="meta")
    model.__class__ = type("Bare", (type(model),), {"tp_plan": None})
    with pytest.raises(PlanError, match=r"Bare has no tp_plan of its own"):
        get_hf_tp_plan(model)


@pytest.mark.parametrize(
    ("style", "name", "ndim", "placement"),
    [
        ("colwise", "gate_proj", 3, Shard(1)),
        ("colwise", "sinks", 1, Shard(0)),
        ("rowwise", "down_proj", 3, Shard(2)),
        ("rowwise", "bias", 1, Replicate()),
        ("packed_colwise", "gate_up_proj", 3, Shard(1)),
        ("packed_rowwise", "gate_up_proj", 3, Shard(2)),
        ("local_packed_rowwise", "gate_up_proj", 3, Shard(2)),
        ("replicated_with_grad_allreduce", "weight", 1, Replicate()),
    ],
)
def test_string_on_a_parameter_places_it(style, name, ndim, placement):
    rule = parameter_rule(style, name, ndim)
    assert rule.placement == placement
    assert (rule.row_order is not None) == ("packed" in style)


@pytest.mark.parametrize("style", ["moe_tp_experts", "packed_rowwise", "packed_colwise"])
def test_string_that_cannot_place_a_vector_is_refused(style):
    with pytest.raises(PlanError, match="cannot place the 1-dimensional parameter 'scale'"):
        parameter_rule(style, "scale", 1)


@pytest.mark.parametrize("tied", [False, True])
def test_own_plan_ends_in_a_sharded_head_and_an_embedding_tied_to_it(tied):
    model = built("phi3", tied=tied)
    plan = get_hf_tp_plan(model)
    assert plan["model.layers.*.self_attn.qkv_proj"].output_layouts == (Replicate(),)
    assert plan["lm_head"].output_layouts == (Shard(-1),)
    assert not plan["lm_head"].use_local_output
    assert not tied or isinstance(plan["model.embed_tokens"], VocabularyParallelEmbedding)
    assert not any(pattern.startswith("layers.") for pattern in plan)
    plan_for(model, tp=2, custom=get_hf_tp_plan).check(model)


def test_head_of_a_model_inside_ends_sharded_too():
    model = Part({"thinker.lm_head": "colwise_gather_output"}, thinker=Part(lm_head=nn.Linear(4, 8)))
    head = get_hf_tp_plan(model)["thinker.lm_head"]
    assert head.output_layouts == (Shard(-1),)
    assert not head.use_local_output


def test_norm_whose_gradient_the_plan_forgets_gets_its_sum():
    for release_forgets_it in (("gemma3", RELEASE < (5, 5)), ("glm4_moe", True)):
        architecture, forgotten = release_forgets_it
        plan = own_plan(built(architecture, device="meta"))
        pattern = "model.layers.*.self_attn.q_norm"
        assert isinstance(plan.styles[pattern], ReplicatedParallel)
        assert plan.styles[pattern].partial_gradient
        assert any(pattern in note and "the plan forgets it" in note for note in plan.notes) == forgotten


@since(5, 2)
def test_rules_of_experts_are_put_together_on_the_module_that_holds_them():
    plan = own_plan(built("qwen3_moe", device="meta"))
    style = plan.styles["model.layers.*.mlp.experts"]
    assert isinstance(style, SummedModule)
    assert style.own == {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
    assert not any("gate_up" in pattern for pattern in plan.styles)
    assert style.collectives() == ({"all_reduce": 1}, {"all_reduce": 2})


@since(5, 2)
def test_rule_for_a_part_that_the_configuration_lacks_is_dropped_with_a_note():
    notes = own_plan(built("qwen3_moe", device="meta")).notes
    lacking = "model.layers.*.mlp has no down_proj in this configuration"
    assert f"dropped 'model.layers.*.mlp.down_proj' (rowwise): {lacking}" in notes


def test_rule_repeated_under_a_shorter_prefix_is_dropped_with_a_note():
    model = Part({"layers.*.up": "colwise", "model.layers.*.up": "colwise"}, model=layers(up=nn.Linear(2, 2)))
    plan = own_plan(model)
    assert list(plan.styles) == ["model.layers.*.up"]
    assert plan.notes == ("dropped 'layers.*.up' (colwise): repeats 'model.layers.*.up'",)


def test_rule_with_a_wrong_prefix_and_no_right_twin_is_refused():
    model = Part({"text.layers.*.up": "colwise"}, text=Part(model=layers(up=nn.Linear(2, 2))))
    with pytest.raises(
        PlanError, match=r"the model has text\.model\.layers\.\*\.up, for which the plan has no such rule"
    ):
        own_plan(model)


def test_part_of_another_tower_is_no_twin():
    plan = {"text.layers.*.up": "colwise"}
    model = Part(text=layers(down=nn.Linear(2, 2)), vision=layers(up=nn.Linear(2, 2)))
    assert why_unmatched(model, plan, "text.layers.*.up") == ("text.layers.* has no up in this configuration", True)


def test_missing_layer_that_was_to_sum_cut_features_is_refused():
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    with pytest.raises(
        PlanError, match=r"has no down in this configuration, and it was to sum what 'layers\.\*\.up' cuts"
    ):
        own_plan(Part(plan, layers=layers(up=nn.Linear(2, 2)).layers))


def test_pattern_may_name_parameters():
    found = matches(layers(experts=experts()), "layers.*.experts.down_proj")
    assert found.modules == ()
    assert found.owners == ("layers.0.experts",)


MOE = {"experts.gate_up_proj": "packed_colwise", "experts.down_proj": "rowwise", "experts": "moe_tp_experts"}


@pytest.mark.parametrize(
    ("plan", "changes", "reason"),
    [
        ({**MOE, "experts": None}, {}, "no rule says what that module does with its input"),
        ({"experts.down_proj": "rowwise"}, {}, "no rule sums it"),
        ({**MOE, "experts.gate_up_proj": "colwise"}, {}, "would cut gate from up"),
        (MOE, {"down_proj_bias": torch.empty(4, 8)}, "parameter 'down_proj_bias' is in no rule"),
        ({"experts": "moe_tp_experts"}, {"gate_up_proj": None, "down_proj": None}, "that no rule cuts"),
        (
            {"experts": "colwise", "experts.down_proj": "replicate"},
            {},
            "it has the style 'colwise', and its own parameter",
        ),
        ({**MOE, "experts": "local"}, {}, "leaves the communication to a 'gather' around it: none is"),
        ({"block": "gather", "block.linear": "colwise"}, {}, "communicates inside a 'gather'"),
    ],
)
def test_plan_that_would_be_silently_wrong_is_refused(plan, changes, reason):
    model = Part(experts=experts(**changes), block=Part(linear=nn.Linear(2, 2)))
    with pytest.raises(PlanError, match=reason):
        translate_plan(model, {pattern: style for pattern, style in plan.items() if style})


def test_attention_that_holds_an_unnamed_parameter_beside_cut_heads_is_refused():
    attention = Part(q_proj=nn.Linear(4, 4), k_proj=nn.Linear(4, 4), A=nn.Parameter(torch.zeros(2)))
    with pytest.raises(PlanError, match=r"pattern 'attention\.A' .* the heads of the attention that holds it are cut"):
        translate_plan(Part(attention=attention), {"attention.q_proj": "colwise", "attention.k_proj": "colwise"})


def test_norm_over_features_that_are_cut_is_refused():
    attention = Part(q_a_proj=nn.Linear(4, 6), q_a_layernorm=nn.LayerNorm(6))
    with pytest.raises(PlanError, match="it spans all features of q_a_proj, which are cut"):
        translate_plan(Part(attention=attention), {"attention.q_a_proj": "colwise"})


def test_layer_that_sums_cut_features_where_nothing_cuts_them_is_refused():
    """GLM-5-Next's plan knows the output projection of linear attention, and not what leads to it."""
    plan = {"layers.*.q_proj": "colwise", "layers.*.o_proj": "rowwise"}
    known = Part(q_proj=nn.Linear(4, 4), o_proj=nn.Linear(4, 4))
    assert set(translate_plan(Part(layers=nn.ModuleList([known])), plan).styles) == set(plan)
    other = Part(in_proj=nn.Linear(4, 4), o_proj=nn.Linear(4, 4))
    with pytest.raises(PlanError, match=r"o_proj' .*no rule cuts what is beside it \(in_proj\)"):
        translate_plan(Part(layers=nn.ModuleList([known, other])), plan)


def test_pattern_that_a_caller_brings_and_that_matches_nothing_is_left_for_check_to_list():
    model = built("llama", device="meta")
    plan = plan_for(model, tp=2, custom={"model.layers.*.mlp.no_such_proj": "colwise"})
    with pytest.raises(PlanError, match=r"'model\.layers\.\*\.mlp\.no_such_proj' .* matches no module"):
        plan.check(model)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("gemma3", {"tied": True}),
        ("qwen3_moe", {"accumulate": 3}),
        ("deepseek_v3", {}),
        ("llama4", {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("glm4_moe", {"accumulate": 3}), ("longcat_flash", {}), ("apertus", {}))
        ),
        pytest.param("deepseek_v2", {"accumulate": 3}, marks=since(5, 5)),
        pytest.param("gemma4", {"dtype": "float64"}, marks=since(5, 18)),
    ],
)
def test_own_plan_makes_the_logits_and_gradients_of_one_rank(ranks, architecture, changes):
    for found in ranks("hugging_face:own_plan_parity", 2, architecture=architecture, **changes):
        assert found["logits"] == "(Shard(dim=2),)"
        assert found["logits_error"] < TOLERANCE
        assert max(found["gradient_errors"].values()) < TOLERANCE, found["gradient_errors"]
        assert found["ranks_differ"] == []
        assert found["tied"] == changes.get("tied", False)
        assert found["local_parameters"] < 0.7 * found["parameters"]


@pytest.mark.skipif(RELEASE < (5, 5), reason="experts in a list that a rank may not use, or a plan that is refused")
@pytest.mark.parametrize(("architecture", "sync_last_only"), [("glm4_moe", False), ("deepseek_v2", True)])
def test_own_plan_makes_the_gradients_of_one_rank_under_fsdp(ranks, architecture, sync_last_only):
    for found in ranks("hugging_face:own_plan_under_fsdp", 4, architecture=architecture, sync_last_only=sync_last_only):
        assert max(found["gradient_errors"].values()) < TOLERANCE, found["gradient_errors"]
        assert found["norms"][0] == pytest.approx(found["norms"][1], rel=1e-5)


@pytest.mark.parametrize(
    "style",
    ["colwise", "rowwise", "colwise_rep", "rowwise_rep", "packed_colwise", "replicate", "sequence_parallel"],
)
def test_string_on_a_linear_layer_makes_the_output_and_gradients_of_one_rank(ranks, style):
    for found in ranks("hugging_face:string_parity", 2, style=style):
        assert found["output"] < TOLERANCE
        assert found["input_gradient"] < TOLERANCE
        assert max(found["gradients"].values()) < TOLERANCE
        assert found["cut"] == (style in ("colwise", "packed_colwise"))
        assert found["dtensors"]
