"""What a plan says of itself: numbers computed by hand, and the same ones in text, JSON and HTML."""

import base64
import dataclasses
import hashlib
import json
from html.parser import HTMLParser

import pytest
import torch
import transformers
from parallel_plans_cases.models import tiny, tiny_on_meta
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from rl_parallel_plans import PlanError, plan_for
from rl_parallel_plans.__main__ import main
from rl_parallel_plans.explain import document
from rl_parallel_plans.explain.document import as_json
from rl_parallel_plans.explain.page import as_html
from rl_parallel_plans.explain.report import stage_rows
from rl_parallel_plans.explain.text import as_text

LAYER = "model.layers.*"
BF16 = 2


def llama_8b(**changes):
    """Llama-3.1-8B's shapes, without weights."""
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        **changes,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


@pytest.fixture(scope="module")
def llama():
    return plan_for(llama_8b(), tp=4)


@pytest.fixture(scope="module")
def gemma():
    """Sees images: a vision tower beside the language model, whose head is tied."""
    text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "pad_token_id": None}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 4}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return plan_for(transformers.Gemma3ForConditionalGeneration(config), tp=2)


def rows(plan):
    return {row.name: row for row in plan.parameters}


def test_shapes_and_bytes_of_llama_8b_are_those_computed_by_hand(llama):
    found = rows(llama)
    embedding = found["model.embed_tokens.weight"]
    assert (embedding.local_shape, embedding.shape_over(2)) == ((32064, 4096), (16032, 4096))
    assert embedding.rank_bytes_over(2) == 128256 // 4 // 2 * 4096 * BF16
    assert found["lm_head.weight"].local_shape == (32064, 4096)
    keys = found[f"{LAYER}.self_attn.k_proj.weight"]
    assert (keys.shape, keys.local_shape, keys.shape_over(2)) == ((1024, 4096), (256, 4096), (128, 4096))
    down = found[f"{LAYER}.mlp.down_proj.weight"]
    assert (down.placement, down.local_shape, down.shape_over(2)) == ("Shard(1)", (4096, 3584), (2048, 3584))
    assert down.rank_bytes_over(2) == 32 * 2048 * 3584 * BF16


def test_totals_of_llama_8b_are_those_computed_by_hand(llama):
    norms = (2 * 32 + 1) * 4096
    layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    matrices = 32 * layer + 2 * 128256 * 4096
    total = json.loads(as_json(llama, dp=2))["total"]
    assert total["elements"] == matrices + norms == 8030261248
    assert total["global_bytes"] == BF16 * (matrices + norms)
    assert total["tp_rank_bytes"] == BF16 * (matrices // 4 + norms)
    assert total["rank_bytes"] == BF16 * (matrices // 8 + norms // 2)
    assert total["whole_bytes"] == BF16 * norms


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_decoder_layer_runs_four_collectives_and_with_a_cut_sequence_eight(sequence_parallel):
    plan = plan_for(llama_8b(), tp=4, sequence_parallel=sequence_parallel)
    (layer,) = [row for row in plan.collectives if row.in_layers]
    counts = {"all_gather": 2, "reduce_scatter": 2} if sequence_parallel else {"all_reduce": 2}
    assert (layer.where, layer.parts, layer.count) == (LAYER, ("self_attn", "mlp"), 32)
    assert layer.forward == layer.backward == counts
    assert layer.forward_bytes == layer.backward_bytes == sum(counts.values()) * 4096 * BF16
    assert layer.sent_bytes == 4 * 2 * 4096 * BF16 * 3 // 4  # a ring sends the same either way


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("qwen3", {"sequence_parallel": True}),
        ("olmo2", {}),
        ("qwen3", {"custom": "tp_plan"}),
        ("phi3", {"custom": "tp_plan"}),
    ],
)
def test_collectives_told_are_those_that_run(ranks, architecture, options):
    for forward, backward in ranks("explain:collectives", 2, architecture=architecture, **options):
        assert forward[0] == forward[1]
        assert backward[0] == backward[1]
        assert forward[0]
        assert backward[0]


class Mystery(ParallelStyle):
    """A style of somebody else's."""

    def _apply(self, module, device_mesh):
        return module


