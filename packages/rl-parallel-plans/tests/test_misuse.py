"""What would be silently wrong is refused, and what looks dangerous is right."""

import pytest
from parallel_plans_cases.models import tiny_on_meta
from torch import nn

from rl_parallel_plans import PlanError, ReplicatedParallel, plan_for, verify

TOLERANCE = 1e-5
LAYER = "model.layers.*"


@pytest.mark.parametrize("plan", [{}, {"sequence_parallel": True}])
def test_each_backward_completes_its_gradients_in_as_many_collectives(ranks, plan):
    first, *later = ranks("misuse:collectives_of_each_backward", 2, **plan)[0]
    assert later == [first, first]


def test_selective_checkpointing_communicates_no_more_than_none(ranks):
    none, selective, full = (
        ranks("misuse:collectives_with_checkpointing", 2, mode=mode)[0] for mode in (None, "selective", "full")
    )
    assert selective == none
    assert full > none


@pytest.mark.parametrize("how", ["to_empty", "reentrant checkpointing"])
def test_gradients_are_whole_after_what_makes_other_parameters(ranks, how):
    for partial, largest in ranks("misuse:gradients_after", 2, how=how):
        assert partial == []
        assert largest < TOLERANCE


def test_hooks_of_others_stay_where_gradients_are_summed_by_a_hook(ranks):
    assert ranks("misuse:hooks_of_others", 2) == [[["kept"], False]] * 2


def test_step_after_a_backward_that_raised_is_right(ranks):
    for _, kind, largest in ranks("misuse:backward_that_raises", 2):
        assert kind == "RuntimeError"
        assert largest < TOLERANCE


def test_token_that_no_rank_has_is_refused(ranks):
    assert all("IndexError: token ids must lie in 0 to 127" in message for message in ranks("misuse:tokens_outside", 2))


def test_auxiliary_loss_that_is_asked_for_at_call_time_is_refused(ranks):
    assert all("output_router_logits is True" in message for message in ranks("misuse:router_loss", 2))


def test_padding_word_has_no_gradient_and_others_have_theirs(ranks):
    for largest, of_padding in ranks("misuse:padding_word", 2):
        assert largest < TOLERANCE
        assert of_padding == 0


def test_fsdp_that_would_not_sum_over_rows_is_refused(ranks):
    for message in ranks("misuse:rows_over_ranks_that_nothing_sums", 2):
        assert "pass dp_axis=('dp', 'cp')" in message


def problems(model, **options):
    return {problem.kind for problem in plan_for(model, tp=2, **options).problems}


def test_quantized_weights_are_a_problem_of_any_plan():
    model = tiny_on_meta("llama")
    model.config.quantization_config = {"quant_method": "fp8"}
    assert problems(model) == {"quantized"}


def test_plan_that_shards_nothing_is_a_problem():
    assert problems(tiny_on_meta("llama"), custom={}) == {"nothing_sharded"}


def test_head_norm_whose_style_sums_nothing_is_a_problem():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    custom = {f"{LAYER}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    custom[f"{LAYER}.self_attn.o_proj"] = RowwiseParallel()
    custom |= {f"{LAYER}.self_attn.{name}_norm": ReplicatedParallel() for name in "qk"}
    assert problems(tiny_on_meta("qwen3"), custom=custom) == {"head_norm"}


def test_fused_weight_that_is_cut_by_columns_is_a_problem():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    custom = {f"{LAYER}.mlp.gate_up_proj": ColwiseParallel(), f"{LAYER}.mlp.down_proj": RowwiseParallel()}
    assert problems(tiny_on_meta("phi3"), custom=custom) == {"unsupported_module"}


def test_lm_head_that_returns_a_plain_slice_is_a_problem():
    from torch.distributed.tensor.parallel import ColwiseParallel

    assert problems(tiny_on_meta("llama"), custom={"lm_head": ColwiseParallel()}) == {"local_lm_head"}


class Doubled(nn.Linear):
    def forward(self, hidden):
        return 2 * super().forward(hidden)


def test_linear_layer_with_a_forward_of_its_own_is_not_known():
    model = tiny_on_meta("llama")
    model.model.layers[0].mlp.up_proj = Doubled(64, 96, bias=False, device="meta")
    assert "no rule knows" in plan_for(model, tp=2).passed_over[1]


@pytest.mark.parametrize("asked", [{"ep": 2}, {"output_projections": "colwise"}, {"sequence_parallel": True}])
def test_plan_that_cannot_hear_what_is_asked_of_it_is_refused(asked):
    with pytest.raises(PlanError, match="a mapping of styles has no arguments"):
        plan_for(tiny_on_meta("llama"), tp=2, custom={"lm_head": "colwise"}, **asked)
    with pytest.raises(PlanError, match=f"has no parameter '{next(iter(asked))}'"):
        plan_for(tiny_on_meta("llama"), tp=2, custom=lambda model: {"lm_head": "colwise"}, **asked)


def test_mistake_inside_a_plan_function_is_told_with_its_place():
    with pytest.raises(PlanError, match=r"raised KeyError: 'layer' \(.*test_misuse.py, line \d+\)"):
        plan_for(tiny_on_meta("llama"), tp=2, custom=lambda model: {}["layer"])


def test_options_that_do_not_exist_are_refused():
    with pytest.raises(PlanError, match=r"it is 'rowwise' or 'colwise'"):
        plan_for(tiny_on_meta("llama"), tp=2, output_projections="columnwise")
    with pytest.raises(PlanError, match=r"verify has no option \['plan'\]"):
        verify("llama", tp=2, plan={})
    with pytest.raises(PlanError, match=r"model is a str: plan_for takes an nn.Module"):
        plan_for("llama", tp=2)


def test_dropout_between_blocks_is_noted():
    assert any("must drop the same" in note for note in plan_for(tiny_on_meta("phi3", resid_pdrop=0.1), tp=2).notes)
