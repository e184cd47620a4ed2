import dataclasses
import math

import pytest

from rl_generation import Sampling


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", -3),
        ("max_new_tokens", 8.0),
        ("max_new_tokens", True),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.5),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("top_k", -1),
        ("top_k", 2.5),
        ("stop_token_ids", (2, -1)),
        ("stop_token_ids", ("2",)),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 1.0),
    ],
)
def test_a_value_out_of_range_is_refused_by_name_and_value(field, value):
    with pytest.raises(ValueError, match=field) as refusal:
        Sampling(**({"max_new_tokens": 8} | {field: value}))
    assert f"got {field}={value!r}" in str(refusal.value)


def test_only_temperature_zero_is_greedy():
    assert Sampling(max_new_tokens=1, temperature=0).greedy
    assert not Sampling(max_new_tokens=1, temperature=1e-6).greedy


def test_a_sampling_cannot_be_changed_or_given_by_position():
    sampling = Sampling(max_new_tokens=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        sampling.top_k = 3
    with pytest.raises(TypeError, match="positional"):
        Sampling(8)