def test_style_that_does_not_tell_is_named_and_not_counted():
    plan = plan_for(tiny_on_meta("llama"), tp=2, custom={f"{LAYER}.mlp": Mystery(), f"{LAYER}.self_attn": Mystery()})
    (row,) = plan.collectives
    assert (row.forward, row.untold) == ({}, ("Mystery",))
    assert "not counted: what Mystery communicates" in plan.explain()
    assert "what Mystery does not tell" in as_html(plan)


def test_layers_that_communicate_differently_are_told_apart():
    split = "rowwise_split_input"  # cuts the whole features that it is given
    custom = {"model.layers.0.mlp.down_proj": split, f"{LAYER}.self_attn.o_proj": split}
    plan = plan_for(tiny_on_meta("llama"), tp=2, custom=custom)
    told = [(row.parts, row.count, row.forward) for row in plan.collectives if row.in_layers]
    assert told == [
        (("self_attn.o_proj", "mlp.down_proj"), 1, {"all_reduce": 2}),
        (("self_attn.o_proj",), 1, {"all_reduce": 1}),
    ]


def test_rule_is_the_pattern_and_the_style_that_decided():
    custom = {f"{LAYER}.mlp.*_proj": "colwise", "lm_head": "colwise"}
    plan = plan_for(tiny_on_meta("llama"), tp=2, custom=custom)
    found = rows(plan)
    assert found[f"{LAYER}.mlp.up_proj.weight"].rule == f"{LAYER}.mlp.*_proj: ColwiseParallel"
    assert found["lm_head.weight"].pattern == "lm_head"
    assert found["model.embed_tokens.weight"].rule == "no rule"
    text = plan.explain()
    assert f"ColwiseParallel by '{LAYER}.mlp.*_proj'" in text
    assert "by 'lm_head'" not in text


def test_gradient_that_is_a_term_of_a_sum_and_rows_that_are_reordered_are_marked():
    norm = rows(plan_for(tiny_on_meta("qwen3"), tp=2))[f"{LAYER}.self_attn.q_norm.weight"]
    assert (norm.placement, norm.partial_gradient, norm.reordered) == ("Replicate", True, False)
    fused = rows(plan_for(tiny_on_meta("phi3"), tp=2))[f"{LAYER}.self_attn.qkv_proj.weight"]
    assert (fused.placement, fused.partial_gradient, fused.reordered) == ("Shard(0)", False, True)


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="transformers 4 stacks no experts in a tensor")
def test_experts_are_counted_in_three_dims():
    experts = rows(plan_for(tiny_on_meta("qwen3_moe"), tp=2))[f"{LAYER}.mlp.experts.down_proj"]
    assert (experts.shape, experts.local_shape, experts.shape_over(3)) == ((4, 64, 32), (4, 64, 16), (2, 64, 16))
    assert experts.rank_bytes_over(3) == 2 * 2 * 64 * 16 * 4


def test_largest_piece_of_an_uneven_cut_is_counted_twice_over():
    row = rows(plan_for(tiny_on_meta("llama", vocab_size=129), tp=4))["lm_head.weight"]
    assert (row.local_shape, row.shape_over(4)) == ((33, 64), (9, 64))
    assert row.rank_bytes_over(4) == 9 * 64 * 4


def test_tied_parameter_is_one_parameter(gemma):
    tie = ["model.language_model.embed_tokens.weight", "lm_head.weight"]
    told = json.loads(as_json(gemma))
    assert told["ties"] == [tie]
    assert "lm_head.weight" not in {row["name"] for row in told["parameters"]}
    assert f"tied: {' = '.join(tie)}" in as_text(gemma)


def test_vision_tower_is_one_line_and_every_row_where_asked_for(gemma):
    tower = [row for row in gemma.parameters if row.name.startswith("model.vision_tower.")]
    lines = [line for line in as_text(gemma).splitlines() if line.startswith("model.vision_tower")]
    held = sum(row.rank_bytes for row in tower)
    (line,) = lines
    assert line.split() == [
        "model.vision_tower.*",
        f"{sum(r.count for r in tower)}",
        "Replicate",
        f"{held:,}",
        "no",
        "rule",
    ]
    every = as_text(gemma, every_row=True)
    assert all(row.name.rpartition(".*.")[2] in every for row in tower)
    assert len(every.splitlines()) > len(as_text(gemma).splitlines()) + len(tower) - 5


