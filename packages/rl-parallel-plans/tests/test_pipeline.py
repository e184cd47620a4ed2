"""Pipeline stages against the plain model: which stage holds what, and loss, gradients and weights on real ranks."""

import copy

import pytest
import torch
import transformers
from parallel_plans_cases.models import tiny, tiny_on_meta, token_ids
from torch import nn

from rl_parallel_plans import PlanError, named_shards, plan_for, split_stages, stage_info
from rl_parallel_plans.pipeline.stages import boundary_of

TOLERANCE = 1e-5


def assert_exact(results):
    names = set()
    for result in results:
        assert max(result["gradient_errors"].values()) < TOLERANCE, result["gradient_errors"]
        assert max(result["weight_errors"].values()) < TOLERANCE, result["weight_errors"]
        for found, truth in (result["loss"], result["norms"], result["forward"]):
            assert found == pytest.approx(truth, rel=TOLERANCE)
        assert result["gradient_errors"].keys() == set(result["names"])
        names |= set(result["names"])
    assert names == set(results[0]["all_names"])


# -- Exact, whatever the model, the schedule and the mesh ------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {}),
        ("llama", {"schedule": "gpipe", "microbatches": 1}),
        ("qwen3", {"tied": True, "schedule": "gpipe", "optimizer_steps": 3}),
        ("gemma3", {"tied": True}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"schedule": "interleaved_1f1b", "options": {"activation_checkpointing": "full"}}),
        ("gemma3", {"tied": True, "schedule": "interleaved_1f1b", "hidden_loss": True}),
        ("qwen3", {"tied": True, "options": {"layers": [3, 1]}}),
        ("granite", {"tied": True}),  # scales embeddings and logits in the model's own code
        ("phi3", {}),
    ],
    ids=str,
)
def test_two_stages_compute_what_the_model_does(ranks, architecture, options):
    assert_exact(ranks("pipeline:parity", 2, architecture=architecture, shape=[2, 1, 1], **options))


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "qwen3_moe"])
def test_four_stages_compute_what_the_model_does(ranks, architecture):
    results = ranks("pipeline:parity", 4, architecture=architecture, shape=[4, 1, 1], tied=architecture == "qwen3")
    assert_exact(results)
    assert [result["stages"] for result in results] == [
        ["model.embed_tokens, model.layers.0"],
        ["model.layers.1"],
        ["model.layers.2"],
        ["model.layers.3, model.norm, lm_head"],
    ]


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("qwen3", {"tied": True, "hidden_loss": True, "optimizer_steps": 2}),
        ("gemma3", {"tied": True, "sequence_parallel": True}),
        ("qwen3_moe", {"schedule": "interleaved_1f1b"}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("qwen3", {"tied": True, "hidden_loss": True, "sequence_parallel": True, "length": 9}),
                ("phi3", {"hidden_loss": True}),
            )
        ),
    ],
    ids=str,
)
def test_stages_of_tensor_parallel_ranks_compute_what_the_model_does(ranks, architecture, options):
    assert_exact(ranks("pipeline:parity", 4, architecture=architecture, shape=[2, 1, 2], **options))


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("qwen3", {"tied": True, "accumulate": 2, "options": {"defer_gradient_sync": True}}),
        ("qwen3_moe", {"schedule": "interleaved_1f1b", "options": {"defer_gradient_sync": True}}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("qwen3", {"tied": True, "optimizer_steps": 3, "hidden_loss": True}),
                ("gemma3", {"tied": True, "accumulate": 2}),
                ("llama", {"schedule": "gpipe", "options": {"reshard_after_forward": False}}),
            )
        ),
    ],
    ids=str,
)
def test_stages_under_fsdp_compute_what_the_model_does(ranks, architecture, options):
    assert_exact(ranks("pipeline:parity", 4, architecture=architecture, shape=[2, 2, 1], **options))


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="experts are lists before transformers 5")
def test_experts_may_be_shared_out_inside_of_stages(ranks):
    for gradient, (norm, truth) in ranks("pipeline:experts_over_ranks", 4):
        assert gradient < TOLERANCE
        assert norm == pytest.approx(truth, rel=TOLERANCE)


