"""Weights of a sharded model, saved any way and loaded anywhere, are those of the unsharded model, bit for bit."""

import pytest
import transformers
from parallel_plans_cases import hybrids, models

FUSED = [
    "phi3",
    "glm4",
    "qwen3_moe",
    "granitemoe",
    "granitemoehybrid",
    "bamba",
    "falcon_h1",
    "falcon_h1_normed",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_next",
    "qwen3_5_moe",
    "lfm2",
]

EXPERTS_ARE_LISTS = transformers.__version__.startswith("4.")
QUICK = ("phi3", "qwen3_moe")  # the others run nightly


def exists(architecture):
    return architecture in models.ARCHITECTURES or hybrids.classes(architecture) is not None


@pytest.mark.parametrize(
    "architecture",
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in ("gemma3", *FUSED)],
)
def test_weights_are_the_unsharded_ones_wherever_they_are_loaded(ranks, tmp_path, architecture):
    if not exists(architecture):
        pytest.skip("this release of transformers has none")
    fused = architecture in FUSED and not (architecture == "qwen3_moe" and EXPERTS_ARE_LISTS)
    results = ranks(
        "checkpoints:everywhere", 2, architecture=architecture, shape=(1, 2), layouts=[(2, 1)], folder=str(tmp_path)
    )
    assert all((result.pop("fused") > 0) == fused for result in results)
    assert [{road: wrong for road, wrong in result.items() if wrong} for result in results] == [{}, {}]


@pytest.mark.parametrize(
    "architecture", ["phi3", *(pytest.param(each, marks=pytest.mark.slow) for each in ("qwen3_moe", "bamba"))]
)
def test_weights_travel_between_meshes_of_dp_and_tp(ranks, tmp_path, architecture):
    results = ranks(
        "checkpoints:everywhere",
        4,
        architecture=architecture,
        shape=(2, 2),
        layouts=[(4, 1), (1, 4)],
        folder=str(tmp_path),
        num_key_value_heads=4,
    )
    assert all(result.pop("fused") for result in results)
    assert [{road: wrong for road, wrong in result.items() if wrong} for result in results] == [{}] * 4


@pytest.mark.parametrize(
    ("architecture", "fused"),
    [
        ("phi3", "qkv_proj.weight"),
        pytest.param(
            "qwen3_moe",
            "experts.gate_up_proj",
            marks=pytest.mark.skipif(EXPERTS_ARE_LISTS, reason="transformers 4 fuses nothing of these experts"),
        ),
    ],
)
def test_optimizer_state_of_fused_weights_comes_back_or_is_refused_by_name(ranks, tmp_path, architecture, fused):
    for result in ranks(
        "checkpoints:optimizer_state",
        2,
        architecture=architecture,
        shape=(1, 2),
        other_shape=(2, 1),
        folder=str(tmp_path),
    ):
        assert result["same"]
        assert all("ize mismatch" in message and fused in message for message in result["refusals"])


@pytest.mark.parametrize("architecture", ["phi3"])
def test_state_dict_may_be_copied_and_nothing_computes_with_dealt_rows(ranks, tmp_path, architecture):
    for result in ranks("checkpoints:unusual_roads", 2, architecture=architecture, folder=str(tmp_path)):
        assert all("take full_tensor() first" in message for message in result.pop("computing"))
        assert result.pop("placements") == "(DealtRows(),)"
        assert {road: wrong for road, wrong in result.items() if wrong} == {}