def test_what_stays_whole_is_listed_by_the_largest_module_that_holds_nothing_else(gemma):
    whole = {part["where"]: part for part in json.loads(as_json(gemma, dp=2))["whole"]}
    assert {"model.vision_tower", "model.multi_modal_projector", "model.language_model.norm"} <= whole.keys()
    assert whole["model.language_model.layers.*.self_attn.q_norm"] == {
        "where": "model.language_model.layers.*.self_attn.q_norm",
        "count": 2,
        "tp_rank_bytes": 2 * 16 * 4,
        "rank_bytes": 2 * 8 * 4,
    }
    assert next(iter(whole)) == "model.vision_tower"


def test_text_of_llama_is_aligned_and_fits_a_terminal(llama):
    text = as_text(llama, dp=2)
    head, table, totals, collectives, rest = (block.splitlines() for block in text.split("\n\n"))
    assert head[0] == "plan for transformers.models.llama.modeling_llama.LlamaForCausalLM, tp=4, dp=2"
    assert max(map(len, [*table[2:], *totals, *collectives, *rest])) <= 120
    place = table[0].index("placement")
    assert {line[place:].split()[0] for line in table[1:] if len(line) > place} == {"Shard(0)", "Shard(1)", "Replicate"}
    (down,) = [line for line in table if "down_proj" in line]
    bytes_held = f"{32 * 2048 * 3584 * BF16:,}"
    assert down.split()[:-1] == f"mlp.down_proj.weight 32 Shard(1) [4096, 14336] [4096, 3584] {bytes_held}".split()
    assert "a rank holds 1.9 GiB (12.5%): 3.7 GiB over tp=4, which FSDP shards over dp=2" in totals


def test_one_rank_says_nothing_of_tensor_parallelism():
    plan = plan_for(tiny_on_meta("llama"), tp=1)
    text = as_text(plan, dp=4)
    assert plan.collectives == ()
    assert "collectives" not in text
    assert "whole on every" not in text
    assert json.loads(as_json(plan, dp=4))["whole"] == []
    assert "whole on every" not in as_html(plan)


def test_document_has_the_keys_that_its_description_lists(gemma):
    told = json.loads(as_json(gemma, dp=2))
    assert told["format"] == 1
    described = set(document.__doc__.replace(",", " ").split())
    keys = {
        key
        for group in (told, told["total"], *(told[name][0] for name in ("parameters", "whole", "collectives")))
        for key in group
    }
    assert keys <= described


def test_document_adds_up(gemma):
    told = json.loads(as_json(gemma, dp=3))
    for what in ("global_bytes", "tp_rank_bytes", "rank_bytes"):
        assert told["total"][what] == sum(row[what] for row in told["parameters"])
    whole = [row for row in told["parameters"] if not row["sharded"]]
    assert told["total"]["whole_bytes"] == sum(row["tp_rank_bytes"] for row in whole)
    assert told["total"]["whole_bytes"] == sum(part["tp_rank_bytes"] for part in told["whole"])
    partial = [row for row in whole if row["partial_gradient"]]
    assert told["total"]["partial_gradient_bytes"] == sum(row["tp_rank_bytes"] for row in partial) > 0


def test_problems_and_what_was_accepted_of_them_are_in_every_form():
    custom = {f"{LAYER}.mlp.up_projection": "colwise", f"{LAYER}.mlp.up_proj": "colwise"}
    model = tiny_on_meta("llama", intermediate_size=97)
    plan = plan_for(model, tp=2, custom=custom, allow=["unmatched_pattern"])
    text, page, told = as_text(plan), as_html(plan), json.loads(as_json(plan))
    kinds = {problem["kind"]: problem for problem in told["problems"]}
    accepted, refused = kinds["unmatched_pattern"], kinds["indivisible"]
    assert (accepted["allowed"], refused["allowed"]) == (True, False)
    assert f"allowed: {accepted['message']}" in text
    assert f"PROBLEM: {refused['message']}" in text
    listed = Page.of(page).text.partition("Problems")[2].partition("a rank holds")[0]
    assert refused["message"] in listed
    assert accepted["message"] not in listed


