"""Models that see, on two ranks: the language model is sharded, the vision tower is whole and listed."""

import pytest

ARCHITECTURES = ["gemma3", "llava", "mistral3", "qwen2_5_vl", "qwen3_vl"]
TOLERANCE = 1e-5


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_image_and_text_on_two_ranks_equal_one(ranks, architecture, sequence_parallel):
    results = ranks("vision:parity", 2, architecture=architecture, sequence_parallel=sequence_parallel)
    for result in results:
        assert result["source"] == "structure"
        assert result["logits_error"] < TOLERANCE
        assert max(result["gradient_errors"].values()) < TOLERANCE, result["gradient_errors"]
        assert result["kinds"] == ["('tp',)"]
    tower = "visual" if "qwen" in architecture else "vision_tower"
    assert tower in results[0]["whole"]


def test_prompt_without_an_image_leaves_the_tower_without_gradients(ranks):
    with_image, without = (
        ranks("vision:parity", 2, architecture="gemma3", with_image=each)[0]["gradient_errors"]
        for each in (True, False)
    )
    assert max(without.values()) < TOLERANCE
    towers = {name for name in with_image if "vision_tower" in name}
    assert towers
    assert not towers & without.keys()


def test_image_under_fsdp_too(ranks):
    (result, _) = ranks("vision:parity", 2, architecture="qwen3_vl", fsdp=True, sequence_parallel=True, accumulate=2)
    assert max(result["gradient_errors"].values()) < TOLERANCE
    assert result["kinds"] == ["('dp', 'tp')"]
