"""Manifests: one hash for what is equal, and nothing accepted that a planner would have to guess about."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_refit.errors import RefitError
from rl_refit.layout import Layout, Region
from rl_refit.manifest import Manifest, TensorMeta, merge_manifests


def meta(name="w", **changes):
    given = {"name": name, "shape": (4, 2), "dtype": "bfloat16", "layout": Layout.whole()}
    return TensorMeta(**{**given, **changes})


def boxes(**held):
    """Boxes of one dim: `r0=[(2, 3)]` is elements 2, 3, 4 on rank 0."""
    return Layout.from_boxes(
        {int(rank[1:]): [Region("", (a,), (n,)) for a, n in spans] for rank, spans in held.items()}
    )


def test_the_hash_is_the_same_on_every_machine():
    sharded = Layout.from_placements((2, 1), (1, None), ranks=(3, 4))
    manifest = Manifest((meta("embed", layout=sharded), meta("head", tied_to="embed"), meta("cos", feeding="derived")))
    canonical = (
        '["rl-refit manifest 2",[[[2,1],[1,null],[],[3,4],null],[[],[],[],[0],null]],'
        '[["embed",[4,2],"bfloat16",0,null,"fed"],["head",[4,2],"bfloat16",1,"embed","fed"],'
        '["cos",[4,2],"bfloat16",1,null,"derived"]]]'
    )
    assert manifest.to_json() == canonical
    assert manifest.hash() == hashlib.sha256(canonical.encode()).hexdigest()


layouts = st.one_of(
    st.builds(Layout.whole, st.integers(0, 3)),
    st.builds(
        lambda shape, dims, strided: Layout(
            mesh_shape=shape, sharded_dims=dims, strided_axes=strided, ranks=tuple(range(shape[0] * shape[1]))
        ),
        st.tuples(st.integers(1, 3), st.integers(1, 3)),
        st.tuples(*[st.one_of(st.none(), st.integers(0, 1))] * 2),
        st.sampled_from([(), (0,)]),
    ),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), max_size=3, unique=True).map(
        lambda rows: Layout.from_boxes({2: [Region("", row, (1, 1)) for row in rows], 0: []})
    ),
)


@given(st.lists(layouts, min_size=1, max_size=4), st.sampled_from(["fed", "constant"]))
def test_a_manifest_comes_back_from_json_as_it_was(drawn, feeding):
    metas = [meta(f"w{number}", layout=layout, feeding=feeding) for number, layout in enumerate(drawn)]
    manifest = Manifest((*metas, meta("tied", tied_to="w0", feeding=feeding)))
    read = Manifest.from_json(manifest.to_json())
    assert read == manifest
    assert read.hash() == manifest.hash()
    assert [one.regions() for one in read.tensors] == [one.regions() for one in manifest.tensors]


GOOD = json.loads(Manifest((meta(layout=boxes(r0=[(0, 4)]), shape=(4,)),)).to_json())


def replaced(path, value):
    """GOOD with `value` at `path`."""
    root = json.loads(json.dumps(GOOD))
    *way, last = path
    place = root
    for step in way:
        place = place[step]
    place[last] = value
    return json.dumps(root)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "{}",
        "7",
        "[1, 2]",
        replaced([0], "rl-refit manifest 1"),
        *(replaced([1, 0], value) for value in (None, [], [[], [], [], [0]], [[2], [0], [], [0, 1.5], None])),
        replaced([1, 0, 4], [[[[0], [-4]]]]),
        replaced([1, 0, 4], [[[[0], [4]], [[3], [1]]]]),
        *(replaced([2, 0, 0], value) for value in (None, 7, ["w"])),
        *(replaced([2, 0, 1], value) for value in ("44", 4, [4.0], [-4], [True], None)),
        *(replaced([2, 0, 2], value) for value in ("bf16", "Tensor", 1, None)),
        *(replaced([2, 0, 3], value) for value in (1, -1, "0", None)),
        *(replaced([2, 0, 4], value) for value in ("w", "v", 3)),
        *(replaced([2, 0, 5], value) for value in ("Fed", None, 1)),
    ],
)
def test_what_is_no_manifest_is_refused(text):
    with pytest.raises(RefitError, match=r"no manifest: |both sides need the same release"):
        Manifest.from_json(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "v"},
        {"shape": (2, 4)},
        {"dtype": "float16"},
        {"layout": Layout.whole(1)},
        {"layout": Layout.from_placements((2,), (0,))},
        {"layout": Layout.from_placements((2,), (None,))},
        {"layout": Layout.from_boxes({0: [Region("w", (0, 0), (4, 2))]})},
        {"layout": Layout(mesh_shape=(2, 2), sharded_dims=(0, 0), ranks=(0, 1, 2, 3))},
        {"layout": Layout(mesh_shape=(2, 2), sharded_dims=(0, 0), strided_axes=(0,), ranks=(0, 1, 2, 3))},
        {"feeding": "derived"},
        {"feeding": "constant"},
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


def test_a_shape_or_a_feeding_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"'w' has \(4, -1\)"):
        meta(shape=(4, -1))
    with pytest.raises(ValueError, match="'w' has 'frozen'"):
        meta(feeding="frozen")


@pytest.mark.parametrize(
    ("changes", "travels"),
    [({}, True), ({"tied_to": "v"}, False), ({"feeding": "derived"}, False), ({"feeding": "constant"}, False)],
)
def test_only_what_is_fed_and_not_tied_travels(changes, travels):
    assert meta(**changes).travels is travels


def test_a_dtype_that_torch_does_not_have_is_refused():
    with pytest.raises(ValueError, match="'bf16' is no torch dtype; 'w' needs one"):
        meta(dtype="bf16")


def test_ranks_are_those_of_all_layouts():
    assert Manifest(
        (meta("a", layout=Layout.whole(5)), meta("b", layout=Layout.from_placements((2,), (0,))))
    ).ranks == (0, 1, 5)


def test_plain_tensors_that_every_rank_has_whole_are_replicated():
    merged = merge_manifests([Manifest((meta(layout=Layout.whole(rank)),)) for rank in range(2)])
    whole = Region("w", (0, 0), (4, 2))
    assert merged.by_name["w"].regions() == {0: (whole,), 1: (whole,)}


def test_the_stages_of_a_pipeline_add_up_in_the_order_of_the_ranks():
    stages = [("embed", "layers.0"), ("layers.1", "head")]
    merged = merge_manifests(
        [Manifest(tuple(meta(n, layout=Layout.whole(rank)) for n in names)) for rank, names in enumerate(stages)]
    )
    assert [(one.name, one.layout.ranks) for one in merged.tensors] == [
        ("embed", (0,)),
        ("layers.0", (0,)),
        ("layers.1", (1,)),
        ("head", (1,)),
    ]
    assert merged.ranks == (0, 1)


def test_a_layout_that_all_ranks_agree_on_is_kept():
    sharded = Manifest((meta(layout=Layout.from_placements((2,), (0,))),))
    assert merge_manifests([sharded, sharded]) == sharded


def test_boxes_of_the_ranks_are_put_together():
    halves = [boxes(r0=[(0, 3)]), boxes(r1=[(3, 1), (5, 2)])]
    merged = merge_manifests([Manifest((meta(shape=(7,), layout=half),)) for half in halves])
    assert merged.by_name["w"].layout == boxes(r0=[(0, 3)], r1=[(3, 1), (5, 2)])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"shape": (2, 4)}, r"rank 0 and rank 1 disagree on 'w': \(\(4, 2\), .* and \(\(2, 4\), "),
        ({"dtype": "float32"}, "disagree on 'w'.*bfloat16.*float32"),
        ({"feeding": "constant"}, "disagree on 'w'.*constant"),
        ({"layout": Layout.from_placements((2,), (0,))}, "disagree on what rank 0 holds of 'w'"),
    ],
)
def test_ranks_that_disagree_are_refused(changes, complaint):
    with pytest.raises(RefitError, match=complaint) as caught:
        merge_manifests([Manifest((meta(),)), Manifest((meta(**changes),))])
    assert caught.value.tensor == "w"