class Page(HTMLParser):
    """Checks that elements nest; collects text, and attributes that could reach outside."""

    VOID = frozenset({"meta", "input", "wbr"})

    def __init__(self):
        super().__init__()
        self.open, self.pieces, self.reaching, self.policy, self.names = [], [], [], "", []

    @classmethod
    def of(cls, page):
        parsed = cls()
        parsed.feed(page)
        parsed.close()
        assert parsed.open == []
        return parsed

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        attributes = dict(attrs)
        self.reaching += [value for name, value in attrs if name in {"src", "href", "action"}]
        self.policy = attributes.get("content", "") if "http-equiv" in attributes else self.policy
        if tag == "code":
            self.names.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in {"style", "script"}:
            self.pieces.append(data)
        if self.open and self.open[-1] == "code":
            self.names[-1] += data

    @property
    def text(self):
        return "".join(self.pieces)


def test_page_is_whole_holds_every_parameter_and_reaches_for_nothing(gemma):
    page = as_html(gemma, dp=2)
    parsed = Page.of(page)
    assert {row.name for row in gemma.parameters} <= set(parsed.names)
    assert all(f"{row.rank_bytes_over(2):,}" in parsed.text for row in gemma.parameters)
    assert parsed.reaching == []
    assert not any(word in page for word in ("http://", "https://", "url(", "@import"))


def test_page_runs_its_own_script_and_no_other(gemma):
    page = as_html(gemma)
    script = page.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in Page.of(page).policy
    hostile = "</code><script>alert('x')</script>"
    named = dataclasses.replace(gemma, source=hostile, model_name=hostile, notes=(hostile,), passed_over=(hostile,))
    page = as_html(named)
    assert page.count("<script>") == 1
    assert hostile in Page.of(page).text


@pytest.mark.parametrize("dp", [0, 1.5])
@pytest.mark.parametrize("form", [as_text, as_json, as_html])
def test_dp_must_be_a_number_of_ranks(llama, form, dp):
    with pytest.raises(PlanError, match=r"dp is .*: it must be a whole number of ranks"):
        form(llama, dp=dp)


def test_model_without_embedding_or_layers_is_explained_too():
    plan = plan_for(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), tp=2, custom={"0": "colwise", "1": "rowwise"})
    told = [(row.where, row.forward, row.backward, row.backward_bytes) for row in plan.collectives]
    assert told == [("0", {}, {"all_reduce": 1}, 4 * 4), ("1", {"all_reduce": 1}, {}, 0)]
    assert "a rank holds" in plan.explain()
    Page.of(as_html(plan))


def test_what_a_plan_says_does_not_depend_on_weights():
    assert as_json(plan_for(tiny("qwen3"), tp=2)) == as_json(plan_for(tiny_on_meta("qwen3"), tp=2))


def test_stages_of_a_pipeline_are_shown_in_every_form_and_add_up():
    model = tiny_on_meta("qwen3", num_hidden_layers=4, tie_word_embeddings=True)
    plan = plan_for(model, tp=2)
    stages = stage_rows(model, plan, pp=2, stages_per_rank=1, dp=2)
    assert [(stage.pp_rank, stage.layers, stage.sends) for stage in stages] == [(0, 2, 64), (1, 2, 0)]
    document = json.loads(as_json(plan, dp=2, stages=stages))
    words = 128 * 64 * 4  # both stages hold the tied weight
    assert sum(stage["global_bytes"] for stage in document["stages"]) == document["total"]["global_bytes"] + words
    assert sum(stage["rank_bytes"] for stage in document["stages"]) == document["total"]["rank_bytes"] + words // 4
    assert document["stages"][1]["copies"] == ["lm_head.weight"]
    text, page = as_text(plan, dp=2, stages=stages), as_html(plan, dp=2, stages=stages)
    for said in ("model.embed_tokens, model.layers.0 to 1", "lm_head.weight of stage 1 is tied", "64 features a token"):
        assert said in text
        assert said in page
    assert json.loads(as_json(plan))["stages"] == []


def test_command_shows_the_stages_of_a_pipeline(tmp_path, capsys):
    tiny_on_meta("llama", num_hidden_layers=8).config.save_pretrained(tmp_path)
    assert main(["explain", str(tmp_path), "--tp", "2", "--pp", "2", "--stages-per-rank", "2"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.endswith("6 to 7, model.norm, lm_head"))
    assert row.split()[:2] == ["3", "1"]  # the fourth stage, on the second rank
    assert main(["explain", str(tmp_path), "--pp", "9"]) == 2
    assert "9 pipeline stages need as many layers" in capsys.readouterr().err