def test_gradients_add_up_over_steps_of_other_shapes(ranks):
    assert max(ranks("pipeline:shapes_and_gradients_of_several_steps", 2)) < TOLERANCE


def test_a_rank_may_hold_all_stages_unsharded(ranks):
    ((loss, gradient),) = ranks("pipeline:one_rank_with_every_stage", 1)
    assert abs(loss) < TOLERANCE
    assert gradient < TOLERANCE


# -- Names and weights -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "schedule", "sequence_parallel"), [([2, 1, 2], "1f1b", True), ([2, 2, 1], "interleaved_1f1b", False)]
)
def test_weights_are_exported_under_their_plain_names(ranks, shape, schedule, sequence_parallel):
    results = ranks("pipeline:exported", 4, shape=shape, schedule=schedule, sequence_parallel=sequence_parallel)
    first, others = results[0], results[1:]
    assert list(first["together"]) == first["truth"]
    assert all(first["together"].values())
    assert not any(result["together"] for result in others)
    names = [name for result in results for name in result["by_stage"]]
    assert sorted(names) == sorted(first["truth"])  # each once, on one rank of its stage
    assert all(equal for result in results for equal in result["by_stage"].values())
    assert "lm_head.weight" in results[2]["with_copies"]
    assert "lm_head.weight" not in names
    assert {name for result in results for name in result["state_dict"]} == {*first["truth"], "lm_head.weight"}


# -- Stages from the structure ---------------------------------------------------------------------


def test_layers_are_divided_by_their_parameters_and_those_of_the_head():
    small, large = (
        tiny_on_meta("llama", num_hidden_layers=8, vocab_size=words, intermediate_size=96) for words in (8, 1500)
    )
    assert [len(stage_info(stage).layers) for stage in split_stages(small, 4)] == [2, 2, 2, 2]
    assert [len(stage_info(stage).layers) for stage in split_stages(large, 4)] == [2, 2, 3, 1]
    assert [len(stage_info(stage).layers) for stage in split_stages(small, 3, layers=[1, 5, 2])] == [1, 5, 2]


def test_a_stage_holds_its_own_layers_and_nothing_else():
    model = tiny_on_meta("gemma3", num_hidden_layers=5, tie_word_embeddings=True)
    stages = split_stages(model, 3, layers=[2, 2, 1])
    names = [[name for name, _ in stage.named_parameters()] for stage in stages]
    assert {name for each in names for name in each} == {
        name for name, _ in model.named_parameters(remove_duplicate=False)
    }
    assert sum(map(len, names)) == len(list(model.named_parameters())) + 1
    assert stage_info(stages[2]).tied == {
        "lm_head.weight": ((0, "model.embed_tokens.weight"), (2, "lm_head.weight")),
    }
    assert stage_info(stages[2]).copies == {"lm_head.weight"}
    assert stage_info(stages[0]).copies == frozenset()
    assert str(stage_info(stages[0])) == "model.embed_tokens, model.layers.0 to 1"
    assert str(stage_info(stages[2])) == "model.layers.4, model.norm, lm_head"
    assert stage_info(model) is None
    assert [shard.name for shard in named_shards(stages[1])] == names[1]


def run_in_turn(stages, function):
    hidden = None
    for stage in stages:
        boundary_of(stage).call = function
        hidden = stage(hidden)
    return hidden


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "cohere"])
def test_stages_in_turn_are_the_model_bit_for_bit_with_masks_and_positions(architecture):
    model = tiny(architecture, num_hidden_layers=4)
    ids = token_ids(2, 13)
    mask = (torch.arange(13) >= torch.tensor([[0], [3]])).long()
    arguments = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "use_cache": False,
    }
    truth = model(**arguments).logits
    found = run_in_turn(split_stages(model, 4), lambda model: model(**arguments).logits)
    assert torch.equal(found, truth)


