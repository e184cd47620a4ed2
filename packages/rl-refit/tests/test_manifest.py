from __future__ import annotations

import dataclasses
import hashlib

import pytest

from rl_refit import Layout, Manifest, TensorMeta


def meta(name="w", **changes):
    given = {"name": name, "shape": (4, 2), "dtype": "bfloat16", "layout": Layout.whole()}
    return TensorMeta(**{**given, **changes})


def test_the_hash_is_the_same_on_every_machine():
    sharded = Layout.from_placements((2, 1), (1, None), ranks=(3, 4))
    manifest = Manifest((meta("embed", layout=sharded), meta("head", tied_to="embed")))
    canonical = (
        '["rl-refit manifest 1",[["embed",[4,2],"bfloat16",null,[2,1],[1,null],[3,4]],'
        '["head",[4,2],"bfloat16","embed",[],[],[0]]]]'
    )
    assert manifest.hash() == hashlib.sha256(canonical.encode()).hexdigest()


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "v"},
        {"shape": (2, 4)},
        {"dtype": "float16"},
        {"layout": Layout.whole(1)},
        {"layout": Layout.from_placements((2,), (0,))},
        {"layout": Layout.from_placements((2,), (None,))},
    ],
)
def test_the_hash_depends_on_every_field(changes):
    assert Manifest((meta(),)).hash() != Manifest((dataclasses.replace(meta(), **changes),)).hash()


def test_the_hash_depends_on_order_and_ties():
    one, other = meta("a"), meta("b")
    hashes = {
        Manifest(tensors).hash()
        for tensors in [(one, other), (other, one), (one, dataclasses.replace(other, tied_to="a"))]
    }
    assert len(hashes) == 3


def test_total_bytes_count_ties_and_replicas_once():
    replicated = meta("a", layout=Layout.from_placements((2,), (None,)))
    assert Manifest((replicated, meta("b", tied_to="a"), meta("c", shape=(), dtype="int64"))).total_bytes == 16 + 8


def test_a_name_twice_is_refused():
    with pytest.raises(ValueError, match="named more often: w"):
        Manifest((meta("w"), meta("w")))


def test_a_tie_to_nothing_or_to_a_tie_is_refused():
    with pytest.raises(ValueError, match="b -> a"):
        Manifest((meta("b", tied_to="a"),))
    with pytest.raises(ValueError, match="c -> b"):
        Manifest((meta("a"), meta("b", tied_to="a"), meta("c", tied_to="b")))


def test_a_dtype_that_torch_does_not_have_is_refused():
    with pytest.raises(ValueError, match="'bf16' is no torch dtype; 'w' needs one"):
        meta(dtype="bf16")


def test_ranks_are_those_of_all_layouts():
    assert Manifest(
        (meta("a", layout=Layout.whole(5)), meta("b", layout=Layout.from_placements((2,), (0,))))
    ).ranks == (0, 1, 5)
