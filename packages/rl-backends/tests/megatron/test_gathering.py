"""Claims about gathering whole tensors: on every rank and bit for bit, and no rank is left waiting."""

import functools

import pytest
import torch

from rl_backends.errors import ModelError, RankError
from rl_backends.megatron.config import MegatronConfig

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
LAYOUTS = {
    "one rank": (1, {}),
    "TP2": (2, {"tensor_model_parallel_size": 2}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "TP2 x PP2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "TP2 x EP2": (
        4,
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "sequence_parallel": True},
    ),
}


def make_model(world, layout):
    """Weights that bfloat16 holds exactly, a part of them -0.0."""
    family, other = ("Qwen3Moe", MIXTURE) if "EP" in layout else ("Qwen2", {})
    model = world.make_model(family, pad_token_id=None, **other)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
        parameter.data.view(-1)[::3] = -0.0
    return model


def gathered(gatherer):
    return {name: tensor.clone() for name, tensor in gatherer.tensors()}


def one_rank(world, layout, rank):
    from rl_backends.megatron.model import MegatronModel
    from rl_backends.megatron.weights import Gatherer, from_hugging_face

    hugging_face = make_model(world, layout)
    config = MegatronConfig(precision="bfloat16", **LAYOUTS[layout][1])
    model = MegatronModel(hugging_face, config, fill=functools.partial(from_hugging_face, hugging_face))
    gatherer = Gatherer(model.held, model.shapes)
    seen = {"weights": gathered(gatherer)}
    seen |= {name: told(functools.partial(wrong, gatherer, rank)) for name, wrong in WRONG.items()}
    seen["after all"] = gathered(gatherer)
    seen["lacking"] = told(lambda: Gatherer(model.held, {**model.shapes, "another.weight": (2,)}))
    model.close()
    return seen


def told(action):
    try:
        action()
    except (MemoryError, ModelError, RankError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def stops_early(gatherer, rank):
    """Each rank after another number of tensors."""
    for number, _ in enumerate(gatherer.tensors()):
        if number == 1 + rank:
            break


def has_no_memory(gatherer, rank):
    """For the third tensor, on rank 0."""
    zeros, third = torch.zeros, list(gatherer._shapes.values())[2]

    def scarce(shape, **options):
        if rank == 0 and shape == third:
            raise MemoryError("not enough")
        return zeros(shape, **options)

    torch.zeros = scarce
    try:
        gathered(gatherer)
    finally:
        torch.zeros = zeros


WRONG = {"stops early": stops_early, "no memory": has_no_memory}


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request):
    return request.param


@pytest.fixture(scope="module")
def found(layout, world, on_ranks_once):
    return on_ranks_once(functools.partial(one_rank, world, layout), ranks=LAYOUTS[layout][0])


@pytest.fixture(scope="module")
def weights(layout, world):
    return {name: parameter.detach() for name, parameter in make_model(world, layout).named_parameters()}


def assert_same_bits(ours, theirs, *, dtype):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == dtype, name
        assert torch.equal(tensor.flatten().view(torch.uint8), theirs[name].to(dtype).flatten().view(torch.uint8)), name


def test_weights_are_whole_on_every_rank_bit_for_bit(found, weights):
    assert any(torch.signbit(weight[weight == 0]).all() and (weight == 0).any() for weight in weights.values())
    for each in found:
        assert_same_bits(each["weights"], weights, dtype=torch.bfloat16)


def test_a_rank_that_stops_early_or_fails_leaves_none_waiting(found, weights):
    first, *others = found
    assert {each["stops early"] for each in found} == {"nothing"}
    assert first["no memory"] == "MemoryError: not enough"
    for other in others:
        assert other["no memory"] == "RankError: rank 0 failed: MemoryError: not enough"
    assert_same_bits(first["after all"], weights, dtype=torch.bfloat16)


def test_what_no_rank_holds_is_told_by_name_on_every_rank(found):
    for each in found:
        assert "do not hold the whole of another.weight" in each["lacking"]