def test_stages_are_found_in_a_model_of_any_make():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x, scale):
            return x + self.up(self.norm(x)).tanh() * scale, None  # a tuple, and the model reads its first

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleDict({"words": nn.Embedding(11, 8), "places": nn.Embedding(20, 8)})
            self.blocks = nn.ModuleList(Layer() for _ in range(3))
            self.last = nn.Linear(8, 11)

        def forward(self, ids):
            places = torch.arange(ids.shape[1], device=ids.device)
            x = self.parts["words"](ids) * 3 + self.parts["places"](places)
            for number, block in enumerate(self.blocks):
                out = block(x, scale=number + 1)
                x = out[0]
            return self.last(x)

    torch.manual_seed(0)
    model, ids = Model(), torch.arange(10).view(2, 5)
    stages = split_stages(model, 3)
    assert torch.equal(run_in_turn(stages, lambda model: model(ids)), model(ids))
    assert [str(stage_info(stage)) for stage in stages] == [
        "parts.words, parts.places, blocks.0",
        "blocks.1",
        "blocks.2, last",
    ]


def test_hooks_of_the_model_see_what_the_model_is_called_with():
    model = tiny("llama")
    seen = []
    model.register_forward_pre_hook(lambda _, __, kwargs: seen.append(sorted(kwargs)), with_kwargs=True)
    stages = split_stages(model, 2)
    for stage in stages:
        boundary_of(stage).take_model_hooks(stage)
    run_in_turn(stages, lambda model: model(input_ids=token_ids(1, 4), use_cache=False).logits)
    assert seen[-2:] == [["input_ids", "use_cache"]] * 2


# -- What is not a pipeline of layers is refused ---------------------------------------------------


class Residue(nn.Module):
    """A model that does to its layers what `between` says."""

    def __init__(self, between, layers=2):
        super().__init__()
        self.between = between
        self.embed_tokens = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(6, 7)

    def forward(self, ids):
        x = embedded = self.embed_tokens(ids)
        for number, layer in enumerate(self.layers):
            x = self.between(layer, x, embedded, number)
        return self.head(x)


