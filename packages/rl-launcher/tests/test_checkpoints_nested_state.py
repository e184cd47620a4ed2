"""Claims about nested state: what is saved as JSON and tensors comes back as it was, and nothing is pickled."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_launcher.checkpoints.nested_state import pack, unpack

STATES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.integers(0, 3).map(torch.ones),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(["a", "b", "$tensor", "$tuple", "$mapping"]), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(one, other):
    if torch.is_tensor(one):
        return torch.is_tensor(other) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@given(STATES)
@settings(deadline=None)
def test_nested_state_comes_back_from_json_and_tensors_as_it_was(state):
    packed, tensors = pack(state, prefix="state")
    assert same(unpack(json.loads(json.dumps(packed)), tensors), state)


def test_what_would_need_a_pickle_is_refused():
    with pytest.raises(TypeError, match="state of type set cannot be saved"):
        pack({"a": {1}}, prefix="state")