class Outer(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.model = Residue(between)

    def forward(self, ids):
        return self.model(ids)


@pytest.mark.parametrize(
    ("between", "message"),
    [
        (
            lambda layer, x, embedded, number: layer(x, src_mask=embedded),
            r"layers\.0 is given, beside the hidden states, what was computed from model\.embed_tokens \(argument 'src",
        ),
        (
            lambda layer, x, embedded, number: layer(x, src_mask={"deep": [embedded.sum(-1)]}),
            r"computed from model\.embed_tokens \(argument 'src_mask'\['deep'\]\[0\]\)",
        ),
        (
            lambda layer, x, embedded, number: layer(x + number),
            "changes the hidden states itself between layers 0 and 1",
        ),
        (lambda layer, x, embedded, number: layer(layer(x)), r"calls model\.layers\.0 as layer number 1"),
        (lambda layer, x, embedded, number: layer(x) if number else x, r"calls model\.layers\.1 as layer number 0"),
        (lambda layer, x, embedded, number: x if number else layer(x), r"calls model\.head between layers 0 and 1"),
        (lambda layer, x, embedded, number: layer(x, src_mask={}), "by which one may leave something for another"),
        (lambda layer, x, embedded, number: layer(x)[1], "reads more than the hidden states"),
        (lambda layer, x, embedded, number: [*layer(x)].pop(), "its layers return several values"),
        (lambda layer, x, embedded, number: layer(x) if x.sum() > 0 else x, "looks at numbers that were computed from"),
        (lambda layer, x, embedded, number: layer(x).mystery, "AttributeError"),
    ],
)
def test_what_goes_past_the_hidden_states_is_refused_by_name(between, message):
    with pytest.raises(PlanError, match=message) as refusal:
        split_stages(Outer(between), 2)
    assert str(refusal.value).startswith("Outer cannot be split into pipeline stages: ")


def test_shapes_of_the_embedding_may_go_anywhere():
    def between(layer, x, embedded, number):
        return layer(x, src_mask=torch.zeros_like(embedded[0, :, :1]).expand(-1, embedded.shape[1]))

    assert len(split_stages(Outer(between), 2)) == 2


def test_models_that_are_no_stack_of_layers_are_refused():
    with pytest.raises(PlanError, match=r"holds no nn\.ModuleList of layers"):
        split_stages(nn.Sequential(nn.Linear(2, 2)), 2)
    with pytest.raises(PlanError, match=r"4 pipeline stages need as many layers, and model\.layers has 2"):
        split_stages(tiny_on_meta("llama"), 4)
    with pytest.raises(PlanError, match="number of pipeline stages is 0"):
        split_stages(tiny_on_meta("llama"), 0)
    with pytest.raises(PlanError, match=r"layers=\[1, 2\] does not divide 2 layers into 2 stages"):
        split_stages(tiny_on_meta("llama"), 2, layers=[1, 2])
    model = tiny_on_meta("llama")
    model.model.scale = nn.Parameter(torch.ones(1, device="meta"))
    with pytest.raises(PlanError, match=r"model\.scale is a parameter of a module that holds all layers"):
        split_stages(model, 2)
    shared = tiny_on_meta("llama")
    shared.model.layers[1] = shared.model.layers[0]
    with pytest.raises(PlanError, match="holds one layer several times"):
        split_stages(shared, 2)


def test_a_plan_of_a_stage_has_no_problems_that_the_model_has_not():
    from rl_parallel_plans.pipeline.schedule import plan_of_stage

    model = tiny_on_meta("gemma3", num_hidden_layers=4, tie_word_embeddings=True)
    plan = plan_for(model, tp=2, sequence_parallel=True)
    for stage in split_stages(model, 4):
        plan_of_stage(plan, stage).check(stage)


def test_what_does_not_go_together_is_refused_with_what_to_do(ranks):
    for messages in ranks("pipeline:refusals", 2):
        assert messages.pop("schedule") == "schedule is 'zero_bubble': it is one of gpipe, 1f1b, interleaved_1f1b"
        assert "interleaved_1f1b has several, the others have one" in messages.pop("stages of 1f1b")
        assert "interleaved_1f1b has several, the others have one" in messages.pop("stages of interleaved")
        assert messages.pop("stages") == "6 pipeline stages need as many layers, and model.layers has 4"
        assert messages.pop("layers").startswith("layers=[4, 1] does not divide 4 layers into 2 stages")
        assert messages.pop("axis").startswith("the mesh has no axis 'stage': its axes are ['pp', 'dp', 'tp']")
        assert messages.pop("rows").startswith("cp_axis is given")
        assert messages.pop("microbatches of 1f1b").startswith("1f1b cannot run 1 microbatches: Number of microbatches")
        assert messages.pop("no microbatches").startswith("there are no microbatches")
        assert "shapes [(8, 4), (8, 5)]" in messages.pop("shapes")
        assert "pass shape=(rows, tokens)" in messages.pop("no ids")
        assert "call Pipeline.step or Pipeline.forward" in messages.pop("by itself")
        assert not messages


def test_a_stage_can_be_copied():
    stages = [copy.deepcopy(stage) for stage in split_stages(tiny("llama"), 2)]
    ids = token_ids(1, 5)
    found = run_in_turn(stages, lambda model: model(input_ids=ids).logits)
    assert torch.equal(found, tiny("llama")(input_ids=ids).logits)
